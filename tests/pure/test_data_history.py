"""Stops and world sizes: whatever the history of an epoch, each item comes exactly once."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.history import History, lane_length
from phalanx.data.sampler import DistributedSampler
from phalanx.errors import MisuseError, RankMismatchError

HISTORIES = 1000

# --- the record of what was handed out, against a list ---------------------------------------------


@st.composite
def dealings(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Draw the length of an epoch, and what each lane took in each of several dealings."""
    length = draw(st.integers(0, 60))
    left, taken = length, []
    for lanes in draw(st.lists(st.integers(1, 7), max_size=5)):
        counts = [draw(st.integers(0, lane_length(lane, lanes, left))) for lane in range(lanes)]
        taken.append(counts)
        left -= sum(counts)
    return length, taken


@settings(deadline=None)
@given(dealings())
def test_what_is_left_is_what_a_list_has_left(drawn: tuple[int, list[list[int]]]) -> None:
    length, rounds = drawn
    history, left = History(), list(range(length))
    for taken in rounds:
        gone = {k for lane, count in enumerate(taken) for k in range(lane, len(left), len(taken))[:count]}
        left = [place for k, place in enumerate(left) if k not in gone]
        history = history.after(taken, length)
        assert history.left(np.arange(len(left))).tolist() == left
        assert history.total == length - len(left)
        stream = iter(range(history.beginning, length))
        assert list(history.unseen(stream)) == left
        history = History(json.loads(json.dumps(history.plain())))


def test_even_dealings_are_one_number() -> None:
    history = History()
    for ranks in (4, 2, 3, 5):
        history = history.after([10] * ranks, 1000)
    assert history.plain() == [[140]]


def test_uneven_dealings_become_one_number_once_they_are_overtaken() -> None:
    history = History().after([7, 3, 5], 1000)
    assert history.plain() == [[7, 3, 5]]
    assert history.after([1, 1], 1000).plain() == [[7, 3, 5], [2]]
    assert history.after([2, 2], 1000).plain() == [[19]]
    assert history.after([1, 0, 0, 1], 1000).after([50], 1000).plain() == [[67]]


def test_what_lanes_took_beyond_the_end_was_padding() -> None:
    assert History().after([3, 3, 3, 3], 10).plain() == [[10]]


# --- the sampler -----------------------------------------------------------------------------------


def world(items: int, ranks: int, **options: object) -> list[DistributedSampler]:
    return [DistributedSampler(range(items), ranks, rank, **options) for rank in range(ranks)]


def states(samplers: list[DistributedSampler]) -> list[dict]:
    return [json.loads(json.dumps(sampler.local_state_dict())) for sampler in samplers]


