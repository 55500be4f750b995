"""Cutting a row of blocks into groups: compared with every cut there is."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.parallel.partition import balanced_counts


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 8))
def test_no_other_cut_is_better(weights: list[int], groups: int) -> None:
    groups = min(groups, len(weights))
    counts = balanced_counts(weights, groups)
    assert len(counts) == groups and sum(counts) == len(weights) and min(counts) >= 1
    inner = combinations(range(1, len(weights)), groups - 1)
    every = [[b - a for a, b in pairwise([0, *cut, len(weights)])] for cut in inner]
    assert heaviest(weights, counts) == min(heaviest(weights, cut) for cut in every)


def heaviest(weights: list[int], counts: list[int]) -> int:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return max(sum(weights[end - count : end]) for end, count in zip(ends, counts, strict=True))


@pytest.mark.parametrize(
    ("weights", "groups", "counts"),
    [([1, 1, 1, 1], 2, [2, 2]), ([0, 0, 0, 0], 2, [2, 2]), ([9, 1, 1, 1], 2, [1, 3]), ([5], 1, [1]),
     ([1, 2, 3, 4, 5, 6], 3, [3, 2, 1])],
)  # fmt: skip
def test_counts_known_by_heart(weights: list[int], groups: int, counts: list[int]) -> None:
    assert balanced_counts(weights, groups) == counts
