"""One of two ranks that share results: it copies only what the other adds up, and adds its own half from where it is.

What is small is copied all the same, and added up together with what lies around it: a call for each would take
longer. It is copied as it is, and the rest times the factor of the results, which spares a pass over these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from phalanx.reduce.posting import Contributions, Share, copy_all, slot_of, without_grad
from phalanx.transport.pieces import Part
from phalanx.transport.reductions import segment, summation
from phalanx.transport.shared_gradients import SharedGradients

_Calls = list[Callable[[], object]]
_NOTHING = torch.zeros(())


@dataclass
class _Piece:
    """What a rank does with one piece in one turn.

    It copies `small` shares and those `for_other` to its slot. It adds each of `mine` to the other rank's slot, into
    the results; what lies `between` those, it adds up from both slots.
    """

    small: list[Share] = field(default_factory=list)
    small_slots: list[torch.Tensor] = field(default_factory=list)
    for_other: list[Share] = field(default_factory=list)
    slots: list[torch.Tensor] = field(default_factory=list)
    mine: list[tuple[Share, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    between: list[tuple[list[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    has_cut: bool = False  # some of `small` are parts of a gradient


class Halves:
    """See the protocol of this name in transport/shared_gradients.py."""

    def __init__(self, store: SharedGradients, contributions: Contributions) -> None:
        self._from, self._rank, self._small = contributions, store.rank, store.cut.small
        self._pieces = [[self._piece(store, parts, turn) for parts in store.pieces] for turn in (0, 1)]
        self._sums: dict[float, list[list[_Calls]]] = {}

    def _piece(self, store: SharedGradients, parts: Sequence[Part], turn: int) -> _Piece:
        piece = _Piece()
        for part in parts:
            slots = [store.slot(turn, part, rank) for rank in (0, 1)]
            result = store.common[part.region][part.start : part.stop]
            own, other = slots[self._rank], slots[1 - self._rank]
            middle = part.start + segment(part.stop - part.start, 0, 2)[1]
            begin, end = (middle, part.stop) if self._rank else (part.start, middle)
            at = begin
            for share in self._shares(part, middle, result.element_size()):
                start, count = self._from.start_of(share), share.high - share.low
                if count * result.element_size() < self._small:
                    piece.has_cut |= not share.whole
                    piece.small.append(share)
                    piece.small_slots.append(slot_of(self._from, own, part, share))
                elif begin <= start < end:
                    posted, mine = (slot_of(self._from, flat, part, share) for flat in (other, result))
                    piece.mine.append((share, posted, mine))
                    self._add_between(piece, slots, result, at - part.start, start - part.start)
                    at = start + count
                else:
                    piece.for_other.append(share)
                    piece.slots.append(slot_of(self._from, own, part, share))
            self._add_between(piece, slots, result, at - part.start, end - part.start)
        return piece

    def _shares(self, part: Part, middle: int, itemsize: int) -> list[Share]:
        """What lies in a part, in order; cut at its middle, but for what is small."""
        shares: list[Share] = []
        for share in self._from.shares_in(part.region, part.start, part.stop):
            cut = share.low + middle - self._from.start_of(share)
            if share.low < cut < share.high and (share.high - share.low) * itemsize >= self._small:
                shares += [share._replace(high=cut, whole=False), share._replace(low=cut, whole=False)]
            else:
                shares.append(share)
        return shares

    @staticmethod
    def _add_between(piece: _Piece, slots: Sequence[torch.Tensor], result: torch.Tensor, start: int, stop: int) -> None:
        if start < stop:
            piece.between.append(([slot[start:stop] for slot in slots], result[start:stop]))

    def post(self, piece: int, turn: int, factor: float) -> None:
        """See the protocol."""
        what, made = self._pieces[turn][piece], self._from.made
        with without_grad():
            at_once = made and what.small and not what.has_cut
            if not at_once or not copy_all(what.small_slots, [made[share.parameter] for share in what.small]):
                self._from.copy(what.small, what.small_slots, 1.0)
            self._from.copy(what.for_other, what.slots, factor)

    def add(self, piece: int, turn: int, factor: float) -> None:
        """See the protocol."""
        with without_grad():
            for share, posted, result in self._pieces[turn][piece].mine:
                gradient = self._from.of(share)
                torch.add(posted, _NOTHING if gradient is None else gradient, alpha=factor, out=result)
            for call in self._sums_of(factor)[turn][piece]:
                call()

    def _sums_of(self, factor: float) -> list[list[_Calls]]:
        sums = self._sums.get(factor)
        if sums is None:
            sums = self._sums[factor] = [
                [
                    [call for slots, result in piece.between for call in summation(slots, [factor, factor], result)]
                    for piece in pieces
                ]
                for pieces in self._pieces
            ]
        return sums
