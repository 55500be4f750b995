"""Medians, quartiles and ratios of the benchmark: pure functions, no torch, no clock.

Why medians: a shared machine is disturbed in one direction only, so the mean tells more about
the neighbours than about the code. Why pairs: the variants of one round ran within a second of
each other, so what slows one slows all; differences and ratios are formed by round.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median, quantiles
from typing import TypedDict

RESAMPLES = 1000


class Spread(TypedDict):
    """A figure and its interquartile range."""

    median: float
    q1: float
    q3: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of `values`."""
    if len(values) == 1:
        return Spread(median=values[0], q1=values[0], q3=values[0])
    q1, middle, q3 = quantiles(values, n=4, method="inclusive")
    return Spread(median=middle, q1=q1, q3=q3)


def differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    """Return left - right, round by round."""
    return [a - b for a, b in zip(left, right, strict=True)]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """Return median(ours) / median(theirs) and how far it moves when rounds are drawn anew.

    The range is the interquartile range over bootstrap resamples of whole rounds (Efron 1979).
    A ratio by round is not used: the cost of synchronisation is a difference, which noise may
    bring near zero in single rounds. None if `theirs` is not positive: then nothing is known.
    """
    pairs = list(zip(ours, theirs, strict=True))
    if median(theirs) <= 0:
        return None
    draw = random.Random(0)
    drawn = []
    for _ in range(RESAMPLES):
        sample = draw.choices(pairs, k=len(pairs))
        below = median(b for _, b in sample)
        if below > 0:
            drawn.append(median(a for a, _ in sample) / below)
    around = spread(drawn)
    return Spread(median=median(ours) / median(theirs), q1=around["q1"], q3=around["q3"])


def order_of_round(number: int, count: int) -> list[int]:
    """Return the order in which round `number` runs `count` variants.

    Rotated every second round and reversed every other, so that each variant stands in each
    place, after each neighbour, equally often.
    """
    shift = (number // 2) % count
    order = [*range(shift, count), *range(shift)]
    return order[::-1] if number % 2 else order
