"""Where the gradients of one reducer live when the ranks share memory, and how they are added up.

Large gradients are at home in shared memory: autograd accumulates into this rank's slot, and every rank adds
up one segment of all slots, into a result that all copy over their slots when it is complete. Until then every
contribution is intact, so that a reduction can be repeated after a death. (Writing the sum into all slots at
once is faster by itself at 25 MiB, and made whole steps slower: the optimizer then finds half of its gradients
in the other core's caches.)

Small ones, of which a model may have hundreds, are staged: autograd makes them where it likes, which is
cheaper by far than adding to something that is there; they are copied into a slot, and every rank adds
up all slots for itself, into memory of its own. That needs no second exchange: a slot is written again
only after the next but one (see shm.py for why alternating slots suffice).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import scale_into, scale_left, summation, weighted_sum

Layout = Sequence[tuple[torch.dtype, int]]
Span = tuple[int, int, int]
"""Region, start, stop."""

_ALIGN = 64


class _Move(NamedTuple):
    """What one rank does of one span: the slots that count and their scales, and where results go."""

    parts: list[torch.Tensor]
    scales: list[float]
    target: torch.Tensor
    own: torch.Tensor
    result: torch.Tensor
    left: float  # the scale that is left for the copy


class SharedGradients:
    """A slot per rank and one result area, for each dtype. `own` are this rank's slots."""

    def __init__(self, rank: int, size: int, arena: mmap.mmap, layout: Layout) -> None:
        self._rank, self._size = rank, size
        self.own: list[torch.Tensor] = []
        self.offsets: list[int] = []
        self.memory = arena
        self._moves: dict[tuple[tuple[Span, ...], tuple[float, ...]], list[_Move]] = {}
        self._slots: list[list[torch.Tensor]] = []
        self._results: list[torch.Tensor] = []
        at = 0
        for dtype, count in layout:
            views = []
            for place in range(size + 1):
                if place == rank:
                    self.offsets.append(at)
                views.append(torch.frombuffer(arena, dtype=dtype, count=count, offset=at))
                at += _aligned(count * dtype.itemsize)
            self._slots.append(views[:-1])
            self._results.append(views[-1])
            self.own.append(views[rank])

    @staticmethod
    def bytes_needed(size: int, layout: Layout) -> int:
        """How large the arena must be for `size` ranks. Only touched pages become real."""
        return (size + 1) * _total(layout)

    def reduce(self, spans: Sequence[Span], scales: Sequence[float], fence: Fence, takes: bool = True) -> None:
        """Replace `spans` of every rank by sum(scale[r] x slot of r), in rank order.

        A rank of scale 0 is not read. Equal scales are applied to the sum, so that it is rounded once. A rank
        that does not take the result keeps what it has.
        """
        moves = self._moves_for(tuple(spans), tuple(scales))
        for move in moves:
            weighted_sum(move.parts, move.scales, move.target)
        fence()
        for move in moves if takes else ():
            scale_into(move.result, move.left, move.own)

    def _segment(self, start: int, stop: int) -> tuple[int, int]:
        length = stop - start
        return start + length * self._rank // self._size, start + length * (self._rank + 1) // self._size

    def _moves_for(self, spans: tuple[Span, ...], scales: tuple[float, ...]) -> list[_Move]:
        found = self._moves.get((spans, scales))
        if found is not None:
            return found
        if len(self._moves) > 50:
            self._moves.clear()
        given = [scale for scale in scales if scale]
        moves: list[_Move] = []
        for region, start, stop in spans:
            low, high = self._segment(start, stop)
            parts = [slot[low:high] for slot, scale in zip(self._slots[region], scales, strict=True) if scale]
            own, result = self.own[region][start:stop], self._results[region][start:stop]
            left = scale_left(given, own.dtype)
            moves.append(_Move(parts, given, self._results[region][low:high], own, result, left))
        self._moves[(spans, scales)] = moves
        return moves


class StagedGradients:
    """Two slots per rank, for contributions, and memory of this rank's own, for results, for each dtype."""

    def __init__(self, rank: int, size: int, arena: mmap.mmap | None, layout: Layout) -> None:
        self._rank, self._size = rank, size
        self.own: list[torch.Tensor] = []
        self.offsets: list[int] = []
        self.memory = mmap.mmap(-1, max(_total(layout), 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._turn = 0
        self._sums: dict[tuple[tuple[Span, ...], tuple[float, ...], int], list[Callable[[], object]]] = {}
        self._slots: list[list[list[torch.Tensor]]] = []
        at = shared = 0
        for dtype, count in layout:
            own = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=at)
            self.own.append(own)
            self.offsets.append(at)
            step = _aligned(count * dtype.itemsize)
            at += step
            if arena is None:
                self._slots.append([[own], [own]])
                continue
            slots = [
                torch.frombuffer(arena, dtype=dtype, count=count, offset=shared + place * step)
                for place in range(2 * size)
            ]
            shared += 2 * size * step
            self._slots.append([slots[:size], slots[size:]])

    @staticmethod
    def bytes_needed(size: int, layout: Layout) -> int:
        """How large the arena must be for `size` ranks."""
        return 2 * size * _total(layout)

    def slot(self, turn: int, region: int) -> torch.Tensor:
        """Where this rank posts its contributions to a region in turn 0 or 1."""
        return self._slots[region][turn][self._rank]

    def posted(self, turn: int) -> None:
        """Say in which turn all ranks have posted what is reduced next."""
        self._turn = turn

    def reduce(self, spans: Sequence[Span], scales: Sequence[float], fence: Fence, takes: bool = True) -> None:
        """See SharedGradients.reduce. Every rank may call this once the fence after posting is passed."""
        for call in self._sums_for(tuple(spans), tuple(scales), self._turn) if takes else ():
            call()

    def _sums_for(self, spans: tuple[Span, ...], scales: tuple[float, ...], turn: int) -> list[Callable[[], object]]:
        found = self._sums.get((spans, scales, turn))
        if found is not None:
            return found
        if len(self._sums) > 50:
            self._sums.clear()
        given = [scale for scale in scales if scale]
        sums: list[Callable[[], object]] = []
        for region, start, stop in spans:
            slots = self._slots[region][turn]
            parts = [slot[start:stop] for slot, scale in zip(slots, scales, strict=True) if scale]
            sums += summation(parts, given, self.own[region][start:stop])
        self._sums[(spans, scales, turn)] = sums
        return sums


def _total(layout: Layout) -> int:
    return sum(_aligned(count * dtype.itemsize) for dtype, count in layout)


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
