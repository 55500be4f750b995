"""The collectives again with ranks that are threads: what one rank keeps must not be another's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import RankMismatchError
from phalanx.testing import run
from tests import collective_programs as programs


@pytest.mark.parametrize("size", [1, 2, 4])
def test_calls_that_copy_and_add(size: int) -> None:
    def program(rank: int) -> int:
        dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
        return programs.every_copy(rank, dtypes=dtypes) + programs.every_reduction(rank)

    assert run(size, program, timeout=40) == [9 * 4 * 3 + 3 * 5 + 3 * 8 + 7] * size


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("part", [
    programs.unusual_tensors, programs.sizes_and_splits, programs.objects, programs.asynchronous,
    programs.messages, programs.sub_groups,
])  # fmt: skip
def test_everything_else(part: object, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)
    run(3, part, timeout=40)


def test_one_rank_that_makes_another_call_is_told_so_like_the_others() -> None:
    def program(rank: int) -> str:
        with pytest.raises(RankMismatchError) as caught:
            dist.barrier() if rank == 2 else dist.all_reduce(torch.ones(3))
        return str(caught.value)

    for text in run(3, program):
        assert "ranks 0-1 in" in text and "rank 2 in barrier()" in text
