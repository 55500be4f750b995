"""Ranks with different numbers of batches under join(): rank 0 has 5, rank 1 has 10, and so on.

    phalanx run -n 2 examples/uneven_join.py
    python examples/uneven_join.py

A rank that is out of data follows the others' collectives, the user's own included, and contributes nothing.
What the gradient of the last steps is divided by is for you to choose.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx import DistributedDataParallel

LEARNING_RATE = 0.1
say = phalanx.rank_zero_only(print)


def batches(rank: int) -> int:
    """How many batches a rank has."""
    return 5 * (rank + 1)


def train(whole: bool) -> float:
    """Train one weight, whose gradient is the mean of the inputs: 1 on rank 0, 2 on rank 1, ...; return it."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    inputs, counted = torch.full((4, 1), phalanx.rank() + 1.0), torch.zeros(1)
    with ddp.join(divide_by_initial_world_size=whole):
        for _ in range(batches(phalanx.rank())):
            optimizer.zero_grad()
            ddp(inputs).mean().backward()
            optimizer.step()
            running = torch.ones(1)
            dist.all_reduce(running)  # a collective of one's own: the ranks that are still running
            counted += running
    total = torch.tensor(float(batches(phalanx.rank())))
    dist.all_reduce(total)
    if phalanx.rank() == phalanx.world_size() - 1 and counted.item() != total.item():
        raise SystemExit(f"counted {counted.item():.0f} batches of {total.item():.0f}")
    return model.weight.item()


def expected(whole: bool) -> float:
    """The same in one process: the sum of what those who run contribute, divided as asked for."""
    size, weight = phalanx.world_size(), 0.0
    for step in range(batches(size - 1)):
        values = [rank + 1.0 for rank in range(size) if step < batches(rank)]
        weight -= LEARNING_RATE * sum(values) / (size if whole else len(values))
    return weight


def main() -> None:
    phalanx.init()
    say("batches per rank:", [batches(rank) for rank in range(phalanx.world_size())])
    for whole, divisor in ((True, "the initial world size"), (False, "the ranks still running")):
        got, truth = train(whole), expected(whole)
        weights: list[float] = [0.0] * phalanx.world_size()
        dist.all_gather_object(weights, got)
        if max(abs(weight - truth) for weight in weights) > 1e-5:
            raise SystemExit(f"weights {weights}, expected {truth}")
        say(f"divided by {divisor}: weight {got:.4f} on every rank, as one process computes it")
    phalanx.shutdown()


if __name__ == "__main__":
    main()
