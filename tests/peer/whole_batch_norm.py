"""The standard that SyncBatchNorm is held to, where torch's own cannot run: it has no kernels for the CPU.

Every rank gathers the batches of all ranks and runs torch's BatchNorm over the whole: what SyncBatchNorm is
defined to equal, at any price. The baseline of the SyncBatchNorm cases is what passes with it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class WholeBatchNorm(nn.SyncBatchNorm):
    """BatchNorm over the gathered batches of all ranks of `process_group`."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Take rows of channels as well as images."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group = self.process_group or dist.group.WORLD
        if not self.training or dist.get_world_size(group) == 1:
            return _BatchNorm.forward(self, input)
        by_channel = input.transpose(0, 1)
        rows = by_channel.reshape(input.shape[1], -1).t()
        sizes = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, torch.tensor(len(rows)), group=group)
        counts = [int(size) for size in sizes]
        whole = _BatchNorm.forward(self, _Whole.apply(rows, counts, group))
        mine = whole.split(counts)[dist.get_rank(group)].t().reshape(by_channel.shape).transpose(0, 1)
        return torch.empty_like(input).copy_(mine)  # in the memory format of the input


class _Whole(torch.autograd.Function):
    """Concatenate the batches of all ranks; in backward every rank gets the sum of what all found for its own."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, counts: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.counts, ctx.group = counts, group
        longest = mine.new_zeros(max(counts), *mine.shape[1:])
        longest[: len(mine)] = mine
        batches = [torch.empty_like(longest) for _ in counts]
        dist.all_gather(batches, longest, group=group)
        return torch.cat([batch[:count] for batch, count in zip(batches, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total.split(ctx.counts)[dist.get_rank(ctx.group)], None, None
