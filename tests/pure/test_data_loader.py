"""phalanx.loader: sizes, arguments that exclude each other, seeds, states; in a world of one or with given ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from phalanx.data.loader import Loader, loader
from phalanx.data.sampler import DistributedSampler
from phalanx.data.sharded import PerRankState
from phalanx.errors import MisuseError

ITEMS = list(range(50))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(ITEMS)


class ShuffledStream(IterableDataset):
    """Takes its random numbers one at a time, as it goes."""

    def __iter__(self) -> Iterator[int]:
        left = list(ITEMS)
        while left:
            yield left.pop(int(torch.randint(len(left), ())))


class Noisy(torch.utils.data.Dataset):
    """Each item with a random number of each kind."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        import random  # in the worker

        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def world(ranks: int, total: int | None, data: object = ITEMS, **options: object) -> list[Loader]:
    return [loader(data, total, num_replicas=ranks, rank=rank, **options) for rank in range(ranks)]


def drawn(loaders: list[Loader]) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in one] for one in loaders]


def flat(batches: list[list[list[int]]]) -> list[int]:
    return [item for rank in batches for batch in rank for item in batch]


@pytest.mark.parametrize(("total", "sizes"), [(8, [2, 2, 2, 2]), (10, [3, 3, 2, 2]), (7, [2, 2, 2, 1])])
@pytest.mark.parametrize("data", [ITEMS, Stream()])
def test_per_rank_sizes_add_up_to_the_total(total: int, sizes: list[int], data: object) -> None:
    pad = {} if isinstance(data, Stream) else {"pad": False}
    loaders = world(4, total, data, uneven=True, **pad)
    assert [one.batch_size for one in loaders] == sizes
    batches = drawn(loaders)
    assert [[len(batch) for batch in rank][0] for rank in batches] == sizes
    assert sorted(flat(batches)) == ITEMS


def test_a_total_batch_is_the_same_items_for_any_number_of_ranks() -> None:
    truth = drawn(world(1, 12, pad=False))[0]
    for ranks in (2, 3, 5):
        batches = drawn(world(ranks, 12, pad=False, uneven=True))
        steps = [[item for rank in batches for item in rank[i : i + 1] for item in item] for i in range(len(truth))]
        assert [sorted(step) for step in steps] == [sorted(step) for step in truth]


def test_padding_and_dropping() -> None:
    padded = drawn(world(4, 8))
    assert len(flat(padded)) == 52 and {len(rank) for rank in padded} == {7}
    dropped = drawn(world(4, 8, drop_last=True))
    assert len(set(flat(dropped))) == 48 and {len(batch) for rank in dropped for batch in rank} == {2}
    uneven = drawn(world(4, 10, uneven=True, drop_last=True))
    assert len(set(flat(uneven))) == 50
    assert [len(one) for one in world(4, 8, pad=False)] == [len(rank) for rank in drawn(world(4, 8, pad=False))]


def test_a_total_that_does_not_divide_is_refused_with_the_nearest_that_do() -> None:
    with pytest.raises(MisuseError, match=r"total_batch_size=10\) does not divide by 4 ranks[^$]*8 or 12"):
        world(4, 10)
    with pytest.raises(MisuseError, match="leaves some rank without items"):
        world(4, 3, uneven=True)


@pytest.mark.parametrize(
    ("data", "total", "options", "text"),
    [
        (ITEMS, None, {}, "no total_batch_size"),
        (ITEMS, 8, {"batch_size": 2}, "total_batch_size=..., the batch of all ranks"),
        (ITEMS, 8, {"generator": torch.Generator()}, "seed="),
        (ITEMS, 8, {"sampler": SequentialSampler(ITEMS), "shuffle": True}, "order of its own"),
        (ITEMS, 8, {"batch_sampler": BatchSampler(SequentialSampler(ITEMS), 4, False)}, "batch_sampler and more"),
        (ITEMS, 8, {"in_order": False}, "could not be told"),
        (ITEMS, 8, {"pad": False, "drop_last": True}, "each item exactly once"),
        (Stream(), 8, {"shuffle": True}, "shuffle in the data set"),
        (Stream(), 8, {"drop_last": True}, "a rest of its own"),
        (Stream(), 8, {"pad": True}, "ddp.join"),
    ],
)
def test_arguments_that_contradict_each_other(data: object, total: int | None, options: dict, text: str) -> None:
    with pytest.raises(MisuseError, match=text):
        loader(data, total, **options)


def test_samplers_of_one_process_are_dealt_out() -> None:
    weighted = torch.utils.data.WeightedRandomSampler([1.0, 0.0] * 25, 40)
    batches = drawn(world(2, 8, sampler=weighted))
    assert len(flat(batches)) == 40 and all(item % 2 == 0 for item in flat(batches))
    by_batch = world(2, None, batch_sampler=BatchSampler(RandomSampler(ITEMS), 7, False), pad=False)
    assert sorted(flat(drawn(by_batch))) == ITEMS
    assert len(by_batch[0]) == 4


