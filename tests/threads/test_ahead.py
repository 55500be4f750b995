"""Sums that begin while backward runs, over Gloo: they count only where they are right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import DistributedDataParallel, RankMismatchError
from phalanx.reduce import ahead
from phalanx.reduce.ahead import Ahead, units_of
from phalanx.reduce.plan import Entry, make_plan
from phalanx.testing import run
from tests.threads import test_random_steps as random_steps
from tests.threads.small_models import filled

FULL = tuple((name, "no") for name in random_steps.LAYERS)


@pytest.fixture(autouse=True)
def small_units_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", "gloo")
    monkeypatch.setattr(ahead, "UNIT_BYTES", 8)
    monkeypatch.setattr(ahead, "_MOST_PATIENCE", 1)


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often sums that were begun early have counted, and how often not."""
    seen: Counter[str] = Counter()
    conclude = Ahead.conclude

    def counting(self: Ahead, counts: bool, scale: float, fence: Callable[[], object]) -> bool:
        begun = bool(self._begun) and self.early > 0
        counted = conclude(self, counts, scale, fence)
        seen["counted" if counted else "thrown away"] += begun
        return counted

    monkeypatch.setattr(Ahead, "conclude", counting)
    yield seen


def deep() -> nn.Module:
    return filled(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), 3)


def loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x).square().mean()


def truth(parts: list[tuple[int, int]], divisor: int) -> list[Tensor]:
    """The gradients of the losses of these (rank, step), over `divisor`."""
    model = deep()
    return list(torch.autograd.grad(sum(loss(model, *part) for part in parts) / divisor, list(model.parameters())))


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def trained(rank: int) -> DistributedDataParallel:
    """A wrapped model that begins ahead from the next step on."""
    ddp = DistributedDataParallel(deep())
    loss(ddp, rank, 99).backward()
    ddp.zero_grad()
    return ddp


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_begin_before_backward_has_ended(ranks: int) -> None:
    def program(rank: int) -> tuple[int, int]:
        ddp = trained(rank)
        assert ddp.transport == "gloo"
        for step in range(3):
            ddp.zero_grad()
            loss(ddp, rank, step).backward()
            close(gradients(ddp), truth([(r, step) for r in range(ranks)], ranks))
        return ddp._reducer._ahead.early, len(ddp._reducer._ahead._units)

    assert run(ranks, program) == [(9, 10)] * ranks  # all but the last, which nothing follows


def test_accumulated_gradients_are_begun_with_the_backward_that_synchronises(endings: Counter[str]) -> None:
    def program(rank: int) -> None:
        ddp = trained(rank)
        with ddp.no_sync():
            loss(ddp, rank, 1).backward()
            loss(ddp, rank, 2).backward()
        loss(ddp, rank, 3).backward()
        close(gradients(ddp), truth([(r, s) for r in (0, 1) for s in (1, 2, 3)], 2))

    run(2, program)
    assert +endings == {"counted": 2}


@pytest.mark.parametrize("other", [False, True], ids=["by its own hook", "by a later one"])
def test_a_gradient_that_a_hook_changes_counts_as_changed(other: bool, endings: Counter[str]) -> None:
    """Rank 0 doubles the gradient of the last layer's bias: when it is made, or when nearly all has been sent."""

    def program(rank: int) -> None:
        ddp = trained(rank)
        first, last = ddp.module[0].weight, ddp.module[4].bias

        def double(_: Tensor) -> None:
            last.grad.mul_(2)

        if rank == 0:
            (first if other else last).register_post_accumulate_grad_hook(double)
        loss(ddp, rank, 1).backward()
        expected = truth([(0, 1), (1, 1)], 2)
        expected[9] += truth([(0, 1)], 2)[9]
        close(gradients(ddp), expected)

    run(2, program)
    assert +endings == ({"thrown away": 2} if other else {"counted": 2})


def test_what_backwards_that_raised_have_begun_is_thrown_away(endings: Counter[str]) -> None:
    """They raise at another layer on each rank; on rank 2 before anything has begun."""

    def program(rank: int) -> None:
        ddp = trained(rank)
        for step in (1, 2):
            handle = ddp.module[2 * rank].weight.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss(ddp, rank, 7).backward()
            handle.remove()
            ddp.zero_grad()
            loss(ddp, rank, step).backward()
            close(gradients(ddp), truth([(r, step) for r in range(3)], 3))
            ddp.zero_grad()
            loss(ddp, rank, 8).backward()
            close(gradients(ddp), truth([(r, 8) for r in range(3)], 3))
            ddp.zero_grad()

    run(3, program)
    assert endings["thrown away"] >= 4


def test_skipping_joining_and_weighing_after_sums_have_begun(endings: Counter[str]) -> None:
    def program(rank: int) -> None:
        ddp = trained(rank)
        ddp.skip() if rank == 0 else loss(ddp, rank, 1).backward()
        close(gradients(ddp), truth([(1, 1)], 1))
        for step in range(2, 4):
            ddp.zero_grad()
            loss(ddp, rank, step).backward()
        ddp.zero_grad()
        with ddp.join(divide_by_initial_world_size=False):
            if rank == 1:
                loss(ddp, rank, 5).backward()
                close(gradients(ddp), truth([(1, 5)], 1))
        for step in range(6, 8):
            ddp.zero_grad()
            loss(ddp, rank, step).backward()
        ddp.zero_grad()
        ddp.weigh(loss(ddp, rank, 8), 1 + 2 * rank).backward()
        close(gradients(ddp), truth([(0, 8), (1, 8), (1, 8), (1, 8)], 4))

    run(2, program)
    assert endings["counted"] >= 4 and endings["thrown away"] >= 3


