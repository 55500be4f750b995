"""Accumulation, skipped batches and weights: what one step's gradient is, in and outside of join()."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

from phalanx import DistributedDataParallel, MisuseError
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


@pytest.mark.parametrize("weighed", [True, False])
def test_skipping_after_a_backward_that_raised_on_top_of_accumulated_gradients(
    weighed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of it cannot be told from what was there: this rank's part of the round is dropped, and it says so."""

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(nn.Sequential(line(), line()))

        def backward(value: float, fails: bool = False) -> None:
            out = ddp.module[0](torch.full((1, 1), value)).clone()
            if fails:
                out.register_hook(_out_of_memory)
            loss = ddp.module[1](out).mean()
            (ddp.weigh(loss, 2 + rank) if weighed else loss).backward()

        with ddp.no_sync():
            backward(5.0)
        if rank == 1:
            with pytest.raises(MemoryError):
                backward(7.0, fails=True)
            ddp.skip()
        else:
            backward(9.0)
        first = ddp.module[0].weight.grad.item()
        ddp.zero_grad()
        backward(rank + 1.0)
        return [first, ddp.module[0].weight.grad.item()]

    expected = [7.0, pytest.approx(8 / 5)] if weighed else [14.0, 1.5]
    assert run(2, program) == [expected, expected]
    assert "[rank 1] skip()" in caplog.text and "[rank 0]" not in caplog.text


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


def test_the_last_model_is_that_of_a_rank_that_skipped_the_last_step() -> None:
    """Rank 1 leaves a gradient of 4; rank 0 skips its second step, gets that gradient, and steps with it."""

    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.25)
        with ddp.join(divide_by_initial_world_size=False):
            ddp(ones(rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 1:
                with ddp.no_sync():
                    (2 * ddp(ones(rank)).sum()).backward()
            else:
                ddp.skip()
                assert grad_of(ddp) == 4.0
                optimizer.step()
        return ddp.module.weight.item()

    assert run(2, program) == [1.0 - 0.25 * (1.5 + 4.0)] * 2


def test_a_parameter_without_elements_has_an_empty_gradient_on_the_rank_that_skips_too() -> None:
    def program(rank: int) -> list[tuple[int, ...]]:
        model = nn.Linear(2, 1)
        model.empty = nn.Parameter(torch.zeros(3, 0))
        ddp = DistributedDataParallel(model)
        if rank == 1:
            ddp.skip()
        else:
            (ddp(torch.ones(1, 2)).sum() + model.empty.sum()).backward()
        return [tuple(parameter.grad.shape) for parameter in model.parameters()]

    assert run(2, program) == [[(1, 2), (1,), (3, 0)]] * 2
