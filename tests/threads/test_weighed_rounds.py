"""Weighed steps with policies, skipped steps, local and dropped micro-batches, in any order, against plain sums."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from phalanx.testing import run
from tests.threads.small_models import ddp, one, x_of

LAYERS = "abc"
Policies = dict[str, int]


class Three(nn.Module):
    """Three numbers; the gradient of each that is used is the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        for name in LAYERS:
            self.register_parameter(name, nn.Parameter(torch.ones((), dtype=torch.float64)))

    def forward(self, x: Tensor, use: str) -> Tensor:
        return sum(getattr(self, name) * x for name in use).mean()


@dataclass
class Share:
    """What one rank has: sums of items by layer, and how many items these are the mean of."""

    sums: dict[str, float] = field(default_factory=dict)
    items: float = 0.0

    def add(self, use: str, n: int, value: float) -> None:
        self.items += n
        for name in use if n else "":
            self.sums[name] = self.sums.get(name, 0.0) + n * value


@dataclass
class Truth:
    """The gradients of all ranks, by arithmetic: what each has left in this round, and of each layer before."""

    ranks: int
    policies: Policies
    flushes: int = 0

    def __post_init__(self) -> None:
        self.rounds = [Share() for _ in range(self.ranks)]
        self.left = {name: [Share() for _ in range(self.ranks)] for name in LAYERS}

    def flush(self) -> dict[str, float | None]:
        """Synchronise what is due."""
        self.flushes += 1
        shown: dict[str, float | None] = dict.fromkeys(LAYERS)
        for name, left in self.left.items():
            for share, round_ in zip(left, self.rounds, strict=True):
                share.items += round_.items
                if name in round_.sums:
                    share.sums[name] = share.sums.get(name, 0.0) + round_.sums[name]
            if self.flushes % self.policies.get(name, 1) == 0:
                if any(name in share.sums for share in left):
                    shown[name] = sum(share.sums.get(name, 0.0) for share in left) / sum(share.items for share in left)
                self.left[name] = [Share() for _ in range(self.ranks)]
        self.rounds = [Share() for _ in range(self.ranks)]
        return shown


def steps_of(seed: int, ranks: int) -> list[tuple[str, int, list[tuple[str, int, float]]]]:
    """Random steps: what happens, on which rank if not on all, and every rank's layers, items and value."""
    draw = random.Random(seed)
    kinds = ["sync", "sync", "local", "local on one", "drop", "zero", "drop on one", "zero on one"]
    if ranks > 1:  # where all skip, nothing happens
        kinds.append("skip")
    found = []
    for _ in range(draw.randint(4, 14)):
        batches = [
            (
                LAYERS if draw.random() < 0.5 else "".join(draw.sample(LAYERS, draw.randint(1, 2))),
                draw.randint(1, 4),
                float(draw.randint(1, 9)),
            )
            for _ in range(ranks)
        ]
        single = draw.randrange(ranks)
        kind = draw.choice(kinds)
        if draw.random() < 0.2 and kind == "sync" and ranks > 1:
            batches[single] = (batches[single][0], 0, 7.0)
        found.append((kind, single, batches))
    return [*found, ("sync", 0, [(LAYERS, rank + 1, 1.0) for rank in range(ranks)])]


def compare_with_truth(rank: int, ranks: int, seed: int, policies: Policies) -> None:
    model, truth = ddp(Three()), Truth(ranks, policies)
    for name, every in policies.items():
        model.sync_policy(name, every=every)

    def backward(batch: tuple[str, int, float]) -> None:
        use, n, value = batch
        model.weigh(model(torch.full((max(n, 1),), value, dtype=torch.float64), use), n).backward()

    for number, (kind, single, batches) in enumerate(steps_of(seed, ranks)):
        taking_part = [each for each in range(ranks) if not kind.endswith("on one") or each == single]
        if kind.startswith(("drop", "zero")):
            for each in taking_part:
                truth.rounds[each] = Share()
            if rank in taking_part:
                model.zero_grad(set_to_none=kind.startswith("drop"))
            continue
        for each in taking_part:
            if not (kind == "skip" and each == single):
                truth.rounds[each].add(*batches[each])
        if kind.startswith("local"):
            if rank in taking_part:
                with model.no_sync():
                    backward(batches[rank])
            continue
        if kind == "skip" and rank == single:
            model.skip()
        else:
            backward(batches[rank])
        expected = truth.flush()
        for name, parameter in model.module.named_parameters():
            seen = None if parameter.grad is None else parameter.grad.item()
            # Zeroed gradients are gradients of 0, where nobody else has one either.
            assert (seen or 0.0) == pytest.approx(expected[name] or 0.0), (number, kind, name, seen, expected)
        model.zero_grad()


