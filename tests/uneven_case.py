"""One random case of uneven work: who has which batches, and how they are averaged. Pure but for the tensors.

What makes a case hard is in here: ranks without batches, batches without items, batches that a rank gives
up, rounds of micro-batches that end early or never synchronise, a layer that only some batches use.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LENGTH = 6
"""Values per channel and item where the model normalises: with fewer, statistics are ill-conditioned."""

CALLS = ("sum", "max", "min", "product", "gather", "mean", "stop")


@dataclass(frozen=True)
class Case:
    """`sizes[rank][i]` is the number of items in batch i of a rank; `skips[(rank, i)]` when it is given up.

    Batches are accumulated in rounds of `every`. If `loses_last`, a last round that is shorter is not
    synchronised before the rank leaves join(). `whole` is join's divide_by_initial_world_size. `middle` says
    that ranks call collectives between forward and backward, `after` after each step; `calls` says which.
    """

    seed: int
    ranks: int
    double: bool
    sizes: tuple[tuple[int, ...], ...]
    skips: dict[tuple[int, int], str]
    branches: frozenset[tuple[int, int]]
    every: int
    loses_last: bool
    around_backward: bool
    whole: bool
    weighed: bool
    normalises: bool
    momentum: float
    calls: tuple[str, ...]
    middle: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def tolerance(self) -> float:
        return 1e-12 if self.double else 1e-6

    def rounds(self, rank: int) -> list[list[int]]:
        """The numbers of a rank's batches, by rounds; the last may be shorter."""
        numbers = list(range(len(self.sizes[rank])))
        return [numbers[at : at + self.every] for at in range(0, len(numbers), self.every)]

    def synchronises(self, rank: int, i: int) -> bool:
        """Whether batch i of a rank ends a round that is synchronised."""
        ends = (i + 1) % self.every == 0
        return ends or (i + 1 == len(self.sizes[rank]) and not self.loses_last)

    def batch(self, rank: int, i: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same numbers in every dtype that can hold a float32."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + rank * 1009 + i)
        shape = (self.sizes[rank][i], LENGTH if self.normalises else 1)
        inputs = torch.randn(shape[0], 3, shape[1], generator=draw)
        targets = torch.randn(shape[0], 2, shape[1], generator=draw)
        return inputs.to(dtype), targets.to(dtype)


def make_case(seed: int, ranks: int) -> Case:
    """Draw a case. A rank's collectives inside a round only pair up with those of rounds of equal length."""
    draw = random.Random(seed * 8 + ranks)
    normalises, talks = draw.random() < 1 / 3, draw.random() < 1 / 3
    middle = talks and draw.random() < 0.5
    paired = normalises or middle
    every = draw.choice([1, 1, 2, 3, 4])
    loses_last = draw.random() < 0.3
    sizes = []
    for _ in range(ranks):
        count = draw.choice([0, 1, 2, 3, 5, 8])
        if paired and not loses_last:
            count = -(-count // every) * every
        sizes.append(tuple(draw.choice([0, 1, 1, 2, 3, 6]) for _ in range(count)))
    skips, often = {}, draw.choice([0, 0, 0.15, 0.5, 1.0])
    places = [(rank, i) for rank, mine in enumerate(sizes) for i in range(len(mine))]
    for rank, i in places:
        last = (i + 1) % every == 0 or (i + 1 == len(sizes[rank]) and not loses_last)
        if draw.random() < often and (last or not paired):
            skips[rank, i] = "before" if normalises else draw.choice(["before", "after"])
    return Case(
        seed, ranks, draw.random() < 0.5, tuple(sizes), skips,
        frozenset(place for place in places if draw.random() < 0.5),
        every, loses_last, draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.5, normalises,
        draw.choice([0.0, 0.9]), tuple(draw.sample(CALLS, 3)) if talks else (), middle,
    )  # fmt: skip


class Net(nn.Module):
    """Two layers over the channels, a normalisation between them if asked for, and a branch not always taken."""

    def __init__(self, case: Case, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.first, self.last, self.side = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(3, 2)
        self.norm = norm(5) if case.normalises else nn.Identity()
        draw = torch.Generator().manual_seed(case.seed)
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=draw) * 0.5
                parameter.copy_(values + 0.3 * values.sign())
            if case.normalises:
                self.first.bias.zero_()  # beside a small deviation, a mean takes digits away from it
        self.to(case.dtype)

    def forward(self, inputs: Tensor, uses_side: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs.transpose(1, 2)).transpose(1, 2)).tanh().transpose(1, 2)
        out = self.last(hidden)
        if uses_side.any():
            out = out + self.side(inputs.transpose(1, 2)) * uses_side.view(-1, 1, 1)
        return out.transpose(1, 2)


def loss_of(outputs: Tensor, targets: Tensor, weighed: bool) -> Tensor:
    """A mean over the items. Of no items it is NaN where it is weighed, and zero where it is not.

    Linear in the outputs: a square's gradient is a small difference of large numbers once training succeeds,
    and its relative error in float32 that of the test's arithmetic.
    """
    each = (outputs * targets).flatten(1).mean(1)
    return each.mean() if weighed else each.sum() / max(len(each), 1)
