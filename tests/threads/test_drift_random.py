"""Random training never raises a false alarm: accumulation, join, skipped steps, policies, evaluation by the way."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from phalanx import DistributedDataParallel
from phalanx.testing import generator, run
from tests.threads.small_models import filled

pytestmark = pytest.mark.filterwarnings("error::phalanx.MisuseWarning")
PLENTY = 20


class Net(nn.Module):
    """Three layers, of which a batch uses two or three, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.side = nn.Linear(4, 40), nn.Linear(40, 2), nn.Linear(4, 2)
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, sideways: bool) -> Tensor:
        out = self.last(self.first(x).tanh())
        return self.frozen(out + self.side(x) if sideways else out)


def train(rank: int, ranks: int, seed: int) -> tuple[int, int]:
    """Train on a course that `seed` and nothing else decides; return the numbers of steps and of needless proofs."""
    draw, mine = random.Random(seed), random.Random(seed * 16 + rank)
    ddp = DistributedDataParallel(filled(Net()))
    optimizer = draw.choice([torch.optim.SGD, torch.optim.AdamW])(ddp.parameters(), lr=0.01)
    proofs = []
    prove = ddp._guard.drift._prove
    ddp._guard.drift._prove = lambda *arguments: (proofs.append(1), prove(*arguments))
    every, skips, weighs = draw.choice([1, 1, 2, 3]), draw.choice([0.0, 0.0, 0.3]), draw.random() < 0.3
    if draw.random() < 0.4:
        ddp.sync_policy("side", draw.choice(["never", 2, 3]))
    set_to_none = draw.random() < 0.7  # alike on all ranks: an optimizer steps on zeros, and not on None
    joins = draw.random() < 0.4
    counts = [draw.randrange(PLENTY) * every if joins else PLENTY * every for _ in range(ranks)]
    with ddp.join(enable=joins):
        for _ in range(counts[rank]):
            with ddp.accumulate(every) as syncs:
                batch = torch.randn(mine.randrange(1, 4), 4, generator=generator(mine.randrange(1 << 30)))
                if syncs and mine.random() < skips:
                    ddp.skip()
                else:
                    loss = ddp(batch, mine.random() < 0.7).square().mean()
                    (ddp.weigh(loss, len(batch)) if weighs else loss).backward()
            if syncs:
                optimizer.step()
                optimizer.zero_grad(set_to_none)
            if not joins and syncs:
                between_steps(ddp, draw, rank)
    ddp.check_replicas()
    return ddp._reducer.statistics.flushes, len(proofs)


def between_steps(ddp: DistributedDataParallel, draw: random.Random, rank: int) -> None:
    """What people do between steps, on rank 0 alone or on all."""
    event = draw.random()
    if event < 0.1:
        if rank == 0:
            with torch.no_grad():
                ddp.eval()(torch.ones(1, 4), True)
                ddp.train()
    elif event < 0.2:
        ddp.module.load_state_dict(ddp.module.state_dict())
    elif event < 0.25:
        ddp.check_replicas()
    elif event < 0.3:
        ddp.module.frozen.requires_grad_(not ddp.module.frozen.weight.requires_grad)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_training_raises_no_false_alarm_and_proves_nothing_needlessly(ranks: int) -> None:
    check(range(6), ranks)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_500_random_trainings(ranks: int) -> None:
    for start in range(100, 600, 10):
        check(range(start, start + 10), ranks)


def check(seeds: range, ranks: int) -> None:
    for seed in seeds:
        for steps, proofs in run(ranks, train, ranks, seed, timeout=60):
            assert proofs == 0, f"seed {seed}: {proofs} needless proofs in {steps} steps"
