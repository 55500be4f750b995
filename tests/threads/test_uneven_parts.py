"""all_gather and reduce_scatter of parts whose sizes differ by rank, as NCCL has them."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import DistributedDataParallel, RankMismatchError
from phalanx.errors import CollectiveTimeoutError
from phalanx.group.arguments import ArgumentError
from phalanx.testing import run

SIZE = 3


def rows(rank: int) -> Tensor:
    """What a rank has: rank + 1 rows, not contiguous, that say whose they are."""
    return torch.full((2, rank + 1), rank + 1.0).t()


def outputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.zeros(rank + 1, 2, dtype=dtype) for rank in range(SIZE)]


@pytest.mark.parametrize("later", [False, True])
def test_all_gather(later: bool) -> None:
    def program(rank: int) -> list[bool]:
        got, mine = outputs(), rows(rank)
        work = dist.all_gather(got, mine, async_op=later)
        if later:
            work.wait()
        return [torch.equal(part, rows(other)) for other, part in enumerate(got)]

    assert run(SIZE, program) == [[True] * SIZE] * SIZE


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("op", "factor"), [(dist.ReduceOp.SUM, 6.0), (dist.ReduceOp.AVG, 2.0), (dist.ReduceOp.MAX, 3.0)]
)
def test_reduce_scatter(op: dist.ReduceOp, factor: float, later: bool) -> None:
    def program(rank: int) -> bool:
        parts = [rows(other) * (rank + 1) for other in range(SIZE)]
        got = torch.zeros(2, rank + 1).t()
        work = dist.reduce_scatter(got, parts, op, async_op=later)
        if later:
            work.wait()
        return torch.equal(got, rows(rank) * factor)

    assert run(SIZE, program) == [True] * SIZE


def test_sizes_that_ranks_see_differently() -> None:
    def program(rank: int) -> None:
        sizes = [1, 2, 3] if rank else [1, 3, 2]
        dist.all_gather([torch.zeros(size) for size in sizes], torch.ones(sizes[rank]))

    assert all(isinstance(each.error, RankMismatchError) for each in run(SIZE, program, raises=False))


def test_parts_that_cannot_be_right() -> None:
    def program(rank: int) -> None:
        with pytest.raises(ArgumentError, match="invalid tensor size at index"):
            dist.all_gather(outputs(), torch.ones(7))
        with pytest.raises(ArgumentError, match="must all have the same type"):
            dist.group.WORLD.allgather([outputs(torch.float64)], [rows(rank)])
        with pytest.raises(ArgumentError, match="invalid tensor size at index"):
            dist.reduce_scatter(torch.zeros(7), outputs())

    run(SIZE, program)


def test_a_rank_out_of_data_gives_zeros() -> None:
    def program(rank: int) -> list[float]:
        ddp, got = DistributedDataParallel(nn.Linear(1, 1)), outputs()
        with ddp.join():
            if rank:
                dist.all_gather(got, rows(rank))
                dist.reduce_scatter(reduced := torch.zeros(rank + 1, 2), [rows(other) for other in range(SIZE)])
                assert torch.equal(reduced, rows(rank) * 2)
        return [part.mean().item() for part in got]

    assert run(SIZE, program)[1:] == [[0.0, 2.0, 3.0]] * 2


def test_a_monitored_barrier_without_any_time() -> None:
    def program(rank: int) -> list[int]:
        if rank:
            return []
        with pytest.raises(CollectiveTimeoutError, match="Rank 0 timed out in monitoredBarrier") as caught:
            dist.group.WORLD.monitored_barrier(timedelta(0))
        return caught.value.missing

    assert run(SIZE, program)[0] == [1, 2]
