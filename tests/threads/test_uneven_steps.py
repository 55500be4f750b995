"""Accumulation, skipped batches and weights: what one step's gradient is, in and outside of join()."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from torch import nn

import phalanx
from phalanx import DistributedDataParallel, MisuseError, RankMismatchError
from phalanx.testing import run
from tests.threads.test_uneven_cases import alike, failures, grad_of, line, ones

# -- accumulation ----------------------------------------------------------------------------------------


def test_no_sync_rounds_in_join() -> None:
    """Rank 0 has one round of two, rank 1 has two; nothing is lost and nothing counts twice."""

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(line())
        gradients = []
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                ddp.zero_grad()
                with ddp.no_sync():
                    ddp(ones(rank)).sum().backward()
                assert grad_of(ddp) == rank + 1
                ddp(10 * ones(rank)).sum().backward()
                gradients.append(grad_of(ddp))
        assert alike(ddp)
        return gradients

    assert run(2, program) == [[16.5], [16.5, 22.0]]


@pytest.mark.parametrize(("whole", "expected"), [(True, [1.0, 1.5]), (False, [2.0, 1.5])])
def test_what_a_joined_rank_has_left_is_in_the_next_step(whole: bool, expected: list[float]) -> None:
    """Rank 0 joins with a gradient of 1 that it has not synchronised, rank 2 has no data at all."""

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(line())
        gradients = []
        with ddp.join(divide_by_initial_world_size=whole):
            if rank == 0:
                with ddp.no_sync():
                    ddp(ones(rank)).sum().backward()
            if rank == 1:
                for _ in range(2):
                    ddp(ones(rank)).sum().backward()
                    gradients.append(grad_of(ddp))
                    ddp.zero_grad()
        assert alike(ddp)
        return gradients

    first = 3.0 / (3 if whole else 2)
    second = 2.0 / (3 if whole else 1)
    assert run(3, program) == [[], pytest.approx([first, second]), []]


@pytest.mark.parametrize(("whole", "divisor"), [(True, 3), (False, 2)])
@pytest.mark.parametrize("weighed", [True, False])
def test_what_is_left_at_the_end_is_synchronised_on_leaving(whole: bool, divisor: int, weighed: bool) -> None:
    """Ranks 0 and 1 leave with gradients of 1 and 2; rank 2, without data, contributes nothing to the mean."""

    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        with ddp.join(divide_by_initial_world_size=whole):
            for _ in range(1 if rank < 2 else 0):
                with ddp.no_sync():
                    loss = ddp(ones(rank)).mean()
                    (ddp.weigh(loss, 1 + 2 * rank) if weighed else loss).backward()
        return grad_of(ddp)

    assert run(3, program) == pytest.approx([7 / 4 if weighed else 3 / divisor] * 3)


@pytest.mark.parametrize("weighed", [True, False])
@pytest.mark.parametrize("around_backward", [True, False])
def test_accumulation_with_different_numbers_of_micro_batches(weighed: bool, around_backward: bool) -> None:
    counts, every = (5, 3, 0), 2

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(line())
        gradients = []
        with ddp.join(divide_by_initial_world_size=False):
            for i in range(counts[rank]):
                last = i + 1 == counts[rank]
                syncs = last or i % every == every - 1
                with contextlib.nullcontext() if around_backward else ddp.accumulate(every, last) as told:
                    assert around_backward or told == syncs
                    loss = ddp((i + 1) * ones(rank, i + 1)).mean()
                    loss = ddp.weigh(loss, i + 1) if weighed else loss
                    with ddp.no_sync() if around_backward and not syncs else contextlib.nullcontext():
                        loss.backward()
                if syncs:
                    gradients.append(grad_of(ddp))
                    ddp.zero_grad()
        return gradients

    expected = []
    for step in range(3):
        parts = {
            rank: [(i + 1, (i + 1.0) * (rank + 1)) for i in range(every * step, min(every * (step + 1), counts[rank]))]
            for rank in range(3)
        }
        together = [part for rank in parts for part in parts[rank]]
        if weighed:
            expected.append(sum(n * value for n, value in together) / sum(n for n, _ in together))
        else:
            expected.append(sum(value for _, value in together) / sum(bool(parts[rank]) for rank in parts))
    assert run(3, program) == [pytest.approx(expected), pytest.approx(expected[:2]), []]


def test_micro_batches_end_with_a_shorter_round() -> None:
    def program(rank: int) -> tuple[list[bool], list[float]]:
        ddp = DistributedDataParallel(line())
        told, gradients = [], []
        for batch, syncs in ddp.micro_batches([ones(rank)] * 5, every=2):
            ddp(batch).sum().backward()
            told.append(syncs)
            if syncs:
                gradients.append(grad_of(ddp))
                ddp.zero_grad()
        return told, gradients

    assert run(2, program) == [([False, True, False, True, True], [3.0, 3.0, 1.5])] * 2
    assert run(1, lambda _: list(DistributedDataParallel(line()).micro_batches([], every=3))) == [[]]


def test_accumulate_takes_a_positive_number() -> None:
    def program(rank: int) -> None:
        with DistributedDataParallel(line()).accumulate(every=0):
            pass

    for text in failures(run(2, program, raises=False), MisuseError):
        assert "accumulate(every=0)" in text and "positive" in text


# -- skipping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("size", [1, 3000])
def test_a_skipped_batch_counts_for_nothing(forward: bool, size: int) -> None:
    """Each rank skips one step, and after it has the others' gradient; in the last step all skip."""

    def program(rank: int) -> list[float | None]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(1, size, bias=False))
        gradients = []
        for step in range(5):
            ddp.zero_grad()
            if step == rank or step == 4:
                if forward:
                    ddp(torch.tensor([[math.nan]]))
                ddp.skip()
            else:
                ddp(ones(rank)).sum().backward()
            gradient = ddp.module.weight.grad
            gradients.append(None if gradient is None else gradient[-1].item())
        ddp(ones(rank)).sum().backward()
        return [*gradients, ddp.module.weight.grad[0].item()]

    assert run(3, program) == [[2.5, 2.0, 1.5, 2.0, None, 2.0]] * 3


