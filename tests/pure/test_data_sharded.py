"""Shares of any sampler and of iterable data sets, with the ranks one after the other in one process."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler

from phalanx.data import randomness
from phalanx.data.iterable import ShardedIterable
from phalanx.data.sampler import DistributedSampler
from phalanx.data.sharded import ShardedSampler
from phalanx.errors import MisuseError


def shares(make: object, ranks: int, **options: object) -> list[ShardedSampler]:
    """Each rank makes an inner sampler of its own, and has other random numbers than the rest."""
    return [ShardedSampler(make(), ranks, rank, **options) for rank in range(ranks)]


def one_epoch(samplers: list[ShardedSampler]) -> list[list]:
    passes = []
    for sampler in samplers:
        torch.manual_seed(sampler.rank)
        random.seed(sampler.rank)
        passes.append(list(sampler))
    return passes


def dealt(passes: list[list]) -> list:
    """The order that was dealt out, put together again."""
    return [part[row] for row in range(max(map(len, passes))) for part in passes if row < len(part)]


class ByNumpy:
    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(11).tolist())

    def __len__(self) -> int:
        return 11


class ByItsOwn:
    """Takes random numbers from a place that nobody knows of."""

    def __init__(self) -> None:
        self._random = random.Random(id(self))

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(40), 40))

    def __len__(self) -> int:
        return 40


class ByEpoch(ByItsOwn):
    def set_epoch(self, epoch: int) -> None:
        self._random = random.Random(epoch)


def seeded_at_random() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()
    return generator


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(11)),
        lambda: RandomSampler(range(11), generator=seeded_at_random()),
        lambda: SequentialSampler(range(11)),
        ByNumpy,
        ByEpoch,
    ],
)
def test_all_ranks_draw_alike_and_each_item_comes_once(make: object) -> None:
    samplers = shares(make, 3, pad=False)
    epochs = [one_epoch(samplers) for _ in range(2)]
    for passes in epochs:
        assert sorted(dealt(passes)) == sorted(make())
        assert [len(part) for part in passes] == [len(sampler) for sampler in samplers]
    assert epochs[0] != epochs[1] or isinstance(make(), SequentialSampler)


def test_what_is_drawn_does_not_depend_on_the_number_of_ranks() -> None:
    weights = [1.0, 2.0, 3.0, 0.0]
    whole = [dealt(one_epoch(shares(lambda: WeightedRandomSampler(weights, 50), ranks, pad=False))) for ranks in (1, 4)]
    assert whole[0] == whole[1] and len(whole[0]) == 50
    assert set(whole[0]) == {0, 1, 2}


def test_batches_are_dealt_out_whole() -> None:
    def batches() -> BatchSampler:
        return BatchSampler(RandomSampler(range(23), generator=seeded_at_random()), 4, drop_last=False)

    passes = one_epoch(shares(batches, 4, pad=False))
    assert [len(part) for part in passes] == [2, 2, 1, 1]
    assert sorted(index for part in passes for batch in part for index in batch) == list(range(23))
    assert {len(batch) for part in passes for batch in part} <= {4, 3}
    padded = one_epoch(shares(batches, 4))
    assert [len(part) for part in padded] == [2, 2, 2, 2] and padded[2][1] == padded[0][0]


def test_random_numbers_of_others_stay_as_they_were() -> None:
    before = randomness.states()
    list(ShardedSampler(ByNumpy(), 2, 0))
    list(ShardedSampler(RandomSampler(range(5)), 2, 0))
    after = randomness.states()
    assert torch.equal(before[0], after[0]) and before[2] == after[2]
    assert before[1][2] == after[1][2] and np.array_equal(before[1][1], after[1][1])


@pytest.mark.parametrize("ranks_after", [1, 2, 5])
def test_a_stopped_epoch_goes_on_with_the_items_not_seen(ranks_after: int) -> None:
    samplers = shares(lambda: WeightedRandomSampler([1.0] * 6, 40), 3, pad=False)
    truth = Counter(dealt(one_epoch(shares(lambda: WeightedRandomSampler([1.0] * 6, 40), 1))))
    begun = [item for sampler in samplers for item in islice(sampler, 4 + sampler.rank)]
    state = [sampler.local_state_dict() for sampler in samplers]
    resumed = shares(lambda: WeightedRandomSampler([1.0] * 6, 40), ranks_after, pad=False)
    for sampler in resumed:
        sampler.load_state_dict(state)
        begun += sampler
    assert Counter(begun) == truth


def test_a_sampler_that_draws_otherwise_after_the_stop_is_refused() -> None:
    sampler = ShardedSampler(ByItsOwn())
    list(islice(sampler, 3))
    resumed = ShardedSampler(ByItsOwn())
    resumed.load_state_dict(sampler.state_dict())
    with pytest.raises(MisuseError, match="draws the same again"):
        iter(resumed)
    other = ShardedSampler(SequentialSampler(range(40)))
    with pytest.raises(MisuseError, match="shuffle='ByItsOwn', this one has shuffle='SequentialSampler'"):
        other.load_state_dict(sampler.state_dict())


def test_samplers_that_cannot_be_dealt_out_are_refused() -> None:
    with pytest.raises(MisuseError, match="deals out shares to ranks already"):
        ShardedSampler(DistributedSampler(range(4)))
    with pytest.raises(MisuseError, match="no length"):
        ShardedSampler(iter(range(4)))


# --- iterable data sets ----------------------------------------------------------------------------


class Shuffled(IterableDataset):
    """A stream whose order comes from the random numbers that it finds, item by item."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.length))
        while left:
            yield left.pop(random.randrange(len(left)))


class Counted(IterableDataset):
    """A stream that can begin in the middle, and counts what it makes."""

    made = 0

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, place: int) -> Iterator[int]:
        for item in range(place, 10**9 + 12):
            self.made += 1
            yield item


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("length", [0, 1, 23])
def test_each_item_of_a_stream_comes_to_one_rank(ranks: int, length: int) -> None:
    streams = [ShardedIterable(Shuffled(length), ranks, rank) for rank in range(ranks)]
    passes = []
    for stream in streams:
        stream.set_epoch(4)
        share = []
        for item in stream:
            share.append(item)
            random.random()  # the training loop has random numbers, too
        passes.append(share)
    assert sorted(item for share in passes for item in share) == list(range(length))
    assert max(map(len, passes)) - min(map(len, passes)) <= 1
    streams[0].set_epoch(5)
    assert length < 2 or list(streams[0]) != passes[0]


def test_a_stream_that_can_begin_in_the_middle_does() -> None:
    data = Counted()
    stream = ShardedIterable(data, 3, 1)
    stream.history = stream.history.after([10**9])
    assert list(stream) == [10**9 + 1, 10**9 + 4, 10**9 + 7, 10**9 + 10]
    assert data.made == 12
