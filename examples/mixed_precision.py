"""Mixed precision with accumulation: autocast to bfloat16, a GradScaler, clipping, one bad batch.

    phalanx run -n 2 examples/mixed_precision.py
    python examples/mixed_precision.py

Gradients are unscaled and clipped once, after the micro-batch that synchronises. An infinity on one rank
reaches every rank with the synchronisation, so that all of them leave out the same step. (bfloat16 needs no
loss scale; float16 does, and it works in the same way.)
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import phalanx
from phalanx import DistributedDataParallel

EVERY, STEPS, BAD = 2, 40, 5  # the step in which one rank has a bad batch
say = phalanx.rank_zero_only(print)


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1000 * rank + number)
    inputs = torch.randn(4 + 4 * (rank % 2), 8, generator=draw)
    targets = inputs[:, :2].sum(1, keepdim=True)
    if number == BAD * EVERY and rank == phalanx.world_size() - 1:
        targets = targets * math.inf
    return inputs, targets


def main() -> None:
    phalanx.init()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses, left_out = [], []
    for step in range(STEPS):
        scale, loss_sum, items = scaler.get_scale(), 0.0, 0
        for micro in range(EVERY):
            inputs, targets = batch(phalanx.rank(), step * EVERY + micro)
            with ddp.accumulate(every=EVERY) as syncs:
                with torch.autocast("cpu", torch.bfloat16):
                    outputs = ddp(inputs)
                loss = ddp.weigh(mse_loss(outputs.float(), targets), len(inputs))
                scaler.scale(loss).backward()
            loss_sum, items = loss_sum + loss.item() * len(inputs), items + len(inputs)
        if not syncs:
            raise SystemExit("the last micro-batch of a round synchronises")
        scaler.unscale_(optimizer)
        phalanx.clip_grad_norm_(ddp.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(phalanx.mean(loss_sum / items, items))  # over all items of all ranks
        if scaler.get_scale() < scale:
            left_out.append(step)

    states: list = [None] * phalanx.world_size()
    dist.all_gather_object(states, [parameter.tolist() for parameter in ddp.parameters()])
    if left_out != [BAD] or any(state != states[0] for state in states):
        raise SystemExit(f"left out {left_out}; parameters equal: {[state == states[0] for state in states]}")
    if not losses[-1] < 0.2 * losses[0]:
        raise SystemExit(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    say(f"{STEPS} steps of {EVERY} micro-batches in {outputs.dtype}, parameters equal on every rank")
    say(f"step {BAD} left out by every rank, because one had an infinite loss; scale {scale:.0f}")
    say(f"loss over all items {losses[0]:.3f} -> {losses[-1]:.3f}")
    phalanx.shutdown()


if __name__ == "__main__":
    main()
