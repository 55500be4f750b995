"""join(): ranks with different numbers of batches, in the cases that people report, and what goes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.optim import ZeroRedundancyOptimizer

import phalanx
from phalanx import DistributedDataParallel, MisuseError, PeerFailedError, RankMismatchError
from phalanx.testing import Outcome, run

both_divisors = pytest.mark.parametrize("whole", [True, False])


def line(weight: float = 1.0) -> nn.Linear:
    """A model with one weight, whose gradient is the mean of its inputs."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def ones(rank: int, items: int = 1) -> Tensor:
    return torch.full((items, 1), rank + 1.0)


def grad_of(ddp: DistributedDataParallel) -> float | None:
    gradient = ddp.module.weight.grad
    return None if gradient is None else gradient.item()


def everywhere(value: Any) -> list[Any]:
    """This value of every rank; only where all of them run."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def alike(ddp: DistributedDataParallel) -> bool:
    """Whether all ranks have the same parameters and buffers."""
    states = everywhere({name: tensor.tolist() for name, tensor in ddp.module.state_dict().items()})
    return all(state == states[0] for state in states)


def failures(outcomes: list[Outcome], kind: type[Exception], within: float = 4.0) -> list[str]:
    """The texts of what every rank raised, which must be of this kind and soon."""
    assert all(isinstance(outcome.error, kind) for outcome in outcomes), outcomes
    assert max(outcome.at for outcome in outcomes) < within
    return [str(outcome.error) for outcome in outcomes]


# -- different numbers of batches ------------------------------------------------------------------------


@both_divisors
@pytest.mark.parametrize("counts", [(3, 6), (6, 3), (0, 3), (3, 0), (5, 0, 2), (0, 0, 4), (1, 2, 3, 4)])
def test_a_rank_without_data_contributes_nothing(counts: tuple[int, ...], whole: bool) -> None:
    def program(rank: int) -> tuple[list[float], float]:
        ddp = DistributedDataParallel(line())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        gradients = []
        with ddp.join(divide_by_initial_world_size=whole):
            for _ in range(counts[rank]):
                optimizer.zero_grad()
                ddp(ones(rank)).sum().backward()
                gradients.append(grad_of(ddp))
                optimizer.step()
        assert alike(ddp)
        return gradients, ddp.module.weight.item()

    steps = []
    for step in range(max(counts)):
        values = [rank + 1.0 for rank, count in enumerate(counts) if step < count]
        steps.append(sum(values) / (len(counts) if whole else len(values)))
    for rank, (gradients, weight) in enumerate(run(len(counts), program)):
        assert gradients == pytest.approx(steps[: counts[rank]])
        assert weight == pytest.approx(1.0 - 0.1 * sum(steps), abs=1e-6)


def test_no_rank_has_a_batch() -> None:
    def program(rank: int) -> bool:
        ddp = DistributedDataParallel(nn.Sequential(line(), nn.BatchNorm1d(1)))
        with ddp.join():
            pass
        return alike(ddp) and ddp.module[0].weight.grad is None

    assert run(3, program) == [True] * 3


def test_gradients_of_the_last_step_are_on_every_rank() -> None:
    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(1 + 2 * rank):
                ddp.zero_grad()
                ddp(ones(rank)).sum().backward()
        return grad_of(ddp)

    assert run(2, program) == [2.0, 2.0]


# -- one after the other, one in the other ---------------------------------------------------------------


def test_joins_one_after_the_other() -> None:
    def program(rank: int) -> list[bool]:
        ddp = DistributedDataParallel(line())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        same = []
        for epoch in range(3):
            with ddp.join(divide_by_initial_world_size=epoch % 2 == 0):
                for _ in range((rank + epoch) % 3):
                    optimizer.zero_grad()
                    ddp(ones(rank)).sum().backward()
                    optimizer.step()
            same.append(alike(ddp))
            ddp.zero_grad()
            ddp(ones(rank)).sum().backward()  # between joins all ranks run, and are divided by their number
            same.append(grad_of(ddp) == 2.0)
        return same

    assert run(3, program) == [[True] * 6] * 3


def test_a_join_in_a_join() -> None:
    """The inner loop of one rank ends first, then its outer loop: each goes on for the others."""

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(line())
        gradients = []
        with ddp.join():
            with ddp.join(divide_by_initial_world_size=False):
                for _ in range(1 + rank):
                    ddp.zero_grad()
                    ddp(ones(rank)).sum().backward()
                    gradients.append(grad_of(ddp))
            for _ in range(2 - rank):
                ddp.zero_grad()
                ddp(ones(rank)).sum().backward()
                gradients.append(grad_of(ddp))
        assert ddp._reducer.divisor is None
        return gradients

    assert run(2, program) == [[1.5, 1.5, 0.5], [1.5, 2.0, 1.5]]


@pytest.mark.parametrize("together", [True, False])
def test_two_models(together: bool) -> None:
    """One join over both, or a join of the one around a join of the other, with collectives of both inside."""

    @contextmanager
    def joined(one: DistributedDataParallel, two: DistributedDataParallel) -> Iterator[None]:
        if together:
            with phalanx.Join([one, two], divide_by_initial_world_size=False):
                yield
        else:
            with one.join(divide_by_initial_world_size=False), two.join(divide_by_initial_world_size=False):
                yield

    def program(rank: int) -> list[tuple[float, float]]:
        one, two = DistributedDataParallel(line()), DistributedDataParallel(nn.Sequential(line(2.0), nn.BatchNorm1d(1)))
        gradients = []
        with joined(one, two):
            for step in range(2 + 2 * rank):
                one.zero_grad()
                two.zero_grad()
                one(ones(rank)).sum().backward()
                two(torch.tensor([[1.0], [2.0], [4.0]]) * (step + 1)).square().sum().backward()
                gradients.append((grad_of(one), two.module[1].weight.grad.item()))
        assert alike(one) and alike(two)
        return gradients

    first, second = run(2, program)
    assert [one for one, _ in second] == [1.5, 1.5, 2.0, 2.0]
    assert first == second[:2]
    assert [two for _, two in second] == pytest.approx([6.0] * 4, rel=1e-4)


def test_an_optimizer_with_a_join_hook_of_its_own() -> None:
    """ZeroRedundancyOptimizer steps a shard on every rank, and so it must on ranks that have joined."""

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(nn.Sequential(line(), line(), line()))
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        with phalanx.Join([ddp, optimizer]):
            for _ in range(1 + 2 * rank):
                optimizer.zero_grad()
                ddp(ones(rank)).sum().backward()
                optimizer.step()
        assert alike(ddp)
        return [parameter.item() for parameter in ddp.parameters()]

    truth = nn.Sequential(line(), line(), line())
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        sum(truth(ones(rank)).sum() / 2 for rank in range(2) if step < 1 + 2 * rank).backward()
        optimizer.step()
    assert run(2, program) == [pytest.approx([parameter.item() for parameter in truth.parameters()])] * 2


# -- left early ------------------------------------------------------------------------------------------


def test_throwing_when_one_has_run_out() -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(line())
        with ddp.join(throw_on_early_termination=True):
            for _ in range(2 + rank):
                ddp(ones(rank)).sum().backward()

    texts = failures(run(3, program, raises=False), phalanx.ExhaustedError)
    assert texts[0] == "Rank 0 exhausted all inputs."
    assert texts[1] == texts[2]
    assert texts[1] == "Detected at least one rank that exhausted inputs. Throwing across all ranks."


def test_throwing_needs_somebody_who_runs() -> None:
    def program(rank: int) -> bool:
        ddp = DistributedDataParallel(line())
        with ddp.join(throw_on_early_termination=True):
            for _ in range(3):
                ddp(ones(rank)).sum().backward()
        return alike(ddp)

    assert run(2, program) == [True, True]


@pytest.mark.parametrize("caught", [True, False])
def test_a_loop_left_by_an_exception_leaves_nobody_waiting(caught: bool) -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(line())
        try:
            with ddp.join():
                for step in range(5):
                    if (rank, step) == (1, 2):
                        raise KeyError("no such sample")
                    ddp(ones(rank)).sum().backward()
        except KeyError:
            if not caught:
                raise
            for _ in range(3):
                ddp(ones(rank)).sum().backward()

    first, second = run(2, program, raises=False)
    assert isinstance(first.error, PeerFailedError) and "no such sample" in str(first.error)
    assert first.at < 4 and first.error.peer == 1
    assert isinstance(second.error, RuntimeError if caught else KeyError)


def test_a_rank_that_has_joined_hears_of_a_failure() -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(line())
        with ddp.join():
            for step in range(1 + 3 * rank):
                if step == 3:
                    raise ValueError("disk full")
                ddp(ones(rank)).sum().backward()

    first, second = run(2, program, raises=False)
    assert isinstance(first.error, PeerFailedError) and "disk full" in str(first.error) and first.at < 4
    assert isinstance(second.error, ValueError)


@pytest.mark.parametrize("disabled", [True, False])
def test_uneven_inputs_without_join_are_an_error_on_both(disabled: bool) -> None:
    """And never a metric that is mixed into a gradient."""

    def program(rank: int) -> None:
        ddp = DistributedDataParallel(line())
        metric = torch.ones(1)
        if disabled:
            with ddp.join(enable=False):
                for _ in range(2 + rank):
                    ddp(ones(rank)).sum().backward()
                dist.all_reduce(metric)
        else:
            for _ in range(2 + rank):
                ddp(ones(rank)).sum().backward()
            dist.all_reduce(metric)

    for text in failures(run(2, program, raises=False), RankMismatchError):
        assert "all_reduce" in text and "gradient" in text and "ddp.join()" in text


def test_disabled_with_even_inputs() -> None:
    def program(rank: int) -> float:
        ddp = DistributedDataParallel(line())
        with ddp.join(enable=False, throw_on_early_termination=True):
            ddp(ones(rank)).sum().backward()
        return grad_of(ddp)

    assert run(2, program) == [1.5, 1.5]


def test_models_of_different_groups_do_not_join_together() -> None:
    def program(rank: int) -> None:
        halves = [dist.new_group([0]), dist.new_group([1])]
        phalanx.Join([
            DistributedDataParallel(line()), DistributedDataParallel(line(), process_group=halves[rank])
        ])  # fmt: skip

    for text in failures(run(2, program, raises=False), MisuseError):
        assert "different process groups" in text and "one join for each group" in text


# -- communication hooks ---------------------------------------------------------------------------------


@both_divisors
@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.bf16_compress_hook])
def test_communication_hooks(hook: Callable, whole: bool) -> None:
    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(line())
        ddp.register_comm_hook(None, hook)
        gradients = []
        with ddp.join(divide_by_initial_world_size=whole):
            for _ in range(1 + rank):
                ddp.zero_grad()
                ddp(ones(rank)).sum().backward()
                gradients.append(grad_of(ddp))
        assert alike(ddp)
        return gradients

    assert run(2, program) == [[1.5], [1.5, 1.0 if whole else 2.0]]
