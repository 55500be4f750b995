"""The state that all ranks have together, and what they do when they disagree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

import phalanx
from phalanx.errors import MisuseError, RankMismatchError
from phalanx.testing import WorldError, run

ITEMS = range(41)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(ITEMS)


class Own:
    """Draws from random numbers that no other rank has."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(9), 9))

    def __len__(self) -> int:
        return 9


def refused(n: int, program: object) -> dict:
    with pytest.raises(WorldError) as caught:
        run(n, program)
    return caught.value.errors


@pytest.mark.parametrize("make", [
    lambda: phalanx.DistributedSampler(ITEMS, pad=False),
    lambda: phalanx.loader(ITEMS, 6, pad=False),
    lambda: phalanx.loader(Stream(), 6),
])  # fmt: skip
def test_the_state_is_one_on_all_ranks_wherever_they_stopped(make: object) -> None:
    def stop(rank: int) -> tuple[list[int], dict]:
        part = make()
        seen = [torch.as_tensor(entry).reshape(-1).tolist() for entry in islice(part, 2 + rank)]
        return sum(seen, []), part.state_dict()

    def resume(rank: int, state: dict) -> list[int]:
        part = make()
        part.load_state_dict(state)
        return sum([torch.as_tensor(entry).reshape(-1).tolist() for entry in part], [])

    seen, states = zip(*run(3, stop), strict=True)
    assert states[0] == states[1] == states[2] and not states[0]["finished"]
    rest = run(2, resume, states[1])
    assert sorted(sum(seen, []) + sum(rest, [])) == list(ITEMS)


def test_a_group_of_its_own() -> None:
    def program(rank: int) -> dict:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        sampler = phalanx.DistributedSampler(range(20), 2, rank % 2)
        list(islice(sampler, 1 + rank // 2))
        return sampler.state_dict(groups[rank // 2])["history"]

    assert run(4, program) == [[[2]], [[2]], [[4]], [[4]]]


def test_ranks_in_different_epochs_are_told() -> None:
    def program(rank: int) -> None:
        sampler = phalanx.DistributedSampler(range(20))
        sampler.set_epoch(rank // 2)
        sampler.state_dict()

    for error in refused(3, program).values():
        assert isinstance(error, RankMismatchError)
        assert "ranks 0-1 in the sampler's state_dict() with epoch=0" in str(error)


def test_a_state_on_one_rank_alone_is_an_error_and_no_wait() -> None:
    def program(rank: int) -> None:
        sampler = phalanx.DistributedSampler(range(20))
        if phalanx.is_main():
            sampler.state_dict()
        dist.all_reduce(torch.ones(1))

    errors = refused(2, program)
    assert len(errors) == 2 and any(isinstance(error, RankMismatchError) for error in errors.values())

    def guarded(rank: int) -> None:
        phalanx.rank_zero_only(lambda: phalanx.DistributedSampler(range(20)).state_dict())()
        phalanx.stop_if(False)

    errors = refused(2, guarded)
    assert isinstance(errors[0], MisuseError) and len(errors) == 2


def test_a_rank_that_has_left_join_counts_as_done() -> None:
    def program(rank: int) -> list | None:
        model = phalanx.DistributedDataParallel(torch.nn.Linear(1, 1))
        loader = phalanx.loader(range(5), 2, pad=False, shuffle=False)
        state = None
        with model.join():
            for batch in loader:
                model(batch.float().reshape(-1, 1)).sum().backward()
                if rank == 0 and loader.local_state_dict()["taken"] == [[0, 3]]:
                    state = loader.state_dict()
        return state and [state["history"], state["finished"]]

    assert run(2, program) == [[[[5]], True], None]


def test_inner_samplers_that_draw_differently_are_told_before_anything_is_seen() -> None:
    def program(rank: int, check: bool = True) -> int:
        return len(list(phalanx.ShardedSampler(Own(rank), check=check)))

    for error in refused(2, program).values():
        assert isinstance(error, RankMismatchError) and "torch.Generator in its attribute" in str(error)
    assert run(2, program, False) == [5, 5]
