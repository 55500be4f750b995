"""What a reducer's rank says in its tickets."""

from __future__ import annotations

import zlib

from phalanx.group import ticket
from phalanx.group.ticket import Operation, State, Ticket
from phalanx.reduce.schedule import Round
from phalanx.reduce.weights import Weights


class Tickets:
    """The tickets of one plan: `size` parameters of `elements` elements in all.

    `usual` is the encoded ticket of a rank that has used every parameter, exchanges all of them, and does not weigh.
    """

    def __init__(self, size: int, elements: int, tag: int) -> None:
        self._size, self._elements = size, elements
        self._all = ticket.bits(range(size), size)
        self._says = (0, False, 0, False)
        whole = Ticket(Operation.GRADIENTS, 0, 0, elements, -1, tag, bitmap=self._all, unit=0.0)
        self.usual = whole.encode()

    def say(self, digest: int, apart: bool, begun: tuple[int, bool] = (0, False)) -> None:
        """Have all tickets from now on carry these; see Ticket."""
        if self._says != (says := (digest, apart, *begun)):
            self._says = says
            self.usual = ticket.carrying(self.usual, *says)

    @property
    def begun(self) -> tuple[int, bool]:
        """What they say of sums that this rank has begun."""
        return self._says[2:]

    def say_begun(self, begun: tuple[int, bool]) -> None:
        """Have tickets carry these, and else what they have carried."""
        self.say(*self._says[:2], begun)

    def of_round(
        self,
        each: Round,
        pending: set[int],
        weights: Weights,
        tag: int,
        state: State = State.ACTIVE,
        followed: int = 0,
    ) -> Ticket:
        """The ticket for a round, by a rank with gradients that are `pending`; or of one that follows."""
        mask, root = b"", -1
        if each.members is not None:
            pending, mask = pending & each.members, ticket.bits(each.members, self._size)
            root = zlib.crc32(mask) >> 1
        bits = self._all if len(pending) == self._size else ticket.bits(pending, self._size)
        items = weights.total_of(each.ledger)
        weighed = weights.weighed or (items > 0.0 and state is not State.ACTIVE)
        total = items if weighed else 1.0
        operation, count, (digest, apart, begun, intact) = Operation.GRADIENTS, self._elements, self._says
        if state is not State.ACTIVE:
            operation, count, root, digest, bits = Operation.FOLLOW, followed, -1, 0, bits if pending else b""
        return Ticket(
            operation, 0, 0, count, root, tag, state, weighed, weights.unit, total, bits, mask, digest, apart,
            begun, intact,
        )  # fmt: skip
