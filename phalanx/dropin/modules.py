"""The classes of the drop-in that differ from Phalanx's own, where a script written for torch expects it.

They carry the names of those that they replace, module included: what a script pickles or prints then says
torch's name, and a model saved whole loads where Phalanx is not installed.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from phalanx.data import sampler
from phalanx.nn import sync_batchnorm

_T_co = TypeVar("_T_co", covariant=True)


class SyncBatchNorm(sync_batchnorm.SyncBatchNorm):
    """Phalanx's SyncBatchNorm on the CPU, torch's own kernels on other devices."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if input.is_cpu else TorchSyncBatchNorm.forward(self, input)


class DistributedSampler(sampler.DistributedSampler, TorchDistributedSampler[_T_co]):
    """torch's DistributedSampler, order and epochs bit for bit: without set_epoch every pass is the same."""

    def __init__(
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if rank is None and dist.is_initialized():
            rank = dist.get_rank()
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        sampler.DistributedSampler.set_epoch(self, 0)  # from now on the script moves the epoch on, or nobody


for _ours, _theirs in ((SyncBatchNorm, TorchSyncBatchNorm), (DistributedSampler, TorchDistributedSampler)):
    _ours.__module__, _ours.__qualname__ = _theirs.__module__, _theirs.__qualname__
