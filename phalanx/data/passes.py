"""One pass over this rank's share of an epoch: what comes, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from phalanx.data.history import History
from phalanx.data.shares import Dealer


@dataclass
class Pass:
    """One pass. It goes from place number `start` of this rank's share to `count`.

    `drawn` places have been handed to whoever draws. Where a loader tells what the training loop has received,
    `received` counts that; workers draw ahead.
    """

    epoch: int
    length: int
    history: History
    dealer: Dealer
    rank: int
    places: int
    start: int = 0
    order_name: str = ""
    ended: bool = False
    drawn_ahead: bool = False
    received: int | None = None
    drawn: int = field(init=False)
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.drawn = self.start
        self.count = self.dealer.count(self.rank, self.places)

    @property
    def done(self) -> int:
        """How many places of this rank's share have reached the training loop, earlier runs of it included."""
        return self.drawn if self.received is None else self.received

    @property
    def counts(self) -> bool:
        """Whether it has taken enough to count as an epoch: a quarter of its items."""
        return self.ended or self.done - self.start >= max(-(-(self.count - self.start) // 4), 1)

    def places_from(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return this rank's places number `start` to `stop` - 1 as places of the epoch; which are repetitions."""
        k = self.dealer.places_of(self.rank, start, stop)
        left = self.length - self.history.total
        repeated = k >= left
        if not repeated.any():
            return self.history.left(k), repeated
        # Padding repeats the order of the whole epoch from its beginning, as torch does.
        places = (k - left) % self.length
        places[~repeated] = self.history.left(k[~repeated])
        return places, repeated

    def first_place(self, number: int) -> int:
        """Return a number for this rank's place that no other place of the epoch has on any rank."""
        k = int(self.dealer.places_of(self.rank, number, number + 1)[0])
        left = self.length - self.history.total
        return int(self.history.left(np.array([k]))[0]) if k < left else self.length + k
