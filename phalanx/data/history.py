"""Which places of an epoch have been handed out, through any sequence of stops and world sizes.

An epoch is a sequence of places 0, 1, 2, ... A run deals the places that are left to its lanes like cards:
place k of those left goes to lane k % lanes. When it stops, each lane has taken some of its own, from the
first on. That is one dealing: a number per lane. The next run deals what that leaves to its own lanes, and
so on. So an epoch's history is a list of dealings, as long as there were stops that left the lanes uneven:
where they took equally much, what was handed out is the beginning of the epoch, one number, and such
dealings are added up.

The k-th place that is left is found without walking there: one dealing leaves stretches of rows in which the
same lanes are open, so a table of stretches and one division give it, at any distance. No torch here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

T = TypeVar("T")
Places = np.ndarray  # of int64


class Dealing:
    """Places dealt to lanes, of which lane i has taken its first `taken[i]`."""

    def __init__(self, taken: Sequence[int]) -> None:
        self.taken = tuple(taken)
        self.lanes = len(self.taken)
        self.total = sum(self.taken)

    @property
    def is_beginning(self) -> bool:
        """Whether the places taken are 0 to total - 1."""
        return all(count == lane_length(lane, self.lanes, self.total) for lane, count in enumerate(self.taken))

    @property
    def end(self) -> int:
        """The place after the last one taken."""
        return max((lane + self.lanes * (count - 1) + 1 for lane, count in enumerate(self.taken) if count), default=0)

    def left(self, k: Places) -> Places:
        """Return the k-th places (from 0) of those not taken."""
        starts, widths, before, offsets, lanes = self._stretches
        stretch = np.searchsorted(before, k, side="right") - 1
        row, column = np.divmod(k - before[stretch], widths[stretch])
        places: Places = (starts[stretch] + row) * self.lanes + lanes[offsets[stretch] + column]
        return places

    @cached_property
    def _stretches(self) -> tuple[Places, ...]:
        """Per stretch of rows: its first row, its open lanes, places left before it, where its lanes are listed."""
        order = sorted(range(self.lanes), key=self.taken.__getitem__)
        sorted_taken = [self.taken[lane] for lane in order]
        starts = sorted(set(sorted_taken))
        widths = [bisect_right(sorted_taken, start) for start in starts]
        before, offsets, lanes = [0], [0], []
        for i, (start, width) in enumerate(zip(starts, widths, strict=True)):
            lanes += sorted(order[:width])
            if i + 1 < len(starts):
                before.append(before[-1] + (starts[i + 1] - start) * width)
                offsets.append(len(lanes))
        return tuple(np.array(column, dtype=np.int64) for column in (starts, widths, before, offsets, lanes))


class History:
    """What of one epoch has been handed out. Immutable; `dealings` is plain data, the earliest first."""

    def __init__(self, dealings: Iterable[Sequence[int]] = ()) -> None:
        self.dealings = tuple(Dealing(taken) for taken in dealings)
        self.total = sum(dealing.total for dealing in self.dealings)

    def plain(self) -> list[list[int]]:
        """As lists of numbers, which JSON can hold."""
        return [list(dealing.taken) for dealing in self.dealings]

    def left(self, k: Places) -> Places:
        """Return the k-th places (from 0) of those left. Nothing is checked against the epoch's length."""
        for dealing in reversed(self.dealings):
            k = dealing.left(k)
        return k

    def after(self, taken: Sequence[int], length: int | None = None) -> History:
        """Return the history once the places left were dealt to lanes that took so many of them.

        `length` is that of the epoch; what a lane took beyond it were repetitions and are not counted.
        """
        if length is not None:
            left = length - self.total
            taken = [min(count, lane_length(lane, len(taken), left)) for lane, count in enumerate(taken)]
        return History(_shortened([dealing.taken for dealing in self.dealings] + [tuple(taken)]))

    def for_lanes(self, lanes: int) -> tuple[History, list[int]]:
        """Split off the last dealing if it had the same lanes, so that each can go on with its own places."""
        if self.dealings and lanes > 1 and self.dealings[-1].lanes == lanes:
            *rest, last = (dealing.taken for dealing in self.dealings)
            return History(rest), list(last)
        return self, [0] * lanes

    @property
    def beginning(self) -> int:
        """How many places at the beginning of the epoch are all taken, as far as the first dealing says."""
        first = self.dealings[0] if self.dealings else None
        return first.total if first is not None and first.is_beginning else 0

    def unseen(self, stream: Iterator[T]) -> Iterator[T]:
        """Pass on the items of a stream whose places are left; the stream begins after `beginning`."""
        dealings = self.dealings[1:] if self.beginning else self.dealings
        left = [0] * (len(dealings) + 1)
        for item in stream:
            for depth, dealing in enumerate(dealings):
                row, lane = divmod(left[depth], dealing.lanes)
                left[depth] += 1
                if row < dealing.taken[lane]:
                    break
            else:
                yield item


def lane_length(lane: int, lanes: int, places: int) -> int:
    """How many of the places 0 to places - 1 are the lane's."""
    return len(range(lane, places, lanes))


def _shortened(dealings: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Write dealings that took the beginning of what was left as one lane, and add up what can be."""
    short: list[tuple[int, ...]] = []
    for taken in dealings:
        dealing = Dealing(taken)
        if dealing.is_beginning:
            count = dealing.total
            # What the dealing before left open before its end is taken now, so it is a beginning, too.
            while short and count >= Dealing(short[-1]).end - sum(short[-1]):
                count += sum(short.pop())
            taken = (count,)
        if any(taken):
            short.append(taken)
    return short
