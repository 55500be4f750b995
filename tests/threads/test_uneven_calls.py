"""A user's own collectives inside join(): a rank that has joined takes part in them and contributes nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx import DistributedDataParallel, MisuseError, PeerFailedError, RankMismatchError
from phalanx.testing import run
from tests.threads.test_uneven_cases import failures, line, ones

SMALL, LARGE = 3, 5000  # what travels inside tickets, and what does not


def last_step(rank: int, call: Any) -> list[Any]:
    """Train for rank + 1 steps; what `call(step)` gives after each of them."""
    ddp = DistributedDataParallel(line())
    with ddp.join():
        answers = []
        for step in range(rank + 1):
            ddp(ones(rank)).sum().backward()
            answers.append(call(step))
    return answers


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("operation", "dtype", "expected"),
    [
        (dist.ReduceOp.SUM, torch.float32, [6, 5, 3]),
        (dist.ReduceOp.SUM, torch.bfloat16, [6, 5, 3]),
        (dist.ReduceOp.SUM, torch.int64, [6, 5, 3]),
        (dist.ReduceOp.MAX, torch.float64, [-1, -2, -3]),
        (dist.ReduceOp.MAX, torch.int32, [-1, -2, -3]),
        (dist.ReduceOp.MIN, torch.float32, [1, 2, 3]),
        (dist.ReduceOp.MIN, torch.uint8, [1, 2, 3]),
        (dist.ReduceOp.PRODUCT, torch.float32, [6, 6, 3]),
        (dist.ReduceOp.BAND, torch.int64, [0, 2, 3]),
        (dist.ReduceOp.BOR, torch.int64, [3, 3, 3]),
        (dist.ReduceOp.AVG, torch.float64, [2, 5 / 3, 1]),  # over all ranks there are
    ],
    ids=str,
)
def test_all_reduce(operation: Any, dtype: torch.dtype, expected: list[int], size: int) -> None:
    def program(rank: int) -> list[float]:
        sign = -1 if operation == dist.ReduceOp.MAX else 1

        def call(_: int) -> float:
            tensor = torch.full((size,), sign * (rank + 1)).to(dtype)
            dist.all_reduce(tensor, operation)
            assert (tensor == tensor[0]).all()
            return tensor[0].item()

        return last_step(rank, call)

    assert run(3, program) == [pytest.approx(expected[: rank + 1]) for rank in range(3)]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_reduce_to_a_rank_that_runs(size: int) -> None:
    def program(rank: int) -> list[float]:
        def call(_: int) -> float:
            tensor = torch.full((size,), rank + 1.0)
            dist.reduce(tensor, 2)
            return tensor[0].item()

        return last_step(rank, call)

    assert run(3, program)[2] == [6, 5, 3]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_gathers_get_zeros(size: int) -> None:
    def program(rank: int) -> list[Any]:
        def call(step: int) -> Any:
            tensor = torch.full((size,), rank + 1.0)
            parts = [torch.full((size,), -1.0) for _ in range(3)]
            dist.all_gather(parts, tensor)
            flat = torch.full((3 * size,), -1.0)
            dist.all_gather_into_tensor(flat, tensor)
            assert torch.equal(flat, torch.cat(parts))
            gathered = [torch.full((size,), -1.0) for _ in range(3)] if rank == 2 else None
            dist.gather(tensor, gathered, dst=2)
            assert rank != 2 or torch.equal(torch.cat(gathered), flat)
            return [part[-1].item() for part in parts]

        return last_step(rank, call)

    assert run(3, program)[2] == [[1, 2, 3], [0, 2, 3], [0, 0, 3]]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_reduce_scatter(size: int) -> None:
    def program(rank: int) -> list[float]:
        def call(_: int) -> float:
            out = torch.empty(size)
            dist.reduce_scatter_tensor(out, torch.full((3 * size,), rank + 1.0))
            return out[-1].item()

        return last_step(rank, call)

    assert run(3, program) == [[6], [6, 5], [6, 5, 3]]


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_broadcast_and_scatter_from_a_rank_that_runs(
    size: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)

    def program(rank: int) -> list[tuple[float, float]]:
        def call(step: int) -> tuple[float, float]:
            tensor, part = torch.full((size,), rank + 10.0 * step), torch.empty(size)
            dist.broadcast(tensor, src=2)
            dist.scatter(part, [torch.full((size,), 1.0 + place) for place in range(3)] if rank == 2 else None, src=2)
            return tensor[-1].item(), part[-1].item()

        return last_step(rank, call)

    assert run(3, program) == [[(2 + 10 * step, rank + 1) for step in range(rank + 1)] for rank in range(3)]


@pytest.mark.parametrize("call", ["broadcast", "scatter"])
def test_nothing_comes_from_a_rank_that_has_joined(call: str) -> None:
    def program(rank: int) -> None:
        def from_rank_0(_: int) -> None:
            if call == "broadcast":
                dist.broadcast(torch.ones(3), src=0)
            else:
                dist.scatter(torch.empty(3), [torch.ones(3)] * 3 if rank == 0 else None, src=0)

        last_step(rank, from_rank_0)

    outcomes = run(3, program, raises=False)
    failures(outcomes[1:], RankMismatchError)
    # The joined rank hears it from its own tickets, or sooner from a rank that has raised.
    assert isinstance(outcomes[0].error, (RankMismatchError, PeerFailedError)) and outcomes[0].at < 4
    for outcome in outcomes:
        text = str(outcome.error)
        assert f"{call}(3 x float32, root=0)" in text and "it has run out of data" in text and "join()" in text


@pytest.mark.parametrize("call", ["all_gather_object", "gather_object"])
def test_a_rank_that_has_joined_has_no_object_to_give(call: str) -> None:
    def program(rank: int) -> None:
        def gather(_: int) -> None:
            objects: list[Any] | None = [None] * 3
            if call == "all_gather_object":
                dist.all_gather_object(objects, {"rank": rank})
            else:
                dist.gather_object({"rank": rank}, objects if rank == 2 else None, dst=2)
            assert objects == [{"rank": each} for each in range(3)] or rank != 2

        last_step(rank, gather)

    outcomes = run(3, program, raises=False)
    failures(outcomes[1:], MisuseError)
    failures(outcomes[:1], PeerFailedError)
    for outcome in outcomes:
        assert "none to give: rank 0" in str(outcome.error) and "test_uneven_calls.py" in str(outcome.error)


def test_barriers() -> None:
    def program(rank: int) -> int:
        def call(_: int) -> None:
            dist.barrier()
            dist.group.WORLD.monitored_barrier(timedelta(seconds=20))

        return len(last_step(rank, call))

    assert run(3, program) == [1, 2, 3]


def test_agreements() -> None:
    """A rank that has joined has no condition and no items."""

    def program(rank: int) -> list[tuple[bool, float]]:
        return last_step(rank, lambda _: (phalanx.stop_if(rank == 0), phalanx.mean(rank + 1.0, n=rank + 1)))

    expected = [(True, 14 / 6), (False, 13 / 5), (False, 3.0)]
    assert run(3, program) == [expected[: rank + 1] for rank in range(3)]


def test_asynchronous_calls() -> None:
    def program(rank: int) -> list[float]:
        def call(_: int) -> float:
            tensors = [torch.full((size,), rank + 1.0) for size in (SMALL, LARGE, SMALL)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in works:
                work.wait()
            return sum(tensor[0].item() for tensor in tensors)

        return last_step(rank, call)

    assert run(2, program) == [[9], [9, 6]]


def test_sub_groups() -> None:
    """A rank that has joined one group also serves the others that it is a member of."""

    def program(rank: int) -> list[tuple[float, float]]:
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]

        def call(_: int) -> list[float]:
            sums = []
            for members, pair in (((0, 1), pairs[0]), ((1, 2), pairs[1])):
                if rank in members:
                    for size in (SMALL, LARGE):
                        tensor = torch.full((size,), rank + 1.0)
                        dist.all_reduce(tensor, group=pair)
                        sums.append(tensor[0].item())
            return sums

        return last_step(rank, call)

    assert run(3, program) == [[[3, 3]], [[3, 3, 5, 5], [2, 2, 5, 5]], [[5, 5], [5, 5], [3, 3]]]


def test_between_forward_and_backward_and_without_ddp() -> None:
    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(line())
        totals = []
        with ddp.join():
            for _ in range(rank + 1):
                with torch.no_grad():
                    ddp(ones(rank))
                loss = ddp(ones(rank)).sum()
                total = loss.detach().clone()
                dist.all_reduce(total)
                loss.backward()
                totals.append(total.item())
            for extra in range(2 * rank):
                tensor = torch.full((LARGE,), float(extra))
                dist.all_reduce(tensor)
                totals.append(tensor[0].item())
        return totals

    assert run(2, program) == [[3], [3, 2, 0, 1]]