def test_skipping_after_a_backward_that_raised() -> None:
    """Out of memory in the middle of backward, say: what it had produced is forgotten."""

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(nn.Sequential(line(), line()))
        for step in range(2):
            ddp.zero_grad()
            out = ddp.module[0](ones(rank)).clone()
            if rank == 1 and step == 0:
                out.register_hook(_out_of_memory)
            try:
                ddp.module[1](out).sum().backward()
            except MemoryError:
                ddp.skip()
        return [parameter.grad.item() for parameter in ddp.parameters()]

    assert run(2, program) == [[1.5, 1.5]] * 2


def _out_of_memory(_: torch.Tensor) -> None:
    raise MemoryError


def test_skipping_inside_join() -> None:
    """Rank 0 has joined, and of those who run one skips, then the other, then both."""

    def program(rank: int) -> tuple[list[float | None], float]:
        ddp = DistributedDataParallel(line())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        gradients = []
        with ddp.join(divide_by_initial_world_size=False):
            for step in range(0 if rank == 0 else 4):
                optimizer.zero_grad()
                if step in (rank, 3):
                    ddp.skip()
                else:
                    ddp(ones(rank)).sum().backward()
                gradients.append(grad_of(ddp))
                optimizer.step()
        assert alike(ddp)
        return gradients, ddp.module.weight.item()

    expected = [2.5, 3.0, 2.0, None]
    assert run(3, program) == [([], -2.75), (expected, -2.75), (expected, -2.75)]


@pytest.mark.parametrize("last", [True, False])
def test_skipping_a_micro_batch(last: bool) -> None:
    """What a rank has accumulated before in this round still counts."""

    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        for micro in range(2):
            with ddp.accumulate(every=2) as syncs:
                if rank == 0 and syncs == last:
                    ddp.skip()
                else:
                    ddp.weigh(ddp(10**micro * ones(rank)).mean(), 2 + micro).backward()
        return grad_of(ddp)

    of_rank_0 = (2, 1.0) if last else (3, 10.0)
    parts = [of_rank_0, (2, 2.0), (3, 20.0)]
    assert run(2, program) == pytest.approx([sum(n * v for n, v in parts) / sum(n for n, _ in parts)] * 2)


def test_all_skip_the_closing_micro_batch() -> None:
    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        with ddp.no_sync():
            ddp(ones(rank)).sum().backward()
        ddp.skip()
        return grad_of(ddp)

    assert run(2, program) == [1.5, 1.5]


def test_buffers_of_a_rank_that_skips() -> None:
    """Rank 0 skips: it gets the running statistics of a rank that does not, instead of sending its old ones."""

    def program(rank: int) -> tuple[float, int]:
        ddp = DistributedDataParallel(nn.Sequential(line(), phalanx.SyncBatchNorm(1)))
        for step in range(2):
            if rank == 0 and step == 0:
                ddp.skip()
            else:
                ddp(torch.tensor([[1.0], [3.0]])).square().sum().backward()
        state = ddp.module[1].state_dict()
        return state["running_mean"].item(), state["num_batches_tracked"].item()

    assert run(2, program) == [(pytest.approx(0.38), 2)] * 2


# -- weights ---------------------------------------------------------------------------------------------


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
        for micro in range(2):
            with ddp.accumulate(every=2):
                ddp.weigh(ddp(ones(rank).half()).mean(), 2.0**20 * (1 + rank)).backward()
        return grad_of(ddp)

    assert run(2, program) == pytest.approx([5 / 3] * 2, rel=1e-3)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_rank_that_does_not_weigh_while_another_does(rounds: int) -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(line())
        for micro in range(rounds):
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


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("two counts", "within one backward"), ("half weighed", "some backwards since the last synchronisation"),
        ("negative", "negative"),
    ],
)  # fmt: skip
def test_weights_that_cannot_be_right(how: str, said: str) -> None:
    def program(rank: int) -> Any:
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
