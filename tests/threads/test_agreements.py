"""Small agreements of all ranks are told from one another, and called by the names that users write."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx import DistributedDataParallel, RankMismatchError
from phalanx.testing import run

CALLS: dict[str, Callable[[], object]] = {
    "phalanx.mean()": lambda: phalanx.mean(1.0),
    "phalanx.stop_if()": lambda: phalanx.stop_if(False),
    "barrier()": dist.barrier,
}


@pytest.mark.parametrize(("first", "second"), permutations(CALLS, 2))
def test_ranks_in_different_ones(first: str, second: str) -> None:
    def program(rank: int) -> str:
        with pytest.raises(RankMismatchError) as raised:
            CALLS[(first, second)[rank]]()
        return str(raised.value)

    for said in run(2, program):
        assert f"rank 0 in {first} at " in said
        assert f"rank 1 in {second} at " in said
        assert "Usual cause: a branch that some ranks take" in said


def test_one_that_only_rank_zero_makes() -> None:
    def program(rank: int) -> str:
        if rank == 1:
            return ""
        with pytest.raises(RankMismatchError) as raised:
            phalanx.mean(1.0)
        return str(raised.value)

    said = run(2, program)[0]
    assert "rank 0 in phalanx.mean() at " in said
    assert "only some ranks make (`if phalanx.is_main():`)" in said


def test_asynchronous_collectives_come_before_the_calls_of_phalanx():
    def program(rank: int) -> None:
        model = DistributedDataParallel(nn.Linear(1, 1))
        for at in range(5):
            tensors = [torch.ones(100) for _ in range(20)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            match at:
                case 0:
                    assert phalanx.mean(rank) == 0.5
                case 1:
                    assert phalanx.stop_if(rank == 1)
                case 2 if rank:
                    model.skip()
                case 2:
                    model(torch.ones(1, 1)).backward()
                case 3:
                    with model.join():
                        model(torch.ones(1, 1)).backward()
                        works += [dist.all_reduce(tensors[0], async_op=True) for _ in range(20)]
                case 4:
                    model.explain(norms=True)
            for work in works:
                work.wait()
            assert all(torch.equal(tensor, torch.full((100,), 2.0)) for tensor in tensors[1:])

    run(2, program)
