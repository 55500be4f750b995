"""Weights: whatever the split, the scaled sum over ranks is the mean over all items."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.group.ticket import Operation, State, Ticket
from phalanx.reduce.weights import Weights, scales

counts = st.one_of(st.integers(0, 1000), st.floats(0.125, 1e6))
micro_batches = st.lists(st.tuples(counts, st.floats(-100, 100)), max_size=5)


def _items(weights: Weights) -> float:
    """The items counted so far, as the flush of a model without policies sees them."""
    weights.enter([0])
    return weights.total_of(0)


def ticket_of(weights: Weights, state: State = State.ACTIVE) -> Ticket:
    return Ticket(
        Operation.GRADIENTS, state=state, weighed=weights.weighed, unit=weights.unit,
        total=_items(weights) if weights.weighed else 1.0,
    )  # fmt: skip


def accumulated(weights: Weights, batches: list[tuple[float, float]]) -> float:
    """What lies in a rank's slot after weighed backwards of micro-batches (n, mean gradient)."""
    slot = 0.0
    for n, gradient in batches:
        slot += weights.add(n) * gradient
        weights.backward_ended(produced=bool(n))
    return slot


@given(st.lists(micro_batches.filter(bool), min_size=1, max_size=5))
def test_any_split_gives_the_mean_over_all_items(ranks: list[list[tuple[float, float]]]):
    weights = [Weights() for _ in ranks]
    slots = [accumulated(w, batches) for w, batches in zip(weights, ranks, strict=True)]
    factors = scales([ticket_of(w) for w in weights], None)
    got = sum(f * slot for f, slot in zip(factors, slots, strict=True) if f)
    items = sum(n for batches in ranks for n, _ in batches)
    size = sum(abs(n * g) for batches in ranks for n, g in batches)
    want = sum(n * g for batches in ranks for n, g in batches) / items if items else 0.0
    assert math.isclose(got, want, rel_tol=1e-9, abs_tol=1e-9 * (size / items if items else 1))


@given(st.lists(micro_batches.filter(bool), min_size=1, max_size=5))
def test_no_factor_exceeds_one_so_that_half_precision_does_not_overflow(ranks: list[list[tuple[float, float]]]):
    weights = [Weights() for _ in ranks]
    for w, batches in zip(weights, ranks, strict=True):
        accumulated(w, batches)
    assert all(0.0 <= factor <= 1.0 for factor in scales([ticket_of(w) for w in weights], None))


def test_the_first_micro_batch_is_taken_as_it_is_and_later_ones_in_proportion():
    weights = Weights()
    factors = []
    for n in (4, 2, 8):
        factors.append(weights.add(n))
        weights.backward_ended(True)
    assert factors == [1.0, 0.5, 2.0]
    assert (weights.unit, _items(weights)) == (4.0, 14.0)


def test_an_empty_micro_batch_does_not_set_the_unit():
    weights = Weights()
    assert weights.add(0) == 0.0
    weights.backward_ended(False)
    assert weights.add(3) == 1.0
    assert (weights.unit, _items(weights)) == (3.0, 3.0)


def test_terms_of_one_loss_count_once_and_must_agree():
    weights = Weights()
    assert [weights.add(4), weights.add(4)] == [1.0, 1.0]
    assert _items(weights) == 4.0
    with pytest.raises(ValueError, match="n=4 and with n=5 within one backward"):
        weights.add(5)


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_weighed_and_plain_backwards_do_not_mix_between_two_synchronisations(order: tuple[bool, bool]):
    weights = Weights()
    with pytest.raises(ValueError, match="some backwards"):
        for weighed in order:
            if weighed:
                weights.add(2)
            weights.backward_ended(True)


def test_a_backward_that_produced_nothing_does_not_count_as_plain():
    weights = Weights()
    weights.add(2)
    weights.backward_ended(True)
    weights.backward_ended(False)
    assert weights.weighed


def test_after_clear_everything_begins_anew():
    weights = Weights()
    weights.add(2)
    weights.backward_ended(True)
    weights.clear()
    assert weights == Weights()
    weights.backward_ended(True)


# ------------------------------------------------------------------ factors

states = st.lists(st.sampled_from(State), min_size=1, max_size=8)


@given(states)
def test_unweighed_active_ranks_share_equally(roles: list[State]):
    factors = scales([Ticket(Operation.GRADIENTS, state=s) for s in roles], None)
    active = roles.count(State.ACTIVE)
    assert factors == [1.0 / active if s is State.ACTIVE else 0.0 for s in roles]


@given(states, st.integers(1, 16))
def test_a_divisor_is_used_as_given(roles: list[State], divisor: int):
    factors = scales([Ticket(Operation.GRADIENTS, state=s) for s in roles], divisor)
    assert factors == [1.0 / divisor if s is State.ACTIVE else 0.0 for s in roles]


@given(states, st.lists(st.integers(0, 9), min_size=8, max_size=8))
def test_a_rank_that_is_not_active_or_has_no_items_is_not_read(roles: list[State], items: list[int]):
    tickets = [
        Ticket(Operation.GRADIENTS, state=s, weighed=s is State.ACTIVE, unit=float(n), total=float(n))
        for s, n in zip(roles, items, strict=False)
    ]
    factors = scales(tickets, len(roles))
    for t, factor in zip(tickets, factors, strict=True):
        assert (factor == 0.0) == (t.state is not State.ACTIVE or t.unit == 0.0)
    if any(factors):
        assert math.isclose(sum(factors), 1.0)


def test_nobody_has_items():
    empty = Ticket(Operation.GRADIENTS, weighed=True, unit=0.0, total=0.0)
    assert scales([empty, empty], None) == [0.0, 0.0]


def test_some_weigh_and_others_do_not():
    plain, weighed = Ticket(Operation.GRADIENTS), Ticket(Operation.GRADIENTS, weighed=True, unit=2, total=2)
    with pytest.raises(ValueError, match=r"\[1\] weigh, \[0, 2\] do not"):
        scales([plain, weighed, plain], None)
    with pytest.raises(ValueError, match="weigh"):
        scales([replace(weighed, unit=0.0, total=0.0), plain], None)


def test_ranks_that_are_not_active_may_differ():
    joined = Ticket(Operation.FOLLOW, state=State.JOINED)
    weighed = Ticket(Operation.GRADIENTS, weighed=True, unit=2, total=4)
    assert scales([joined, weighed], None) == [0.0, 0.5]
