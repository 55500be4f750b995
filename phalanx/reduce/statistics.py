"""What a reducer counts for people: how often it synchronised, how long that took, what was used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.group.ticket import Ticket
from phalanx.reduce.plan import Plan


@dataclass
class Statistics:
    """Figures of one reducer since it was built."""

    flushes: int = 0
    seconds: float = 0.0
    last_started: float = 0.0
    last_ended: float = 0.0
    buckets_reduced: int = 0
    used: frozenset[int] = frozenset()
    used_set_changes: int = 0
    _bitmaps: tuple[bytes, ...] = ()
    _size: int = 0

    def used_by(self, tickets: Sequence[Ticket], size: int) -> None:
        """Remember which ranks used which parameters in the step that is being synchronised."""
        self._bitmaps, self._size = tuple(t.bitmap for t in tickets), size

    def used_map(self) -> list[int]:
        """For every parameter, on how many ranks it was used in the last synchronised step."""
        counts = [0] * self._size
        for bitmap in self._bitmaps:
            bits = int.from_bytes(bitmap, "little")
            for index in range(self._size):
                counts[index] += bits >> index & 1
        return counts

    def flushed(self, started: float, used: Sequence[int], plan: Plan) -> None:
        """Count one synchronisation."""
        self.last_started, self.last_ended = started, time.perf_counter()
        self.flushes += 1
        self.seconds += self.last_ended - started
        if len(used) == len(plan.entries) == len(self.used):
            return  # the usual case: everything, as before
        seen = frozenset(used)
        if self.flushes > 1 and seen != self.used:
            self.used_set_changes += 1
        self.used = seen
        self.buckets_reduced = sum(1 for bucket in plan.buckets if not seen.isdisjoint(bucket.members))
