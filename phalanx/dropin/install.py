"""Put Phalanx's classes where torch's were, in torch and in every module that has imported them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms import join as torch_join
from torch.nn.modules import batchnorm as torch_batchnorm
from torch.nn.parallel import distributed as torch_ddp
from torch.utils.data import distributed as torch_sampler

from phalanx.dropin import gloo
from phalanx.dropin.modules import DistributedSampler, SyncBatchNorm
from phalanx.launch.environment import DROP_IN_SAID, variable
from phalanx.parallel.ddp import DistributedDataParallel
from phalanx.parallel.join import Join

# As torch has them: looked up when this is imported, before anything is replaced.
_CLASSES: dict[str, dict[type, type]] = {
    "ddp": {torch_ddp.DistributedDataParallel: DistributedDataParallel, torch_join.Join: Join},
    "syncbn": {torch_batchnorm.SyncBatchNorm: SyncBatchNorm},
    "sampler": {torch_sampler.DistributedSampler: DistributedSampler},
    "gloo": {},
}
_SAID = {
    "ddp": "DistributedDataParallel",
    "syncbn": "SyncBatchNorm",
    "sampler": "DistributedSampler",
    "gloo": "the gloo backend",
}


def install(names: Sequence[str]) -> tuple[str, ...]:
    """Replace what `names` says, and have rank 0 say so once; returns the names."""
    _rebind({id(old): new for name in names for old, new in _CLASSES[name].items()})
    if "gloo" in names:
        gloo.install()
    if names:
        _announce(_sentence([_SAID[name] for name in names]))
    return tuple(names)


def _rebind(replacements: dict[int, type]) -> None:
    """Bind every name that means one of the old classes to the new one, in all modules but our own."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == "phalanx":
            continue
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)])


def _sentence(parts: Sequence[str]) -> str:
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    verb = "is" if len(parts) == 1 else "are"
    return f"phalanx: drop-in: {listed} of torch {verb} replaced by Phalanx's"


def _announce(text: str) -> None:
    """Print `text` on rank 0, once for it and all its children: now, or when the world is made."""

    def say() -> None:
        if not variable(DROP_IN_SAID, ""):
            os.environ[DROP_IN_SAID] = "1"
            print(text, file=sys.stderr, flush=True)

    rank = variable("RANK", "")
    if rank == "0":
        say()
    elif not rank:
        _when_rank_zero(say)


def _when_rank_zero(say: Callable[[], None]) -> None:
    update = c10d._update_default_pg

    def update_and_say(group: torch.distributed.ProcessGroup | None) -> None:
        update(group)
        if group is not None and group.rank() == 0:
            say()

    c10d._update_default_pg = update_and_say  # type: ignore[assignment]  # names of arguments