def policies_of(seed: int) -> Policies:
    draw = random.Random(-seed)
    return {name: draw.randint(2, 3) for name in draw.sample("ab", draw.randint(0, 2))}


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("seeds", [range(start, start + 25) for start in (0, 25, 50, 75)], ids=str)
def test_random_rounds(seeds: range, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)

    def program(rank: int, ranks: int) -> None:
        for seed in seeds:
            if seed % 3 + 1 == ranks:
                try:
                    compare_with_truth(rank, ranks, seed, policies_of(seed))
                except AssertionError as error:
                    raise AssertionError(f"seed {seed}, policies {policies_of(seed)}: {error}") from error

    for ranks in (1, 2, 3):
        run(ranks, program, ranks, timeout=60)


@pytest.mark.parametrize("use", ["ab", "b"])
def test_items_of_a_rank_that_has_left_count_for_a_layer_that_it_has_not_used(use: str) -> None:
    def program(rank: int) -> list[float]:
        model = ddp(Three())
        model.sync_policy("a", every=2)
        with model.join():
            for _ in range(2 if rank == 0 else 1):
                model.zero_grad()
                x, used = (torch.full((1,), 4.0), "ab") if rank == 0 else (torch.zeros(2), use)
                model.weigh(model(x.double(), used), len(x)).backward()
        return [model.module.a.grad.item(), model.module.b.grad.item()]

    assert run(2, program) == [[2.0, 4.0]] * 2  # over 1 + 1 + 2 items; over 1


def zeroed_data(p: nn.Parameter) -> None:
    p.grad.data.zero_()


def new_zeros(p: nn.Parameter) -> None:
    p.grad.data = torch.zeros_like(p)


def numpy_zeros(p: nn.Parameter) -> None:
    p.grad.numpy()[...] = 0.0


@pytest.mark.parametrize("way", [zeroed_data, new_zeros, numpy_zeros], ids=lambda way: way.__name__)
@pytest.mark.parametrize("then", ["backward", "skip", "leave"])
def test_a_round_that_was_zeroed_in_any_way_counts_for_nothing(way: Callable[[nn.Parameter], None], then: str) -> None:
    def program(rank: int) -> float:
        model = ddp(one(dtype=torch.float64))
        with model.join():
            with model.no_sync():
                model.weigh(model(x_of(rank, torch.float64)).mean(), 3).backward()
            if rank == 1 or then == "backward":
                way(model.module.weight)
            if rank == 1 and then == "skip":
                model.skip()
            elif rank == 0 or then == "backward":
                model.weigh(model(x_of(rank, torch.float64)).mean(), 1).backward()
        return model.module.weight.grad.item()

    assert run(2, program) == [1.5 if then == "backward" else 1.0] * 2


@pytest.mark.parametrize("touch", ["clone", "multiply", "nothing"])
def test_items_of_a_flat_loss_count_whatever_touches_its_gradient(touch: str) -> None:
    def program(rank: int) -> float:
        model = ddp(one(dtype=torch.float64))
        weight = model.module.weight
        with model.no_sync():
            model.weigh(model(0 * x_of(rank, torch.float64)).mean(), 3).backward()
            if touch == "clone":
                weight.grad = weight.grad.clone()
            elif touch == "multiply":
                weight.grad.mul_(1.0)
        model.weigh(model(x_of(rank, torch.float64)).mean(), 1).backward()
        return weight.grad.item()

    assert run(2, program) == [1.5 / 4] * 2


def test_zeroing_many_small_gradients_does_not_drop_the_others() -> None:
    def program(rank: int) -> list[float]:
        model = ddp(nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))))
        seen = []
        for zeroes in (False, True):
            with model.no_sync():
                model.weigh(model(torch.ones(1, 2) * (rank + 1)).sum(), 2).backward()
                for layer in model.module if zeroes else ():
                    layer.bias.grad.zero_()
            model.weigh(model(torch.ones(1, 2) * (rank + 1)).sum(), 2).backward()
            seen.append([layer.weight.grad.norm().item() for layer in model.module])
            model.zero_grad()
        assert seen[0] == pytest.approx(seen[1])
        return seen[0]

    run(2, program)


def test_a_factor_of_one_beside_another_factor() -> None:
    """The unit of what is held back is rank 0's number of items in the step that is synchronised."""

    def program(rank: int) -> float:
        model = ddp(Three())
        model.sync_policy("a", every=2)
        for items in ((4, 1), (0, 4)):
            model.zero_grad()
            model.weigh(model(torch.full((4,), 5.0, dtype=torch.float64), "ac"), items[rank]).backward()
        return model.module.c.grad.item()

    assert run(2, program) == [5.0, 5.0]