def live_through(
    chance: random.Random, items: int, epochs: int, in_step: bool = False, **options: object
) -> list[list[int]]:
    """Go through epochs with random stops, world sizes and numbers of items per rank; return each one's items."""
    seen: list[list[int]] = [[] for _ in range(epochs)]
    state = None
    while True:
        samplers = world(items, chance.randint(1, 6), seed=7, **options)
        together = in_step or chance.random() < 0.5
        steps = chance.randint(0, 1 + items // len(samplers))
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        epoch = samplers[0].epoch
        assert {sampler.epoch for sampler in samplers} == {epoch}
        if epoch >= epochs:
            return seen
        for sampler in samplers:
            seen[epoch] += islice(sampler, steps if together else chance.randint(0, 2 * steps))
        state = states(samplers)
        if chance.random() < 0.3:  # A whole state says the same as the list of the parts.
            reader = DistributedSampler(range(items), 1, 0, seed=7, shuffle=options["shuffle"])
            reader.load_state_dict(state)
            state = reader.state_dict()


def test_a_thousand_random_histories() -> None:
    for number in range(HISTORIES):
        chance = random.Random(number)
        items = chance.choice([1, 2, 3, 5, 8, 13, 40, 97])
        shuffle = chance.choice([True, True, True, False, "hashed"])
        options = {"shuffle": shuffle, "pad": False, "total_batch_size": chance.choice([None, None, 6, 7])}
        for epoch, seen in enumerate(live_through(chance, items, chance.choice([1, 1, 2]), **options)):
            assert sorted(seen) == list(range(items)), f"history {number}, epoch {epoch}"


@pytest.mark.parametrize("number", range(60))
def test_with_padding_all_come_and_with_dropping_none_twice(number: int) -> None:
    chance = random.Random(number)
    items = chance.randint(1, 60)
    for seen in live_through(chance, items, 2, in_step=True, shuffle=True):
        assert set(seen) == set(range(items))
        assert sum(Counter(seen).values()) - items < 6
    for seen in live_through(chance, items, 2, in_step=True, shuffle=True, drop_last=True):
        assert max(Counter(seen).values(), default=1) == 1
        assert len(seen) > items - 6


@settings(deadline=None)
@given(st.integers(0, 80), st.integers(1, 6), st.integers(0, 9), st.sampled_from(["pad", "drop", "keep"]),
       st.sampled_from([None, 6, 8]), st.booleans())  # fmt: skip
def test_the_same_world_goes_on_as_if_it_had_not_stopped(
    items: int, ranks: int, steps: int, rest: str, total: int | None, ragged: bool
) -> None:
    options = {"drop_last": rest == "drop", "pad": rest != "keep", "total_batch_size": total}
    undisturbed, stopped, resumed = (world(items, ranks, **options) for _ in range(3))
    ragged = ragged and rest != "pad"  # out of step, a rank may have had padding that it gets again
    batch = [lane_length(rank, ranks, total) if total else 1 for rank in range(ranks)]
    begun = [list(islice(sampler, (steps + ragged * sampler.rank) * batch[sampler.rank])) for sampler in stopped]
    for sampler in resumed:
        sampler.load_state_dict(states(stopped))
    if resumed[0].epoch == 0:
        begun = [items + list(sampler) for items, sampler in zip(begun, resumed, strict=True)]
    epochs = [[list(sampler) for sampler in undisturbed] for _ in range(2)]
    assert begun == epochs[0]
    assert [list(sampler) for sampler in resumed] == epochs[1]


def test_each_rank_may_load_its_own_part() -> None:
    samplers = world(40, 2)
    begun = [list(islice(sampler, 5 + sampler.rank)) for sampler in samplers]
    resumed = world(40, 2)
    for sampler, own in zip(resumed, states(samplers), strict=True):
        sampler.load_state_dict(own)
    assert [a + list(b) for a, b in zip(begun, resumed, strict=True)] == [list(s) for s in world(40, 2)]


def test_a_state_before_any_pass_and_right_after_loading_is_the_state() -> None:
    samplers = world(40, 2, pad=False)
    assert DistributedSampler(range(40)).state_dict()["history"] == []
    for sampler in samplers:
        list(islice(sampler, 3 + sampler.rank))
    again = world(40, 2, pad=False)
    for sampler in again:
        sampler.load_state_dict(states(samplers))
    reader = DistributedSampler(range(40), pad=False)
    reader.load_state_dict(states(samplers))
    before = reader.state_dict()
    reader.load_state_dict(states(again))
    assert reader.state_dict() == before and before["history"] == [[3, 4]]


def test_a_look_at_a_resumed_epoch_leaves_it_where_it_was() -> None:
    sampler = DistributedSampler(range(40))
    begun = list(islice(sampler, 20))
    resumed = DistributedSampler(range(40))
    resumed.load_state_dict(sampler.state_dict())
    next(iter(resumed))
    assert sorted(begun + list(resumed)) == list(range(40))
    assert resumed.epoch == 0
    assert len(list(resumed)) == 40 and resumed.epoch == 1


def test_set_epoch_with_the_epoch_of_the_state_goes_on_and_with_another_begins() -> None:
    sampler = DistributedSampler(range(40))
    sampler.set_epoch(3)
    list(islice(sampler, 30))
    state = sampler.state_dict()
    resumed = DistributedSampler(range(40))
    for epoch, count in ((3, 10), (4, 40)):
        resumed.load_state_dict(state)
        resumed.set_epoch(epoch)
        assert len(list(resumed)) == count
    resumed.set_epoch(3)
    assert len(list(resumed)) == 40  # it has been gone through since the state was loaded


def test_a_finished_epoch_is_followed_by_the_next_and_has_nothing_left() -> None:
    sampler = DistributedSampler(range(40))
    list(sampler)
    state = sampler.state_dict()
    assert state["finished"]
    resumed = DistributedSampler(range(40))
    for _ in range(2):  # also from the state that is saved before anything is drawn
        resumed.load_state_dict(state)
        assert resumed.epoch == 1
        state = resumed.state_dict()
    resumed.set_epoch(0)
    assert list(resumed) == []
    resumed.set_epoch(1)
    assert len(list(resumed)) == 40


def test_a_finished_epoch_with_dropped_items_stays_finished_for_fewer_ranks() -> None:
    samplers = world(11, 4, drop_last=True)
    for sampler in samplers:
        list(sampler)
    alone = DistributedSampler(range(11), drop_last=True)
    alone.load_state_dict(states(samplers))
    assert alone.epoch == 1
    alone.set_epoch(0)
    assert list(alone) == []


# --- large -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, "hashed"])
def test_start_at_item_a_thousand_million_without_going_there(shuffle: bool | str) -> None:
    length, had = 4 * 10**9, 10**9
    state = {
        "version": 1, "epoch": 0, "finished": False, "history": [[had], [3, 0, 1]],
        "seed": 0, "shuffle": shuffle, "length": length, "order": "",
    }  # fmt: skip
    tracemalloc.start()
    samplers = [DistributedSampler(range(length), 4, rank, shuffle, pad=False) for rank in range(4)]
    seen = []
    for sampler in samplers:
        sampler.load_state_dict(state)
        seen.append(list(islice(sampler, 50)))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()
    flat = sorted(index for share in seen for index in share)
    assert len(set(flat)) == 200
    if shuffle:
        assert flat[-1] > had and flat[0] >= 0 and flat[-1] < length
    else:
        gone = {had, had + 3, had + 6, had + 2}
        assert flat == [place for place in range(had, had + 204) if place not in gone]


def test_a_large_permutation_is_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.data.orders._LARGE", 1000)
    with pytest.warns(UserWarning, match='shuffle="hashed" needs no memory'):
        iter(DistributedSampler(range(1000)))


# --- what cannot be right --------------------------------------------------------------------------


def test_states_that_do_not_fit_are_refused() -> None:
    samplers = world(40, 4)
    for sampler in samplers:
        list(islice(sampler, 3))
    parts = states(samplers)
    fresh = DistributedSampler(range(40), 2, 1)
    with pytest.raises(MisuseError, match="rank 0 of 4 alone, loaded on rank 1 of 2"):
        fresh.load_state_dict(parts[0])
    with pytest.raises(MisuseError, match="ranks 0, 1, 3, of 4 ranks"):
        fresh.load_state_dict([parts[0], parts[1], parts[3]])
    with pytest.raises(MisuseError, match="not a sampler's state"):
        fresh.load_state_dict({"yielded": 3})
    with pytest.raises(RankMismatchError, match="epoch=5"):
        fresh.load_state_dict([*parts[:3], {**parts[3], "epoch": 5}])
    with pytest.raises(MisuseError, match="length=40, this one has length=41"):
        DistributedSampler(range(41), 2, 1).load_state_dict(parts)
    with pytest.raises(MisuseError, match="seed=0, this one has seed=1"):
        DistributedSampler(range(40), 2, 1, seed=1).load_state_dict(parts)
    with pytest.raises(MisuseError, match='True, False or "hashed"'):
        DistributedSampler(range(40), 2, 1, shuffle="hash")
    with pytest.raises(MisuseError, match="leaves some rank without items"):
        DistributedSampler(range(40), 4, 1, total_batch_size=3)


def test_what_other_ranks_had_is_not_guessed() -> None:
    with pytest.raises(MisuseError, match="for 2 ranks in a group of 1"):
        DistributedSampler(range(40), 2, 1).state_dict()
