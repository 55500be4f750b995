"""Small agreements of all ranks are told from one another, and called by the names that users write."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest
import torch.distributed as dist

import phalanx
from phalanx import RankMismatchError
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
