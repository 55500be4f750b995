"""How much a rank's gradient counts. Pure.

Without `weigh`, every rank counts as one, as in torch. With it, a loss that is a mean over n items counts
n times. The first micro-batch since the last synchronisation sets the unit (its n) and its gradient is
taken as it is; a later one is scaled by n / unit while backward runs. What lies in the slot is then G, and
the mean over all items of all ranks is

    sum over ranks of (unit x G) / sum over ranks of total,      total = items since the last synchronisation

computed as G x (unit / sum of totals): nothing is ever multiplied up, so half precision does not overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.group.ticket import State, Ticket


@dataclass
class Weights:
    """The weights of one rank since its last synchronisation."""

    unit: float = 0.0
    total: float = 0.0
    weighed: bool = False
    plain: bool = False
    _backward: float | None = None

    def add(self, n: float) -> float:
        """Count a micro-batch of `n` items, in its backward; return the factor for its gradient.

        Several weighed losses of one backward are terms of one loss over the same items: they must have the
        same `n`, and count once. Raises ValueError if they do not.
        """
        if self._backward is None:
            self._backward = n
            self.weighed = True
            if n and not self.unit:
                self.unit = float(n)
            self.total += n
        elif self._backward != n:
            raise ValueError(f"weigh() with n={self._backward:g} and with n={n:g} within one backward")
        return n / self.unit if n else 0.0

    def backward_ended(self, produced: bool) -> None:
        """Close a backward; raises ValueError if it was not weighed while others since the last step were."""
        if self._backward is None and produced:
            self.plain = True
        self._backward = None
        if self.plain and self.weighed:
            raise ValueError("some backwards since the last synchronisation were weighed and others were not")

    def clear(self) -> None:
        """Begin anew after a synchronisation."""
        self.unit, self.total, self.weighed, self.plain, self._backward = 0.0, 0.0, False, False, None


def scales(tickets: Sequence[Ticket], divisor: int | None) -> list[float]:
    """The factor of each rank's slot in the sum; 0 for a rank that is not to be read.

    `divisor` is what an unweighed sum is divided by; None means by the number of ACTIVE ranks. Raises
    ValueError, with the ranks on either side, if some active ranks weigh and others do not.
    """
    active = [t.state is State.ACTIVE for t in tickets]
    weighing = [rank for rank, t in enumerate(tickets) if active[rank] and t.weighed]
    plain = [rank for rank, t in enumerate(tickets) if active[rank] and not t.weighed]
    if weighing and plain:
        raise ValueError(f"{weighing} weigh, {plain} do not")
    if weighing:
        total = sum(t.total for t in tickets if t.weighed)
        return [t.unit / total if active[r] and t.weighed and total else 0.0 for r, t in enumerate(tickets)]
    share = divisor or sum(active)
    return [1.0 / share if active[rank] else 0.0 for rank in range(len(tickets))]
