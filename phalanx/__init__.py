"""Phalanx: data-parallel training for PyTorch on many processes.

The names below are what people import; everything else is private, but for `phalanx.testing` and
`phalanx.transport`, which are for those who extend it. Names are loaded when they are first used, so that
`import phalanx` costs next to nothing and does not import torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "CollectiveTimeoutError": "phalanx.errors",
    "DistributedDataParallel": "phalanx.parallel.ddp",
    "DistributedSampler": "phalanx.data.sampler",
    "ExhaustedError": "phalanx.errors",
    "InternalError": "phalanx.errors",
    "Join": "phalanx.parallel.join",
    "MisuseError": "phalanx.errors",
    "PeerError": "phalanx.errors",
    "PeerFailedError": "phalanx.errors",
    "PeerLostError": "phalanx.errors",
    "PhalanxError": "phalanx.errors",
    "RankMismatchError": "phalanx.errors",
    "SpawnError": "phalanx.launch.spawn",
    "SyncBatchNorm": "phalanx.nn.sync_batchnorm",
    "clip_grad_norm_": "phalanx.parallel.agree",
    "get_logger": "phalanx.observe.logging",
    "init": "phalanx.group.world",
    "is_main": "phalanx.group.world",
    "local_rank": "phalanx.group.world",
    "mean": "phalanx.parallel.agree",
    "progress": "phalanx.observe.progress",
    "rank": "phalanx.group.world",
    "rank_zero_first": "phalanx.train.rank_zero",
    "rank_zero_only": "phalanx.train.rank_zero",
    "shutdown": "phalanx.group.world",
    "spawn": "phalanx.launch.spawn",
    "stop_if": "phalanx.parallel.agree",
    "world_size": "phalanx.group.world",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if "torch" in sys.modules:
    # Registers the backend name; where torch comes later, its `torch.backends` entry point does that.
    import_module("phalanx.group.autoload").register()
