"""DistributedSampler: torch's order, exact cover without padding, an epoch that moves on by itself."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchSampler

from phalanx.data.sampler import DistributedSampler
from phalanx.errors import MisuseError


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, int]:
    """Draw (number of items, number of ranks, rank)."""
    ranks = draw(st.integers(1, 12))
    return draw(st.integers(0, 120)), ranks, draw(st.integers(0, ranks - 1))


def shares(items: int, ranks: int, **options: object) -> list[DistributedSampler]:
    return [DistributedSampler(range(items), ranks, rank, **options) for rank in range(ranks)]


# --- torch's order ---------------------------------------------------------------------------------


EPOCHS = st.lists(st.integers(0, 50), max_size=4)


@given(worlds(), st.booleans(), st.booleans(), st.integers(0, 2**31), EPOCHS)
def test_order_length_and_attributes_are_torchs(
    place: tuple[int, int, int], shuffle: bool, drop_last: bool, seed: int, epochs: list[int]
) -> None:
    items, ranks, rank = place
    ours = DistributedSampler(range(items), ranks, rank, shuffle, seed, drop_last)
    theirs = TorchSampler(range(items), ranks, rank, shuffle, seed, drop_last)
    assert list(ours) == list(theirs)
    for epoch in epochs:
        ours.set_epoch(epoch)
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert list(ours) == list(theirs)  # a second pass under one set_epoch
    names = ("num_replicas", "rank", "epoch", "drop_last", "num_samples", "total_size", "shuffle", "seed")
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]
    assert len(ours) == len(theirs)


def test_it_is_torchs_class_with_torchs_signature_and_python_ints() -> None:
    sampler = DistributedSampler(range(5), 2, 0)
    assert isinstance(sampler, TorchSampler)
    assert {type(index) for index in sampler} == {int}
    ours = dict(inspect.signature(DistributedSampler).parameters)
    pad, total = ours.pop("pad"), ours.pop("total_batch_size")
    assert pad.kind is pad.KEYWORD_ONLY and pad.default is True
    assert total.kind is total.KEYWORD_ONLY and total.default is None
    theirs = inspect.signature(TorchSampler).parameters
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


@pytest.mark.parametrize(("ranks", "rank"), [(2, 2), (2, -1), (1, 5)])
def test_an_invalid_rank_has_torchs_text(ranks: int, rank: int) -> None:
    with pytest.raises(ValueError) as theirs:
        TorchSampler(range(4), ranks, rank)
    with pytest.raises(ValueError) as ours:
        DistributedSampler(range(4), ranks, rank)
    assert str(ours.value) == str(theirs.value)


def test_outside_a_group_it_is_a_world_of_one() -> None:
    assert sorted(DistributedSampler(range(7))) == list(range(7))


def test_ranks_without_a_rank_are_refused_in_a_world_of_one() -> None:
    with pytest.raises(MisuseError, match=r"num_replicas=4.*without a rank"):
        DistributedSampler(range(7), num_replicas=4)


# --- shares without padding ------------------------------------------------------------------------


@given(st.integers(0, 120), st.integers(1, 12), st.booleans(), st.integers(0, 1000))
def test_without_padding_every_index_comes_exactly_once(items: int, ranks: int, shuffle: bool, epoch: int) -> None:
    samplers = shares(items, ranks, shuffle=shuffle, pad=False)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    seen = [list(sampler) for sampler in samplers]
    assert Counter(index for share in seen for index in share) == Counter(range(items))
    assert [len(sampler) for sampler in samplers] == [len(share) for share in seen]
    assert max(map(len, seen)) - min(map(len, seen)) <= 1


@given(worlds(), st.booleans())
def test_without_padding_the_order_is_torchs_up_to_the_padding(place: tuple[int, int, int], shuffle: bool) -> None:
    items, ranks, rank = place
    share = list(DistributedSampler(range(items), ranks, rank, shuffle, pad=False))
    assert share == list(TorchSampler(range(items), ranks, rank, shuffle))[: len(share)]


def test_ten_items_on_four_ranks() -> None:
    uneven = shares(10, 4, shuffle=False, pad=False)
    assert [list(sampler) for sampler in uneven] == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    even = shares(10, 4, shuffle=False)
    assert [list(sampler) for sampler in even] == [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]


def test_fewer_items_than_ranks_leave_some_rank_with_nothing() -> None:
    samplers = shares(2, 4, pad=False)
    assert sorted(len(list(s)) for s in samplers) == [0, 0, 1, 1]
    assert [len(DataLoader(range(2), batch_size=1, sampler=s)) for s in samplers] == [1, 1, 0, 0]


def test_dropping_and_not_padding_exclude_each_other() -> None:
    with pytest.raises(MisuseError, match="each item exactly once"):
        DistributedSampler(range(4), 2, 0, drop_last=True, pad=False)


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [({}, 4, 7), ({}, 4, 0), ({"pad": False}, 4, 3), ({"pad": False}, 4, 5), ({"drop_last": True}, 5, 3)],
)
def test_a_data_set_that_changed_its_length_is_refused(options: dict, before: int, after: int) -> None:
    data = list(range(before))
    sampler = DistributedSampler(data, 2, 0, **options)
    data[:] = range(after)
    with pytest.raises(MisuseError, match=f"has {after} items now"):
        iter(sampler)


# --- the epoch -------------------------------------------------------------------------------------


def torch_order(epoch: int, items: int = 40, ranks: int = 2, rank: int = 0) -> list[int]:
    sampler = TorchSampler(range(items), ranks, rank)
    sampler.set_epoch(epoch)
    return list(sampler)


@given(st.integers(0, 60), st.integers(1, 6), st.booleans())
def test_without_set_epoch_each_pass_is_the_next_epoch(items: int, ranks: int, pad: bool) -> None:
    samplers = shares(items, ranks, pad=pad)
    for epoch in range(3):
        for sampler in samplers:
            share = list(sampler)
            assert share == torch_order(epoch, items, ranks, sampler.rank)[: len(share)]
            assert sampler.epoch == epoch


def test_set_epoch_says_the_epoch_also_with_the_same_number_again() -> None:
    sampler = DistributedSampler(range(40), 2, 0)
    assert list(sampler) == torch_order(0)
    for epoch in (5, 5, 2, 2, 0):
        sampler.set_epoch(epoch)
        assert list(sampler) == torch_order(epoch)


def test_after_set_epoch_the_sampler_leaves_the_epoch_alone() -> None:
    sampler = DistributedSampler(range(40), 2, 0)
    sampler.set_epoch(3)
    assert list(sampler) == list(sampler) == torch_order(3)


def test_an_epoch_assigned_by_hand_stays_for_its_pass() -> None:
    sampler = DistributedSampler(range(40), 2, 0)
    list(sampler)
    sampler.epoch = 7
    assert list(sampler) == torch_order(7)
    assert list(sampler) == torch_order(8)


def test_the_epoch_is_that_of_the_moment_iter_was_called() -> None:
    sampler = DistributedSampler(range(40), 2, 0)
    begun = iter(sampler)
    sampler.set_epoch(9)
    assert list(begun) == torch_order(0)


def test_a_look_at_one_batch_on_one_rank_leaves_the_shares_disjoint() -> None:
    first, second = shares(40, 2)
    next(iter(DataLoader(range(40), batch_size=4, sampler=first)))
    assert sorted([*first, *second]) == list(range(40))


def test_a_pass_broken_off_half_way_counts_as_an_epoch() -> None:
    sampler = DistributedSampler(range(40), 2, 0)
    assert list(islice(sampler, 10)) == torch_order(0)[:10]
    assert list(sampler) == torch_order(1)


def test_an_iterator_of_an_earlier_pass_does_not_move_the_epoch() -> None:
    sampler = DistributedSampler(range(40), 2, 0)
    list(sampler)
    earlier = iter(sampler)
    list(sampler)
    next(iter(sampler))
    list(earlier)
    assert list(sampler) == torch_order(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_goes_through_one_epoch_per_pass(workers: int) -> None:
    sampler = DistributedSampler(range(40), 2, 0)
    options = {"num_workers": workers, "persistent_workers": workers > 0}
    loader = DataLoader(range(40), batch_size=8, sampler=sampler, **options)
    passes = [[int(index) for batch in loader for index in batch] for _ in range(3)]
    assert passes == [torch_order(epoch) for epoch in range(3)]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_goes_on_where_the_original_was(copied: object) -> None:
    sampler = DistributedSampler(range(40), 2, 0)
    list(sampler)
    assert list(copied(sampler)) == torch_order(1)


# --- orders that nobody asked for ------------------------------------------------------------------


def test_passes_that_stay_in_one_order_are_warned_about_once() -> None:
    set_once = DistributedSampler(range(40), 2, 1)
    set_once.set_epoch(4)
    looks = DistributedSampler(range(40), 2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            list(set_once)
            next(iter(looks))
    with pytest.warns(UserWarning, match=r"\[rank 1\].*set_epoch\(4\) was called once"):
        iter(set_once)
    with pytest.warns(UserWarning, match="less than a quarter"):
        iter(looks)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in (4, 5):
            set_once.set_epoch(epoch)
            for _ in range(4):
                iter(set_once)
                iter(looks)


def test_an_order_that_was_asked_for_is_not_warned_about() -> None:
    unshuffled = DistributedSampler(range(40), 2, 0, shuffle=False)
    forgotten = DistributedSampler(range(40), 2, 0)
    repeated = DistributedSampler(range(40), 2, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            list(islice(unshuffled, 1))
            list(forgotten)
            repeated.set_epoch(1)
            list(repeated)
            list(repeated)
