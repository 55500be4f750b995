"""The hashed order: a bijection of any length, another one for each key, that looks random."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.permutation import HashedPermutation, mixed


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_every_item_has_one_place(length: int, key: int) -> None:
    items = HashedPermutation(length, key)(np.arange(length))
    assert np.array_equal(np.sort(items), np.arange(length))


@pytest.mark.parametrize("length", [*range(1, 70), 127, 128, 129, 1 << 16, (1 << 16) + 1])
def test_lengths_around_powers_of_two(length: int) -> None:
    for key in range(3):
        assert len(set(HashedPermutation(length, key)(np.arange(length)).tolist())) == length


@pytest.mark.parametrize("length", [10**9, 3 * 10**12])
def test_large_lengths_have_no_two_places_for_one_item(length: int) -> None:
    items = HashedPermutation(length, 1)(np.arange(length - 200_000, length))
    assert len(np.unique(items)) == 200_000
    assert items.min() >= 0 and items.max() < length
    share = np.histogram(items, bins=100, range=(0, length))[0]
    assert ((share - 2000) ** 2 / 2000).sum() < 200  # chi-square with 99 degrees of freedom
    assert abs(np.corrcoef(items[:-1], items[1:])[0, 1]) < 0.02


def test_all_orders_of_four_come_equally_often() -> None:
    orders = Counter(tuple(HashedPermutation(4, key)(np.arange(4)).tolist()) for key in range(2400))
    assert len(orders) == 24 and min(orders.values()) > 60 and max(orders.values()) < 140


def test_keys_and_epochs_give_other_orders() -> None:
    first, second = (HashedPermutation(1000, mixed(0, epoch))(np.arange(1000)) for epoch in (0, 1))
    assert (first == second).sum() < 10
    assert mixed(0, 1) != mixed(1, 0) and mixed(-1, 2**70) != mixed(1, 2**70)
