"""Cutting a row of blocks into consecutive groups of nearly equal weight. Pure: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def balanced_counts(weights: Sequence[int], groups: int) -> list[int]:
    """Return how many consecutive blocks each group gets, at least one, so that the heaviest is as light as can be.

    Among the cuts that are equally good by weight, one whose longest group is shortest is taken. `weights` are
    not negative, and there are at least as many as groups.
    """
    blocks = len(weights)
    # One unit of weight outweighs any number of blocks, so that blocks only count where weights are equal.
    sums = [0, *accumulate(weight * (blocks + 1) + 1 for weight in weights)]
    # best[i]: the least possible weight of the heaviest of the groups so far, if they take the first i blocks.
    best: list[float] = [float("inf")] * (blocks + 1)
    best[0], cuts = 0, []
    for _ in range(groups):
        following, cut = [float("inf")] * (blocks + 1), [0] * (blocks + 1)
        for end in range(1, blocks + 1):
            for start in range(end):
                heaviest = max(best[start], sums[end] - sums[start])
                if heaviest < following[end]:
                    following[end], cut[end] = heaviest, start
        best = following
        cuts.append(cut)
    counts, end = [], blocks
    for cut in reversed(cuts):
        counts.append(end - cut[end])
        end = cut[end]
    return counts[::-1]
