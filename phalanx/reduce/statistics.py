"""What a reducer counts for people: how often it synchronised, how long that took, what was used."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.group import ticket
from phalanx.reduce.plan import Plan


@dataclass
class Statistics:
    """Figures of one reducer since it was built. `size` is its number of parameters."""

    size: int = 0
    flushes: int = 0
    seconds: float = 0.0
    last_started: float = 0.0
    last_ended: float = 0.0
    buckets_reduced: int = 0
    used: frozenset[int] = frozenset()
    used_set_changes: int = 0
    micro_steps: dict[int, int] = field(default_factory=dict)  # backwards since a parameter was synchronised
    _now: frozenset[int] = frozenset()
    _wires: Sequence[bytes] = ()
    _all_at: int = 0
    _at: dict[int, int] = field(default_factory=dict)

    def used_by(self, wires: Sequence[bytes]) -> None:
        """Remember the tickets of the step that is being synchronised: which rank used what."""
        self._wires = wires

    def used_map(self) -> list[int]:
        """For every parameter, on how many ranks it was used in the last synchronised step."""
        counts = [0] * self.size
        for wire in self._wires:
            bits = int.from_bytes(ticket.decode(wire).bitmap, "little")
            for index in range(self.size):
                counts[index] += bits >> index & 1
        return counts

    def accumulated(self, fired: Iterable[int]) -> None:
        """Count one backward into parameters that it leaves local."""
        for index in fired:
            self.micro_steps[index] = self.micro_steps.get(index, 0) + 1

    def synchronised(self, used: Sequence[int], members: frozenset[int] | None) -> None:
        """Note the parameters used in one round of a flush, whose `members` (None: all) are local no more."""
        if self.micro_steps:
            for index in range(self.size) if members is None else members:
                self.micro_steps.pop(index, None)
        if len(used) == self.size:
            self._all_at = self.flushes + 1
            if len(self.used) == self.size and not self._now:
                self._now = self.used  # as before: the usual case
                return
        else:
            self._at.update(dict.fromkeys(used, self.flushes + 1))
        self._now = self._now.union(used)

    def flushed(self, started: float, plan: Plan) -> None:
        """Count one synchronisation, of all its rounds."""
        self.last_started, self.last_ended = started, time.perf_counter()
        self.flushes += 1
        self.seconds += self.last_ended - started
        if self._now is not self.used and self._now != self.used:
            self.used_set_changes += self.flushes > 1
            self.used = self._now
            self.buckets_reduced = sum(1 for bucket in plan.buckets if not self.used.isdisjoint(bucket.members))
        self._now = frozenset()

    def synchronised_at(self, index: int) -> int:
        """The number of the flush that last synchronised a parameter; 0 for none."""
        return max(self._all_at, self._at.get(index, 0))
