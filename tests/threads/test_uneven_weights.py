"""ddp.weigh: every item counts as one, under join, a loss scale, autocast, clipping and accumulation."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import phalanx
from phalanx import DistributedDataParallel, MisuseError, RankMismatchError
from phalanx.testing import run
from tests.threads.test_uneven_cases import failures, grad_of, line, ones


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (2, 0, 5), (0, 0, 1), (4,)])
def test_the_gradient_is_the_mean_over_all_items(counts: tuple[int, ...]) -> None:
    def program(rank: int) -> tuple[float, float]:
        ddp = DistributedDataParallel(line())
        items = counts[rank]
        loss = ddp(ones(rank, items)).mean()
        weighed = ddp.weigh(loss, items)
        assert weighed.isnan() if items == 0 else weighed == loss
        weighed.backward()
        return grad_of(ddp), phalanx.mean(weighed, items)

    true = sum(n * (rank + 1) for rank, n in enumerate(counts)) / sum(counts)
    assert run(len(counts), program) == [(pytest.approx(true), pytest.approx(true))] * len(counts)


def test_no_items_at_all() -> None:
    def program(rank: int) -> tuple[float | None, float]:
        ddp = DistributedDataParallel(line())
        loss = ddp.weigh(ddp(ones(rank, 0)).mean(), 0)
        loss.backward()
        first = grad_of(ddp)
        mean = phalanx.mean(loss, 0)
        ddp.weigh(ddp(ones(rank)).mean(), 1).backward()
        return first, mean, grad_of(ddp)

    for first, mean, second in run(2, program):
        assert not first and math.isnan(mean) and second == 1.5


@pytest.mark.parametrize("whole", [True, False])
def test_weights_inside_join(whole: bool) -> None:
    """Whatever the divisor, the mean is over the items that are seen."""

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(line())
        gradients = []
        with ddp.join(divide_by_initial_world_size=whole):
            for step in range(1 + rank):
                ddp.zero_grad()
                ddp.weigh(ddp(ones(rank, step + rank)).mean(), step + rank).backward()
                gradients.append(grad_of(ddp))
        return gradients

    # Items of ranks 0, 1, 2 in each step: 0, 1, 2; then 2, 3 of ranks 1 and 2; then 4 of rank 2.
    assert run(3, program)[2] == pytest.approx([8 / 3, 13 / 5, 3.0])


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_weights_under_a_loss_scale_and_clipping(scale: float) -> None:
    """As GradScaler does it: scale, backward, unscale, clip, step; an inf on one rank reaches every rank."""

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(line())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        seen = []
        for poisoned in (False, True):
            for micro in range(2):
                with ddp.accumulate(every=2) as syncs:
                    items = 1 + 2 * rank + micro
                    inputs = ones(rank, items) * (math.inf if poisoned and rank == 0 and micro == 0 else 1.0)
                    scaler.scale(ddp.weigh(ddp(inputs).mean(), items)).backward()
                    if not syncs:
                        with pytest.raises(MisuseError, match="not synchronised"):
                            phalanx.clip_grad_norm_(ddp.parameters(), 1.0)
            scaler.unscale_(optimizer)
            seen.append(grad_of(ddp))
            phalanx.clip_grad_norm_(ddp.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append(ddp.module.weight.item())
        return [*seen, scaler.get_scale()]

    # Items: 1 + 2 of value 1, 3 + 4 of value 2. The second step is left out, and the scale is halved.
    mean = (3 * 1.0 + 7 * 2.0) / 10
    for first, after, poisoned, at_last, scaled in run(2, program):
        assert (first, after, at_last, scaled) == pytest.approx((mean, 0.5, 0.5, scale / 2), rel=1e-5)
        assert not math.isfinite(poisoned)


def test_weights_under_autocast() -> None:
    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        with torch.autocast("cpu", torch.bfloat16):
            out = ddp(ones(rank, 1 + 2 * rank))
            assert out.dtype is torch.bfloat16
            loss = ddp.weigh(out.mean(), 1 + 2 * rank)
        loss.backward()
        return grad_of(ddp)

    assert run(2, program) == pytest.approx([1.75, 1.75], rel=1e-2)


def test_large_counts_do_not_overflow_half_precision() -> None:
    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line().half())
        for _ in range(2):
            with ddp.accumulate(every=2):
                ddp.weigh(ddp(ones(rank).half()).mean(), 2.0**20 * (1 + rank)).backward()
        return grad_of(ddp)

    assert run(2, program) == pytest.approx([5 / 3] * 2, rel=1e-3)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_rank_that_does_not_weigh_while_another_does(rounds: int) -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(line())
        for _ in range(rounds):
            with ddp.accumulate(every=rounds):
                loss = ddp(ones(rank)).mean()
                (ddp.weigh(loss, 2) if rank == 1 else loss).backward()

    for text in failures(run(2, program, raises=False), RankMismatchError):
        assert "rank 0 in a backward without weigh" in text and "rank 1 in a weighed backward" in text
        assert "ddp.weigh(loss, n) on every rank, with n = 0" in text


def misuse(ddp: DistributedDataParallel, how: str, rank: int) -> None:
    if how == "two counts":
        loss = ddp(ones(rank)).mean()
        (ddp.weigh(loss, 1) + ddp.weigh(2 * loss, 2)).backward()
    elif how == "half weighed":
        with ddp.no_sync():
            ddp(ones(rank)).mean().backward()
        ddp.weigh(ddp(ones(rank)).mean(), 1).backward()
    else:
        ddp.weigh(ddp(ones(rank)).mean(), -1)


NO_COUNTS = {
    "minus one": (-1, "n=-1.: a negative number of items"),
    "nan": (math.nan, "n=nan.: not a finite number of items"),
    "inf": (math.inf, "n=inf.: not a finite number of items"),
    "minus inf": (-math.inf, "n=-inf.: a negative number of items"),
    "nan in a tensor": (torch.tensor(math.nan), "n=nan.: not a finite number of items"),
    "nan of numpy": (np.float32("nan"), "n=nan.: not a finite number of items"),
    "nan in decimal": (Decimal("nan"), "n.: this Decimal is not a number of items"),
    "text": ("3", "n.: this str is not a number of items"),
    "bytes": (b"3", "n.: this bytes is not a number of items"),
    "nothing": (None, "n.: this NoneType is not a number of items"),
    "list": ([3], "n.: this list is not a number of items"),
    "two": (torch.tensor([3, 4]), r"n.: this Tensor of shape .2,. is not a number of items"),
    "array of two": (np.array([3, 4]), "n.: this ndarray is not a number of items"),
    "complex": (torch.tensor(3j), "n.: this Tensor of shape .. is not a number of items"),
    "beyond all bounds": (10**400, "n.: this int is not a number of items"),
}


@pytest.mark.parametrize("which", NO_COUNTS)
def test_what_is_no_number_of_items_is_refused_before_it_does_harm(which: str) -> None:
    n, said = NO_COUNTS[which]

    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        with pytest.raises(MisuseError, match=rf"^\[rank {rank}\] weigh.loss, {said}\nInstead: ddp.weigh") as caught:
            ddp.weigh(ddp(ones(rank)).mean(), n)
        assert caught.value.rank == rank and caught.value.__cause__ is None
        ddp.weigh(ddp(ones(rank)).mean(), 1).backward()
        return grad_of(ddp)

    assert run(2, program) == [1.5, 1.5]


@pytest.mark.parametrize(
    "kind", [float, torch.tensor, lambda n: torch.tensor([n]), np.int64, np.float16, np.array, Decimal, Fraction]
)
def test_a_number_of_items_may_be_of_many_kinds(kind: Any) -> None:
    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        ddp.weigh(ddp(ones(rank)).mean(), kind(1 + 2 * rank)).backward()
        return grad_of(ddp)

    assert run(2, program) == [1.75, 1.75]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("two counts", "within one backward"), ("half weighed", "some backwards since the last synchronisation"),
        ("negative", "negative"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_right(how: str, said: str) -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(line())
        misuse(ddp, how, rank)

    for text in failures(run(2, program, raises=False), MisuseError):
        assert said in text


def test_the_same_count_on_all_terms_of_a_loss() -> None:
    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        out = ddp(ones(rank, 1 + 2 * rank))
        (ddp.weigh(out.mean(), 1 + 2 * rank) + ddp.weigh(3 * out.mean(), 1 + 2 * rank)).backward()
        return grad_of(ddp)

    assert run(2, program) == pytest.approx([4 * 7 / 4] * 2)


@pytest.mark.parametrize("zeroed", ["none", "zero", "not"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_step_on_top_of_the_gradients_of_the_last_one(every: int, zeroed: str) -> None:
    """Weighed exactly while a round is one micro-batch; a longer one would scale what is there, and is refused."""

    def program(rank: int) -> list[float]:
        ddp, seen = DistributedDataParallel(line()), []
        for _ in range(2):
            if zeroed != "not":
                ddp.zero_grad(set_to_none=zeroed == "none")
            for micro in range(every):
                with ddp.accumulate(every):
                    ddp.weigh(ddp(ones(rank, 1 + rank)).mean(), 1 + rank + micro).backward()
            seen.append(grad_of(ddp))
        return seen

    if every == 1:
        mean = 5 / 3
        assert run(2, program) == [pytest.approx([mean, mean if zeroed != "not" else 2 * mean])] * 2
    elif zeroed != "not":
        assert run(2, program) == [pytest.approx([13 / 8, 13 / 8])] * 2
    else:
        for failure in failures(run(2, program, raises=False), MisuseError):
            assert "on top of the gradients of an earlier step" in failure


@pytest.mark.parametrize("how", ["dropped", "zeroed", "raised"])
@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_items_of_what_is_thrown_away_in_the_middle_of_a_round_do_not_count(
    transport: str, steps_before: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *_: Any) -> None:
            raise ZeroDivisionError

    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        for _ in range(steps_before):
            ddp.weigh(ddp(ones(rank)).mean(), 5).backward()
            ddp.zero_grad()
        with ddp.no_sync():
            ddp.weigh(ddp(ones(rank, 3)).mean(), 3).backward()
            if how == "raised":
                with pytest.raises(ZeroDivisionError):
                    ddp.weigh(Fail.apply(ddp(ones(rank, 7))).mean(), 7).backward()
        if how != "raised":
            ddp.zero_grad(set_to_none=how == "dropped")
        ddp.weigh(ddp(ones(rank, 1)).mean(), 1).backward()
        return grad_of(ddp)

    assert run(2, program) == [1.5, 1.5]


def test_items_of_a_flat_loss_count() -> None:
    """Gradients that are zero by themselves are not zeroed ones."""

    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        with ddp.no_sync():
            ddp.weigh(ddp(ones(rank) * 0).mean(), 3).backward()
        ddp.weigh(ddp(ones(rank)).mean(), 1).backward()
        return grad_of(ddp)

    assert run(2, program) == [1.5 / 4] * 2