def test_epochs_move_on_and_a_look_does_not() -> None:
    one = loader(ITEMS, 8, pad=False)
    next(iter(one))
    truth = [list(DistributedSampler(ITEMS, pad=False)), None]
    assert flat(drawn([one])) == truth[0] and one.epoch == 0
    assert flat(drawn([one])) != truth[0] and one.epoch == 1
    one.set_epoch(0)
    assert flat(drawn([one])) == truth[0]


def test_a_stream_in_the_main_process_has_random_numbers_of_its_own() -> None:
    seen = []
    for rank, one in enumerate(world(3, 6, ShuffledStream())):
        for batch in one:
            seen += batch.tolist()
            torch.rand(1 + rank)  # the training loop has random numbers, too
    assert sorted(seen) == ITEMS and seen != ITEMS


@pytest.mark.parametrize("data", [ITEMS, Stream()])
@pytest.mark.parametrize("ranks_after", [1, 3, 4])
def test_a_stopped_loader_goes_on_with_any_number_of_ranks(data: object, ranks_after: int) -> None:
    pad = {} if isinstance(data, Stream) else {"pad": False}
    begun, parts = [], []
    for one in world(3, 6, data, **pad):
        batches = iter(one)
        for _ in range(2 + one.feed.local_state_dict()["rank"]):
            begun += next(batches).tolist()
        parts.append(json.loads(json.dumps(one.local_state_dict())))
    resumed = world(ranks_after, 6, data, uneven=True, **pad)
    for one in resumed:
        one.load_state_dict(parts)
        assert one.epoch == 0
    assert sorted(begun + flat(drawn(resumed))) == ITEMS
    assert sorted(flat(drawn(resumed))) == ITEMS and resumed[0].epoch == 1


def test_the_state_of_a_finished_stream() -> None:
    one = loader(Stream(), 8)
    list(one)
    state = one.state_dict()
    for _ in range(2):
        resumed = loader(Stream(), 8)
        resumed.load_state_dict(state)
        assert state["finished"] and resumed.epoch == 1
        state = resumed.state_dict()
    resumed.set_epoch(0)
    assert list(resumed) == []
    resumed.set_epoch(1)
    assert flat(drawn([resumed])) == ITEMS


def test_states_of_a_loader_and_its_sampler_are_one() -> None:
    one = loader(ITEMS, 8, pad=False)
    for number, _ in enumerate(one):
        assert one.state_dict() == one.sampler.state_dict()
        assert one.state_dict()["history"] == [[min(8 * (number + 1), 50)]]


# --- workers ---------------------------------------------------------------------------------------


def noise(loaders: list[Loader]) -> dict[tuple[int, int], tuple]:
    """Each epoch's random numbers by item."""
    found = {}
    for epoch in range(2):
        for one in loaders:
            for batch in one:
                found |= {(epoch, int(index)): tuple(map(float, rest)) for index, *rest in zip(*batch, strict=True)}
    return found


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_have_random_numbers_of_their_own_that_come_again(persistent: bool) -> None:
    options = {"num_workers": 2, "persistent_workers": persistent}
    first = noise(world(2, 4, Noisy(), **options))
    assert len(first) == 24
    for kind in range(3):
        assert len({numbers[kind] for numbers in first.values()}) == 24
    assert first == noise(world(2, 4, Noisy(), **options))
    one = loader(Noisy(), 4, num_replicas=2, rank=0, **options)
    batches = iter(one)
    next(batches)
    resumed = loader(Noisy(), 4, num_replicas=2, rank=0, num_workers=1)
    resumed.load_state_dict(one.local_state_dict())
    for batch in resumed:
        for index, *rest in zip(*batch, strict=True):
            assert first[0, int(index)] == tuple(map(float, rest))


def test_a_plain_loader_with_workers_has_no_state_and_says_so() -> None:
    sampler = DistributedSampler(ITEMS)
    batches = iter(DataLoader(ITEMS, 4, sampler=sampler, num_workers=1))
    next(batches)
    with pytest.raises(MisuseError, match="they draw ahead"):
        sampler.state_dict()
    del batches
    next(iter(DataLoader(ITEMS, 4, sampler=sampler)))
    assert sampler.state_dict()["history"] == [[4]]


def test_torchdatas_loader_resumes_with_the_state_of_each_rank() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def make(rank: int) -> DataLoader:
        sampler = PerRankState(DistributedSampler(ITEMS, 2, rank, pad=False))
        return stateful.StatefulDataLoader(ITEMS, 4, sampler=sampler, num_workers=1)

    seen = []
    for rank in range(2):
        batches = iter(first := make(rank))
        for _ in range(2 + rank):
            seen += next(batches).tolist()
        state = first.state_dict()
        del batches
        resumed = make(rank)
        resumed.load_state_dict(state)
        for batch in resumed:
            seen += batch.tolist()
    assert sorted(seen) == ITEMS
