"""How much a rank's gradient counts. Pure.

Without `weigh`, every rank counts as one, as in torch. With it, a loss that is a mean over n items counts
n times. The first micro-batch since the last synchronisation sets the unit (its n) and its gradient is
taken as it is; a later one is scaled by n / unit while backward runs. What lies in the slot is then G, and
the mean over all items of all ranks is

    sum over ranks of (unit x G) / sum over ranks of total,      total = items since the last synchronisation

computed as G x (unit / sum of totals): nothing is ever multiplied up, so half precision does not overflow.

Where ranks hand one another gradients inside backward (SyncBatchNorm), these must be on one scale before they
are added: the unit is then 1 on every rank, and a rank whose loss counts for nothing still has a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.group.ticket import State, Ticket


@dataclass
class Weights:
    """The weights of one rank since its last synchronisation; `common_unit` says that all ranks' unit is 1.

    Items are counted once for each backward, and then for each ledger: parameters that are synchronised at
    different times (reduce/schedule.py) have ledgers of their own.
    """

    common_unit: bool = False
    unit: float = 0.0
    weighed: bool = False
    flushes: int = 0
    _plain: bool = False
    _counted: float = 0.0
    _ledgers: dict[int, float] = field(default_factory=dict)
    _backward: float | None = None

    @property
    def is_in_backward(self) -> bool:
        """Whether the present backward has been weighed already."""
        return self._backward is not None

    def add(self, n: float) -> float:
        """Count a micro-batch of `n` items, in its backward; return the factor for its gradient.

        Several weighed losses of one backward are terms of one loss over the same items: they must have the
        same `n`, and count once. Raises ValueError if they do not.
        """
        if self._backward is None:
            self._backward = n
            self.weighed = True
            if self.common_unit:
                self.unit = 1.0
            elif n and not self.unit:
                self.unit = float(n)
            self._counted += n
        elif self._backward != n:
            raise ValueError(f"weigh() with n={self._backward:g} and with n={n:g} within one backward")
        return n / self.unit if n else 0.0

    def backward_ended(self, produced: bool) -> None:
        """Close a backward; raises ValueError if it was not weighed while others since the last step were."""
        if self._backward is None and produced:
            self._plain = True
        self._backward = None
        if self._plain and self.weighed:
            raise ValueError("some backwards since the last synchronisation were weighed and others were not")

    def enter(self, ledgers: Iterable[int]) -> None:
        """Enter the items counted so far into every ledger."""
        for ledger in ledgers:
            self._ledgers[ledger] = self._ledgers.get(ledger, 0.0) + self._counted
        self._counted = 0.0

    @property
    def owes(self) -> bool:
        """Whether items have been counted that no synchronisation has seen."""
        return self._counted > 0.0 or any(self._ledgers.values())

    def total_of(self, ledger: int) -> float:
        """The items that the gradients of a ledger are the mean of."""
        return self._ledgers.get(ledger, 0.0)

    def synchronised(self, ledger: int) -> None:
        """Begin a ledger anew."""
        self._ledgers[ledger] = 0.0

    def leave(self, pending: bool) -> None:
        """End a flush; the unit stays while gradients in that unit are `pending`.

        Ledgers that were not due stay: a layer that a micro-batch did not use has the mean over its items too.
        """
        self.flushes += 1
        if not pending:
            self._begin()

    def dropped(self, pending: bool) -> None:
        """Drop the items of a backward that has raised; what earlier ones left too, unless it is `pending`."""
        if pending:
            self._counted -= self._backward or 0.0
            self._backward = None
        else:
            self._begin()

    def drop_round(self, held: bool) -> None:
        """Drop the items counted since the last flush; what earlier rounds have left is held back, or nothing is."""
        if held:
            self._counted, self._backward = 0.0, None
        else:
            self._begin()

    def clear(self) -> None:
        """Begin anew."""
        self._begin()
        self._ledgers.clear()

    def _begin(self) -> None:
        self.unit, self.weighed, self._plain, self._counted, self._backward = 0.0, False, False, 0.0, None


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
