"""Put what is under test in the place of torch's own.

For `ddp` and `sync_batchnorm`, the classes: every public name of torch's DistributedDataParallel and
SyncBatchNorm is bound to ours. For `collectives`, the process group: whoever asks c10d for "gloo" gets
a group of the `phalanx` backend, which goes on answering to the name gloo, because the tests choose by
that name. As a drop-in, both.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pathlib
import types
from typing import Any

import torch.nn as nn
import torch.nn.modules.batchnorm as batchnorm
import torch.nn.parallel as parallel
import torch.nn.parallel.distributed as parallel_distributed
from torch.distributed import distributed_c10d as c10d

from tests.peer.cases import Target, What
from tests.peer.whole_batch_norm import WholeBatchNorm


def mark_of(folder: pathlib.Path, what: What) -> pathlib.Path:
    """Return the file that a rank makes in the case's folder when it builds what is under test."""
    return folder / f"built_{what.value}"


def _mark(what: What) -> None:
    mark_of(pathlib.Path(os.environ["TEMP_DIR"]), what).touch()


@dataclasses.dataclass(frozen=True)
class Parts:
    """What is to be run: the classes, and the backend of the process groups called gloo."""

    ddp: type
    sync_batchnorm: type
    backend: str


def of_torch(tests: types.ModuleType) -> Parts:
    """Torch's own, which refuses models on the CPU with SyncBatchNorm for want of kernels; here there is one."""
    ddp = tests.DistributedDataParallel
    ddp._passing_sync_batchnorm_handle = lambda self, module: None
    return Parts(ddp, WholeBatchNorm, "gloo")


def of_phalanx(what: What, target: Target) -> Parts:
    """Ours, as far as the tests are about it; where they are about the group, models are wrapped as torch does."""
    phalanx = importlib.import_module("phalanx")
    if what is What.COLLECTIVES:
        return Parts(parallel.DistributedDataParallel, WholeBatchNorm, "phalanx")
    backend = "phalanx" if target is Target.DROP_IN else "gloo"
    return Parts(phalanx.DistributedDataParallel, phalanx.SyncBatchNorm, backend)


def install(parts: Parts, *test_modules: types.ModuleType) -> None:
    """Put `parts` in the place of torch's."""
    _install_class(parts.ddp, *test_modules)
    _install_sync_batchnorm(parts.sync_batchnorm)
    _install_group(parts.backend)
    if parts.backend != "gloo":
        _expect_no_asynchronous_events(*test_modules)


def _expect_no_asynchronous_events(*test_modules: types.ModuleType) -> None:
    """Take gloo off torch's lists of backends whose profiler events are marked as asynchronous.

    The tests look for that mark by the backend's name, which is gloo here only for choosing the tests. Ours
    records events too, but in the calling thread.
    """
    for module in test_modules:
        for name in ("", "CUDA_", "SEND_RECV_"):
            listed = getattr(module, f"{name}PROFILING_SUPPORTED_BACKENDS", None)
            if listed is not None and "gloo" in listed:
                listed.remove("gloo")


def _install_class(cls: type, *test_modules: types.ModuleType) -> None:
    """Bind torch's DistributedDataParallel to `cls`, which ignores the GPUs it is given."""
    build = cls.__init__

    @functools.wraps(build)
    def init(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        _mark(What.DDP)
        build(self, module, None, None, *args, **kwargs)

    cls.__init__ = init
    for place in (parallel, parallel_distributed, *test_modules):
        place.DistributedDataParallel = cls


def _install_sync_batchnorm(cls: type) -> None:
    build = cls.__init__

    @functools.wraps(build)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _mark(What.SYNC_BATCHNORM)
        build(self, *args, **kwargs)

    cls.__init__ = init
    for place in (nn, nn.modules, batchnorm):
        place.SyncBatchNorm = cls


def _is(backend: Any, name: str) -> bool:
    return isinstance(backend, str) and backend.lower() == name


def _install_group(backend: str) -> None:
    """Build groups of `backend` for whoever asks for gloo, under the name gloo.

    Asking for nccl means gloo, as there are no GPUs.
    """
    build, register = c10d._new_process_group_helper, c10d._register_pg_in_world
    gloo = c10d.Backend("gloo")

    @functools.wraps(build)
    def new_group(size: int, rank: int, ranks: list[int], asked: Any, *args: Any, **kwargs: Any) -> Any:
        if any(_is(asked, name) for name in ("gloo", "nccl", "undefined")):
            _mark(What.COLLECTIVES)
            asked = c10d.Backend(backend)
        return build(size, rank, ranks, asked, *args, **kwargs)

    @functools.wraps(register)
    def register_as_gloo(group: Any, *args: Any, **kwargs: Any) -> Any:
        if _is(kwargs["backend_name"], backend):
            kwargs["backend_name"] = gloo
            kwargs["backend_config"] = str(c10d.BackendConfig(gloo))
        return register(group, *args, **kwargs)

    c10d._new_process_group_helper = new_group
    c10d._register_pg_in_world = register_as_gloo
