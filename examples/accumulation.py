"""Gradient accumulation over 4 micro-batches of different sizes, in the two ways that people write it.

    phalanx run -n 2 examples/accumulation.py
    python examples/accumulation.py

`no_sync()` may stand around the backward only: whether gradients are synchronised is decided in backward.
With `weigh`, each step's gradient is that of one process on all items, whatever the sizes of the batches.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import phalanx
from phalanx import DistributedDataParallel

EVERY, STEPS, LEARNING_RATE = 4, 3, 0.1
say = phalanx.rank_zero_only(print)


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """A micro-batch of 1 to 6 items."""
    draw = torch.Generator().manual_seed(1000 * rank + number)
    items = 1 + (2 * number + 3 * rank) % 6
    inputs = torch.randn(items, 3, generator=draw)
    return inputs, inputs.sum(1, keepdim=True) + torch.randn(items, 1, generator=draw)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def train(in_blocks: bool) -> nn.Module:
    """Train with `ddp.accumulate` around each micro-step, or with no_sync() around backward only."""
    ddp = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    for number in range(STEPS * EVERY):
        inputs, targets = batch(phalanx.rank(), number)
        if in_blocks:
            with ddp.accumulate(every=EVERY) as syncs:
                ddp.weigh(mse_loss(ddp(inputs), targets), len(inputs)).backward()
        else:
            syncs = (number + 1) % EVERY == 0
            loss = ddp.weigh(mse_loss(ddp(inputs), targets), len(inputs))
            with contextlib.nullcontext() if syncs else ddp.no_sync():
                loss.backward()
        if syncs:
            optimizer.step()
            optimizer.zero_grad()
    return ddp.module


def train_alone() -> nn.Module:
    """One process, which has all items of a step in one batch."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        numbers = range(step * EVERY, (step + 1) * EVERY)
        parts = [batch(rank, number) for rank in range(phalanx.world_size()) for number in numbers]
        inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        mse_loss(net(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


def main() -> None:
    phalanx.init()
    truth = nn.utils.parameters_to_vector(train_alone().parameters())
    for in_blocks, words in ((False, "no_sync() around backward only"), (True, "ddp.accumulate(every=4)")):
        off = (nn.utils.parameters_to_vector(train(in_blocks).parameters()) - truth).abs().max().detach()
        dist.all_reduce(off, dist.ReduceOp.MAX)
        if off > 1e-6:
            raise SystemExit(f"{words}: parameters differ by {off:.2g} from those of one process")
        say(f"{words}: after {STEPS} steps of {EVERY} micro-batches, equal to one process on the whole batch")
    phalanx.shutdown()


if __name__ == "__main__":
    main()