def test_a_layer_that_one_rank_leaves_out(endings: Counter[str]) -> None:
    def program(rank: int) -> None:
        ddp = trained(rank)
        x = torch.ones(1, 4)
        (ddp.module[:4] if rank == 0 else ddp)(x).sum().backward()
        used = deep()
        first, second = used[:4](x).sum(), used(x).sum()
        expected = torch.autograd.grad((first + second) / 2, list(used.parameters()))
        close(gradients(ddp), list(expected))

    run(2, program)
    assert endings["thrown away"]


def test_a_model_that_changes_after_sums_have_begun(endings: Counter[str]) -> None:
    def program(rank: int) -> None:
        ddp = trained(rank)
        handle = ddp.module[2].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss(ddp, rank, 7).backward()
        handle.remove()
        ddp.zero_grad()
        ddp.module[4].weight = nn.Parameter(ddp.module[4].weight.detach().clone())
        for step in range(3):
            ddp.zero_grad()
            loss(ddp, rank, step).backward()
            close(gradients(ddp), truth([(0, step), (1, step)], 2))

    run(2, program)
    assert endings["counted"]


class Mixed(nn.Module):
    """Parameters of five dtypes, one without elements and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16)
        self.each = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=kind)) for kind in kinds])
        self.none, self.one = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: float) -> Tensor:
        total = sum((p.abs().float() * x).sum() for p in self.each)
        return total + self.none.sum() + self.one * x


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_dtype(ranks: int, endings: Counter[str]) -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(Mixed())
        for step in range(3):
            ddp.zero_grad()
            ddp(float(rank + 1)).backward()
            mean = (ranks + 1) / 2
            for parameter in ddp.module.each:
                assert parameter.grad.dtype == parameter.dtype
                assert torch.all(parameter.grad == mean), (step, parameter.grad)
            assert ddp.module.one.grad == mean

    run(ranks, program)
    assert endings["counted"]


def test_a_rank_in_another_call_is_named_although_sums_have_begun() -> None:
    def program(rank: int) -> None:
        ddp = trained(rank)
        with pytest.raises(RankMismatchError, match="all_reduce"):
            loss(ddp, rank).backward() if rank else dist.all_reduce(torch.ones(3))
        ddp.zero_grad()
        loss(ddp, rank, 4).backward()  # whoever goes on all the same
        close(gradients(ddp), truth([(0, 4), (1, 4)], 2))

    run(2, program)


def often_all(seed: int, ranks: int) -> random_steps.Plan:
    """A random sequence in which most steps use every layer on every rank."""
    draw = random.Random(seed)
    plan = random_steps.make_plan(seed, ranks)
    steps: list[random_steps.Step] = []
    for step in plan.steps * 2:
        if draw.random() < 0.7:
            full = (FULL,) * ranks
            step = replace(step, routes=full, others=full, frozen=frozenset(), grad_on=frozenset())
        if step.kind == "module":
            step = replace(step, kind="plain")
        if steps and steps[-1].kind == "raises":
            step = replace(step, reset="none")
        steps.append(step)
    return replace(plan, steps=tuple(steps))


def sequences(first: int, ranks: int, count: int) -> None:
    plans = [often_all(seed, ranks) for seed in range(first, first + count)]
    assert run(ranks, random_steps.run_all, plans, timeout=120) == [sum(len(plan.steps) for plan in plans)] * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_steps(ranks: int, endings: Counter[str]) -> None:
    sequences(1000 * ranks, ranks, 10)
    assert endings["counted"] > 20 and endings["thrown away"] > 4


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 300, 10))
def test_more_random_steps(first: int) -> None:
    sequences(5000 + first, first // 10 % 3 + 2, 10)


def test_units_are_neighbours_in_the_order_of_backward() -> None:
    entries = [Entry(f"p{i}", (count,), dtype, size, "cpu") for i, (count, dtype, size) in enumerate(
        [(100, "float32", 4), (0, "float32", 4), (3, "float64", 8), (50, "float32", 4), (60, "float32", 4)]
    )]  # fmt: skip
    plan = make_plan(entries, [1 << 20])
    units = units_of(plan, 400)
    assert [unit.members for unit in units] == [(4, 3), (2,), (0,)]
    covered = {i for unit in units for i in unit.members}
    assert covered == {0, 2, 3, 4}
    for unit in units:
        for i in unit.members:
            region, start = plan.places[i]
            assert region == unit.region and unit.start <= start and start + entries[i].count <= unit.stop


def test_oracle_sees_a_sum_that_should_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were stale sums to count, the tests above would fail."""
    finish = Ahead.finish

    def trusting(self: Ahead) -> None:
        finish(self)
        self.intact = True

    monkeypatch.setattr(Ahead, "finish", trusting)

    def program(rank: int) -> None:
        ddp = trained(rank)
        first, last = ddp.module[0].weight, ddp.module[4].bias

        def double(_: Tensor) -> None:
            last.grad.mul_(2)

        first.register_post_accumulate_grad_hook(double)
        loss(ddp, rank, 1).backward()
        expected = truth([(0, 1), (1, 1)], 2)
        expected[9] *= 2
        with pytest.raises(AssertionError):
            close(gradients(ddp), expected)

    run(2, program)
