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
    "DataParallel": "phalanx.parallel.data_parallel",
    "DistributedDataParallel": "phalanx.parallel.ddp",
    "DistributedSampler": "phalanx.data.sampler",
    "ExhaustedError": "phalanx.errors",
    "InternalError": "phalanx.errors",
    "Join": "phalanx.parallel.join",
    "MisuseError": "phalanx.errors",
    "MisuseWarning": "phalanx.errors",
    "PeerError": "phalanx.errors",
    "PeerFailedError": "phalanx.errors",
    "PeerLostError": "phalanx.errors",
    "PerRankState": "phalanx.data.sharded",
    "PhalanxError": "phalanx.errors",
    "RankMismatchError": "phalanx.errors",
    "ReplicaDriftError": "phalanx.errors",
    "ScaledLR": "phalanx.train.schedule",
    "ShardedIterable": "phalanx.data.iterable",
    "ShardedSampler": "phalanx.data.sharded",
    "SpawnError": "phalanx.launch.spawn",
    "SyncBatchNorm": "phalanx.nn.sync_batchnorm",
    "batch_plan": "phalanx.train.schedule",
    "clip_grad_norm_": "phalanx.parallel.agree",
    "file_lock": "phalanx.train.files",
    "gather": "phalanx.data.gather",
    "get_logger": "phalanx.observe.logging",
    "init": "phalanx.group.world",
    "is_main": "phalanx.group.world",
    "loader": "phalanx.data.loader",
    "local_rank": "phalanx.group.world",
    "mean": "phalanx.parallel.agree",
    "pipeline_stages": "phalanx.parallel.split",
    "progress": "phalanx.observe.progress",
    "rank": "phalanx.group.world",
    "rank_zero_first": "phalanx.train.rank_zero",
    "rank_zero_only": "phalanx.train.rank_zero",
    "run_folder": "phalanx.train.files",
    "seed": "phalanx.train.seed",
    "shutdown": "phalanx.group.world",
    "silence": "phalanx.misuse",
    "spawn": "phalanx.launch.spawn",
    "split_over": "phalanx.parallel.split",
    "stop_if": "phalanx.parallel.agree",
    "trace": "phalanx.observe.trace",
    "tracker": "phalanx.train.trackers.tracker",
    "world_size": "phalanx.group.world",
}

_PACKAGES = ("checkpoint",)  # used as phalanx.checkpoint.save(...)
_WITHOUT_TORCH = ("phalanx.errors", "phalanx.launch.")

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if name in _PACKAGES:
        import_module("torch")
        return import_module(f"phalanx.{name}")
    if home is None:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    if not home.startswith(_WITHOUT_TORCH):
        import_module("torch")  # before any module of ours: at the end of its import it may load the drop-in
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if "torch" in sys.modules:
    # Registers the backend name; where torch comes later, its `torch.backends` entry point does that.
    import_module("phalanx.group.autoload").register()
