"""The shop window: what `phalanx` offers is exactly its list, documented, and takes torch's arguments."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

import phalanx


@pytest.mark.parametrize("name", phalanx.__all__)
def test_every_public_name_loads_and_is_documented(name: str) -> None:
    value = getattr(phalanx, name)
    assert inspect.getdoc(value), f"{name} has no docstring"
    assert value.__module__.startswith("phalanx.")


@pytest.mark.parametrize("name", ["weigh", "accumulate", "micro_batches", "skip", "join", "no_sync", "sync_policy",
                                  "buffer_policy", "explain", "register_comm_hook", "remove_comm_hook",
                                  "check_replicas"])  # fmt: skip
def test_what_a_wrapped_model_offers_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(phalanx.DistributedDataParallel, name))


def test_nothing_else_is_offered() -> None:
    assert dir(phalanx) == phalanx.__all__
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        phalanx.nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (phalanx.DistributedDataParallel.__init__, torch.nn.parallel.DistributedDataParallel.__init__),
        (phalanx.DataParallel.__init__, torch.nn.DataParallel.__init__),
        (phalanx.SyncBatchNorm.__init__, torch.nn.SyncBatchNorm.__init__),
        (phalanx.SyncBatchNorm.convert_sync_batchnorm, torch.nn.SyncBatchNorm.convert_sync_batchnorm),
        (phalanx.DistributedDataParallel.join, torch.nn.parallel.DistributedDataParallel.join),
        (phalanx.DistributedDataParallel.register_comm_hook,
         torch.nn.parallel.DistributedDataParallel.register_comm_hook),
        (phalanx.DistributedSampler.__init__, torch.utils.data.distributed.DistributedSampler.__init__),
    ],
)  # fmt: skip
def test_arguments_are_those_of_torch_name_for_name(ours: object, theirs: object) -> None:
    mine, given = (inspect.signature(f).parameters for f in (ours, theirs))
    assert list(mine)[: len(given)] == list(given)
    assert [p.default for p in list(mine.values())[: len(given)]] == [p.default for p in given.values()]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(mine.values())[len(given) :])


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, phalanx; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_backend_is_known_whichever_is_imported_first() -> None:
    for first in ("import torch.distributed, phalanx", "import phalanx, torch.distributed"):
        code = first + "; print('phalanx' in torch.distributed.Backend.backend_list)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "True", first
