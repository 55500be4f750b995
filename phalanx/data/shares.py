"""How the places of an epoch are dealt out to ranks, with or without filling up the last row. Pure.

Places are dealt in rows of `width`; within a row, column c goes to rank c % ranks. With a width that the
number of ranks divides this is torch's order, place p to rank p % ranks. Otherwise (a total batch size that
does not divide) the first ranks get one place more of each row, and a rank's batches are its parts of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from phalanx.data.history import lane_length
from phalanx.errors import MisuseError


class Rest(str, Enum):
    """What becomes of places that do not fill the last row."""

    KEEP = "keep"  # they are handed out, and the shares are uneven
    PAD = "pad"  # the row is filled up with repetitions
    DROP = "drop"  # they are left out


@dataclass(frozen=True)
class Dealer:
    """Deals places to `ranks` in rows of `width`; the rest is counted in rows of `unit`."""

    ranks: int
    width: int
    unit: int
    rest: Rest

    @classmethod
    def of(cls, ranks: int, total_batch_size: int | None, rest: Rest, rank: int | None = None) -> Dealer:
        """Make the dealer of a sampler; raises MisuseError for batches of fewer items than ranks."""
        if total_batch_size is None:
            return cls(ranks, ranks, ranks, rest)
        if total_batch_size < ranks:
            raise MisuseError(
                f"total_batch_size={total_batch_size} for {ranks} ranks leaves some rank without items",
                f"total_batch_size={ranks} or more", rank,
            )  # fmt: skip
        width = total_batch_size if total_batch_size % ranks else ranks
        return cls(ranks, width, total_batch_size if rest is Rest.DROP else width, rest)

    @property
    def lanes(self) -> int:
        """Columns whose places are taken one after the other; each belongs to one rank."""
        return self.width

    def places(self, left: int) -> int:
        """How many places are handed out when so many are left, repetitions included."""
        if self.rest is Rest.KEEP:
            return left
        rows = -(-left // self.unit) if self.rest is Rest.PAD else left // self.unit
        return rows * self.unit

    def count(self, rank: int, places: int) -> int:
        """How many of the places the rank gets."""
        rows, more = divmod(places, self.width)
        return rows * self.columns(rank) + lane_length(rank, self.ranks, more)

    def columns(self, rank: int) -> int:
        """How many places of a full row the rank gets."""
        return lane_length(rank, self.ranks, self.width)

    def places_of(self, rank: int, start: int, stop: int) -> np.ndarray:
        """Return the rank's places number `start` to `stop` - 1."""
        row, column = np.divmod(np.arange(start, stop, dtype=np.int64), self.columns(rank))
        places: np.ndarray = row * self.width + rank + self.ranks * column
        return places

    def taken(self, counts: Sequence[int]) -> list[int]:
        """Return what each lane has taken when each rank has taken its first `counts[rank]` places."""
        lanes = []
        for lane in range(self.width):
            rows, more = divmod(counts[lane % self.ranks], self.columns(lane % self.ranks))
            lanes.append(rows + (lane // self.ranks < more))
        return lanes

    def counts(self, taken: Sequence[int]) -> list[int] | None:
        """The inverse of `taken`; None if no such counts give it."""
        counts = [sum(taken[rank :: self.ranks]) for rank in range(self.ranks)]
        return counts if self.taken(counts) == list(taken) else None
