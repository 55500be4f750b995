"""ScaledLR: the scaling rules, the warm-up, other schedulers after it and beside it, resuming."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import SGD, lr_scheduler

from phalanx.errors import MisuseError, RankMismatchError
from phalanx.testing import run
from phalanx.train.schedule import BatchPlan, ScaledLR, batch_plan

BASE = 0.1

AFTER: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.01),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "step": lambda o: lr_scheduler.MultiStepLR(o, [3, 9]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=40, cycle_momentum=False),
    "chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, 1.0, 4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}


def optimizer(lr: float | torch.Tensor = BASE) -> SGD:
    return SGD([{"params": [torch.zeros(1, requires_grad=True)]}, {"params": [torch.zeros(1)], "lr": lr / 2}], lr=lr)


def pairs(scheduler: lr_scheduler.LRScheduler, steps: int) -> list[tuple[float, ...]]:
    """Return the learning rates of both groups before each of the steps."""
    seen = []
    for _ in range(steps):
        seen.append(tuple(float(group["lr"]) for group in scheduler.optimizer.param_groups))
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def lrs(scheduler: lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """Return the learning rate of the first group before each of the steps."""
    return [first for first, _ in pairs(scheduler, steps)]


@given(
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.sampled_from(["linear", "sqrt"]),
    st.integers(0, 7),
)
@settings(deadline=None)  # the first optimizer imports half of torch
def test_the_rule_and_the_warm_up(base: int, total: int, rule: str, warmup: int) -> None:
    factor = total / base if rule == "linear" else math.sqrt(total / base)
    got = pairs(ScaledLR(optimizer(), base, total, rule, warmup), warmup + 4)
    start = min(1.0, factor)
    expected = [start + (factor - start) * min(step / warmup, 1) if warmup else factor for step in range(warmup + 4)]
    for group, base in enumerate((BASE, BASE / 2)):
        assert [each[group] for each in got] == pytest.approx([base * each for each in expected], rel=1e-12)


def test_goyals_numbers() -> None:
    """256 to 8192 items: from 0.1 in equal steps to 3.2, where it stays."""
    got = lrs(ScaledLR(optimizer(), base_batch=256, total_batch=8192, warmup_steps=31), 40)
    assert got[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert got[31:] == [BASE * 32] * 9


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("warmup", [0, 3])
def test_another_scheduler_takes_over_and_counts_times_the_factor(name: str, warmup: int) -> None:
    alone = pairs(AFTER[name](optimizer()), 30)
    one = optimizer()
    both = ScaledLR(one, 64, 256, warmup_steps=warmup, after=AFTER[name](one))
    got = pairs(both, warmup + 30)
    assert got[warmup:] == [(first * 4, second * 4) for first, second in alone]
    for step in range(warmup):
        assert got[step] == pytest.approx([lr * (1 + 3 * step / warmup) for lr in alone[0]])


@pytest.mark.parametrize("ours_first", [True, False])
def test_it_can_be_chained(ours_first: bool) -> None:
    one = optimizer()
    kinds = [lambda: ScaledLR(one, 64, 256, warmup_steps=3), lambda: lr_scheduler.ExponentialLR(one, 0.9)]
    chained = lr_scheduler.ChainedScheduler([kind() for kind in (kinds if ours_first else kinds[::-1])])
    got = [one.param_groups[0]["lr"]]
    for _ in range(50):
        one.step()
        chained.step()
        got.append(one.param_groups[0]["lr"])
    assert got == pytest.approx([BASE * 0.9**t * (1 + min(t, 3)) for t in range(51)], rel=1e-12)


def test_it_can_stand_in_a_sequence_at_either_place() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR itself passes an epoch
        one = optimizer()
        decay = [lr_scheduler.ExponentialLR(one, 0.5), ScaledLR(one, 64, 128, warmup_steps=2)]
        assert lrs_of_sequence(one, decay, 3, 7) == pytest.approx([0.1, 0.05, 0.025, 0.1, 0.15, 0.2, 0.2])
        one = optimizer()
        grow = [ScaledLR(one, 64, 128, warmup_steps=2), lr_scheduler.ExponentialLR(one, 0.5)]
        assert lrs_of_sequence(one, grow, 3, 5) == pytest.approx([0.1, 0.15, 0.2, 0.1, 0.05])


def lrs_of_sequence(one: SGD, parts: list, milestone: int, steps: int) -> list[float]:
    sequence = lr_scheduler.SequentialLR(one, parts, [milestone])
    got = []
    for _ in range(steps):
        got.append(one.param_groups[0]["lr"])
        one.step()
        sequence.step()
    return got


@pytest.mark.parametrize("name", [None, *AFTER])
@pytest.mark.parametrize("stop", [1, 3, 4, 11])
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_resumed_run_goes_on_bit_for_bit(name: str | None, stop: int, optimizer_first: bool) -> None:
    def made() -> ScaledLR:
        one = optimizer()
        return ScaledLR(one, 64, 200, "sqrt", 3, AFTER[name](one) if name else None)

    whole = lrs(made(), 20)
    first = made()
    assert lrs(first, stop) == whole[:stop]
    second = made()
    for load in [True, False] if optimizer_first else [False, True]:
        if load:
            second.optimizer.load_state_dict(first.optimizer.state_dict())
        else:
            second.load_state_dict(first.state_dict())
    assert lrs(second, 20 - stop) == whole[stop:]


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_a_run_resumed_with_another_total_batch_is_scaled_for_that(optimizer_first: bool) -> None:
    def made(total: int) -> ScaledLR:
        one = optimizer()
        return ScaledLR(one, 64, total, warmup_steps=3, after=AFTER["exponential"](one))

    first, second, expected = made(256), made(512), lrs(made(512), 20)
    lrs(first, 8)
    states = first.optimizer.state_dict(), first.state_dict()
    if optimizer_first:
        second.optimizer.load_state_dict(states[0])
        second.load_state_dict(states[1])
        assert lrs(second, 12) == expected[8:]
    else:
        second.load_state_dict(states[1])
        second.optimizer.load_state_dict(states[0])  # brings the old learning rate back, for one step
        assert lrs(second, 12)[1:] == expected[9:]


def test_a_learning_rate_set_by_hand_is_scaled_on() -> None:
    scheduler = ScaledLR(optimizer(), 64, 256, warmup_steps=4)
    lrs(scheduler, 6)
    scheduler.optimizer.param_groups[0]["lr"] = 1.0
    scheduler.optimizer.param_groups[1]["lr"] = 0.5
    assert lrs(scheduler, 3) == [1.0, 1.0, 1.0]


def test_a_learning_rate_may_be_a_tensor_and_stays_the_same_one() -> None:
    one = optimizer(torch.tensor(BASE))
    tensor = one.param_groups[0]["lr"]
    got = lrs(ScaledLR(one, 64, 256, warmup_steps=2, after=AFTER["exponential"](one)), 5)
    assert got == pytest.approx([0.1, 0.25, 0.4, 0.36, 0.324])
    assert one.param_groups[0]["lr"] is tensor


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rule": "cubic"}, r"rule='cubic'"),
        ({"base_batch": 0}, r"base_batch=0"),
        ({"total_batch": math.inf}, r"total_batch=inf"),
        ({"warmup_steps": -1}, r"warmup_steps=-1"),
        ({"warmup_steps": 0.5}, r"warmup_steps=0.5"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict, text: str) -> None:
    with pytest.raises(MisuseError, match=text):
        ScaledLR(optimizer(), **{"base_batch": 64, "total_batch": 256, **arguments})


def test_schedulers_that_cannot_come_after_it() -> None:
    one = optimizer()
    with pytest.raises(MisuseError, match="stepped with a metric"):
        ScaledLR(one, 64, 256, after=lr_scheduler.ReduceLROnPlateau(one))
    with pytest.raises(MisuseError, match="another optimizer"):
        ScaledLR(one, 64, 256, after=AFTER["cosine"](optimizer()))
    with pytest.raises(MisuseError, match="without another scheduler after it"):
        ScaledLR(one, 64, 256).load_state_dict(ScaledLR(one, 64, 256, after=AFTER["cosine"](one)).state_dict())


def test_the_plan_in_words(capsys: pytest.CaptureFixture) -> None:
    assert str(BatchPlan(32, 8, 4, 1024)) == "total batch 1024 = 32 per rank x 8 ranks x 4 micro-batches"
    assert str(BatchPlan(32, 2, 1, 64)) == "total batch 64 = 32 per rank x 2 ranks"
    assert str(BatchPlan(16, 2, 2, 96)) == "total batch 96 = 48 over 2 ranks of different sizes x 2 micro-batches"
    assert batch_plan(16).total == 16
    assert capsys.readouterr().out == "total batch 16 = 16 per rank x 1 rank\n"


def test_what_is_missing_in_the_plan_is_computed() -> None:
    assert batch_plan(total=64, show=False) == BatchPlan(64, 1, 1, 64)
    assert batch_plan(total=64, per_rank=16, show=False) == BatchPlan(16, 1, 4, 64)
    assert batch_plan(total=64, accumulate=2, show=False) == BatchPlan(32, 1, 2, 64)
    assert batch_plan(16, 4, 64, show=False) == BatchPlan(16, 1, 4, 64)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "without per_rank"),
        ({"per_rank": 0}, r"per_rank \[0\]"),
        ({"per_rank": 8, "accumulate": 0}, r"accumulate \[0\]"),
        ({"total": 100, "per_rank": 16}, r"does not come out even\nInstead: total=96"),
        ({"total": 8, "per_rank": 16}, r"does not come out even\nInstead: total=16"),
        ({"total": 100, "per_rank": 16, "accumulate": 2}, r"does not come out even\nInstead: total=32"),
    ],
)
def test_plans_that_cannot_be(arguments: dict, text: str) -> None:
    with pytest.raises(MisuseError, match=text):
        batch_plan(**arguments)


def test_the_plan_of_several_ranks_is_printed_by_rank_zero(capsys: pytest.CaptureFixture) -> None:
    plans = run(3, lambda rank: [batch_plan(16, 2), batch_plan(8 * (rank + 1)), batch_plan(total=96, per_rank=16)])
    for rank, plan in enumerate(plans):
        uneven = BatchPlan(8 * (rank + 1), 3, 1, 48)
        assert plan == [BatchPlan(16, 3, 2, 96), uneven, BatchPlan(16, 3, 2, 96)]
    assert capsys.readouterr().out.splitlines() == [
        "total batch 96 = 16 per rank x 3 ranks x 2 micro-batches",
        "total batch 48 = 48 over 3 ranks of different sizes",
        "total batch 96 = 16 per rank x 3 ranks x 2 micro-batches",
    ]


def test_ranks_that_accumulate_differently_are_told_so() -> None:
    def program(rank: int) -> dict[int, str]:
        with pytest.raises(RankMismatchError, match="Every rank must accumulate") as told:
            batch_plan(16, accumulate=1 + rank)
        return told.value.calls

    calls = {rank: f"phalanx.batch_plan(accumulate={1 + rank})" for rank in range(2)}
    assert run(2, program) == [calls, calls]


def test_a_plan_that_cannot_be_on_one_rank_is_an_error_on_all() -> None:
    def program(rank: int) -> None:
        with pytest.raises(MisuseError, match=rf"\[rank {rank}\].*per_rank \[16, 0\], accumulate \[1, 1\]"):
            batch_plan(16 * (1 - rank))

    run(2, program)
