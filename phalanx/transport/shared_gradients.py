"""How the gradients of one reducer are added up when the ranks share memory.

Autograd makes gradients where it likes: having it add to memory of ours, zeroed before, costs more than to copy what
it has made once. They are reduced in pieces that fit into caches, and shared memory holds two of them per rank:

    post    a rank copies its contribution to a piece into its slot
    add     few ranks: each adds up all slots for itself. Many: each adds up one segment, into a result that all copy

While one piece is added up, the next one is posted into the other slot; the fence after that says that both is done
everywhere. A slot is written again only after the next but one (see shm.py for why alternating slots suffice). What
is small is one piece, posted before the tickets' fence, and needs no other.

Where there is more than a little, results are shared: each rank adds up one segment of every piece, and all read the
same results (see common_results.py), which nobody need copy. Not where some rank writes to its gradients, or shows,
between reductions or while others reduce, what it has: then results go to memory of each rank's own.

Of two ranks that share results, each posts only what lies in the other's segments; its own it adds up straight from
its gradients (see Halves). The first piece is posted before the tickets tell whether results are shared: as it was in
the reduction before. Where that turns out wrong, every rank posts it again.

They never go to where a contribution is that has not been reduced yet: until the last fence every contribution is
intact, so that a reduction can be repeated after a death.
"""

from __future__ import annotations

import enum
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from phalanx.transport.arena import Arena
from phalanx.transport.between import Between, Sum
from phalanx.transport.common_results import CommonResults
from phalanx.transport.pieces import (
    Cut,
    Layout,
    Part,
    Span,
    aligned,
    before_results,
    has_common,
    pieces_of,
    slot_bytes,
    total_bytes,
)
from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import is_narrow, scale_into, segment, summation

Calls = list[Callable[[], object]]

_LIKE_FLOAT32 = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes of so many exponents that halving a gradient loses nothing."""


_KEPT_EQUAL, _KEPT_DIFFERENT = 16, 2
"""How many programs of each kind are kept. Different scales rarely come again. A program is small, but made while the
memory of the last gradients is free: the allocator puts it there, and each one kept costs that much memory."""


class Halves(Protocol):
    """What one of two ranks does that share results, of a reduction with all of its gradients and equal scales."""

    def post(self, piece: int, turn: int, factor: float) -> None:
        """Post what the other rank adds up of a piece, times `factor`."""

    def add(self, piece: int, turn: int, factor: float) -> None:
        """Write the results of this rank's own half of a piece, times `factor`, once both have posted."""


class _Results(enum.Enum):
    """Where results go."""

    OWN = "memory of this rank's own, which shows nothing that counts"
    SPARE = "there, but on the way through other memory: contributions are there"
    COMMON = "memory that all ranks share"


class _Program(NamedTuple):
    """What a rank calls, by turn and piece: to add up, and to take over what others have added up.

    `sums` take the place of `add` with several hosts. `factor` is what contributions to all pieces but the first are
    posted with. `halves` says whether Halves can do it.
    """

    add: list[list[Calls]]
    sums: list[list[list[Sum]]]
    take: list[list[Calls]]
    factor: float
    halves: bool


class SharedGradients:
    """The slots of all ranks, and `own`: this rank's results, and contributions that are accumulated there.

    Whoever knows of contributions that are not in `own` sets `post(piece, turn, factor)`, which writes this rank's
    contribution to a piece, times a factor, into its slot, and may set `halves`, on both ranks. `aside` says that some
    contributions are there, `apart` that this rank's results may not be shared from now on, `shares` that they are in
    this reduction.
    """

    def __init__(
        self, rank: int, size: int, arena: Arena | None, layout: Layout, cut: Cut, between: Between | None = None
    ) -> None:
        self.rank, self.size, self.cut, self._layout, self._between = rank, size, cut, layout, between
        self._arena = None if arena is None else arena.memory
        self._spare: list[torch.Tensor] | None = None
        self._turn = 0
        self._ahead: float | None = None  # the factor of the last reduction, if the halves have done it
        self._programs: dict[tuple[tuple[Span, ...], tuple[float, ...], _Results], _Program] = {}
        # The last one. Both sequences are kept, so that their identity proves that they are the same.
        self._usual: tuple[Sequence[Span], Sequence[float], _Results, _Program] | None = None
        self.pieces = pieces_of(layout, Cut(total_bytes(layout)) if arena is None else cut)
        self._slot_bytes = slot_bytes(self.pieces, layout)
        self._direct = between is None and (size <= cut.direct or len(self.pieces) == 1)
        self.post: Callable[[int, int, float], None] | None = None
        self.halves: Halves | None = None
        self.aside = self.apart = self.shares = False
        # Whether `own` shows something else than what all ranks share, for the time being: results of a reduction
        # that was not shared as an exception, or what was there when this process forked.
        self._strays = False
        self._has_shared = False
        self.reducing = threading.Lock()  # held while results are written; forking does not wait for it
        self._common: CommonResults | None = None
        self.common: list[torch.Tensor] = []  # the results that all share, for those who write them
        if arena is not None and has_common(layout, cut):
            start = before_results(size, self.pieces, layout)
            self._common = CommonResults(arena, start, total_bytes(layout))
            self.common = _regions(arena.memory, layout, start)[0]
            _sharing.add(self)
        self._take_memory()

    def _take_memory(self) -> None:
        self.memory = _private(self._layout) if self._common is None else self._common.memory
        self.own, self.offsets = _regions(self.memory, self._layout)
        self._spare = self._usual = None
        self._programs.clear()

    def renew(self) -> None:
        """See Gradients.renew."""
        if self.apart:
            self._common = None
        elif self._common is not None:
            self._common.renew()
        self._take_memory()

    @staticmethod
    def bytes_needed(size: int, layout: Layout, cut: Cut) -> int:
        """How large the arena must be for `size` ranks."""
        pieces = pieces_of(layout, cut)
        return before_results(size, pieces, layout) + (total_bytes(layout) if has_common(layout, cut) else 0)

    def slot(self, turn: int, part: Part, rank: int | None = None) -> torch.Tensor:
        """Where a rank, or this one, posts its contribution to a part in turn 0 or 1; `size` has the results."""
        if self._arena is None:
            return self.own[part.region][part.start : part.stop]
        place = turn * (self.size + 1) + (self.rank if rank is None else rank)
        return torch.frombuffer(
            self._arena, dtype=self._layout[part.region][0], count=part.stop - part.start,
            offset=place * self._slot_bytes + part.offset,
        )  # fmt: skip

    def must_part(self) -> bool:
        """Whether results must go to memory of this rank's own from now on: it shows some, or has written to them."""
        if self._common is not None and not self.apart:
            self.apart = self.aside or not (self._strays or self._common.shows_all())
        return self.apart

    def share(self, by_all: bool, parted: bool = False) -> None:
        """Share the results of this reduction, if all ranks are in it and none has `parted`; call it on every rank."""
        self.apart |= parted and self._common is not None
        self.shares = by_all and not self.apart and self._common is not None

    @property
    def first_host(self) -> Sequence[int]:
        """The ranks that share memory with rank 0."""
        return range(self.size) if self._between is None else self._between.hosts[0]

    @property
    def has_halves(self) -> bool:
        """Whether ranks are in pairs that add up halves; not where sums that go on between hosts must be wider."""
        goes_on = self._between is None or (self._between.are_pairs and not any(is_narrow(d) for d, _ in self._layout))
        return bool(self.common) and self.size == 2 and goes_on

    @property
    def shows_common(self) -> bool:
        """Whether this rank's gradients are what all ranks share: it has not written to them."""
        return self._common is not None and not self.apart and not self._strays and self._common.shows_all()

    def scale_common(self, spans: Sequence[Span], factor: torch.Tensor) -> None:
        """Multiply this rank's segments of the shared results. Every rank, which none reads meanwhile.

        Hold `reducing` from before ranks tell each other that they show what all share, until all have done it.
        """
        for region, start, stop in spans:
            first, end = segment(stop - start, self.rank, self.size)
            self.common[region][start + first : start + end].mul_(factor)

    def begin(self, turn: int) -> None:
        """Post the first piece, in the turn of the fence that comes next."""
        self._turn = turn
        if self._ahead is not None and self.halves is not None:
            self.halves.post(0, turn, self._ahead)
        else:
            self._post(0, turn, 1.0)

    def _post(self, piece: int, turn: int, factor: float) -> None:
        if self.post is not None:
            self.post(piece, turn, factor)
            return
        for part in self.pieces[piece]:
            scale_into(self.own[part.region][part.start : part.stop], factor, self.slot(turn, part))

    def reduce(self, spans: Sequence[Span], scales: Sequence[float], fence: Fence, takes: bool = True) -> None:
        """Replace `spans` of every rank by sum(scale[r] x contribution of r), in rank order.

        Every rank calls it after begin() and the fence that follows. A rank of scale 0 is not read. Equal scales
        are applied to the sum, so that it is rounded once; where they are exact, in posting all pieces but the first,
        which spares a pass. A rank that does not take the result keeps what it has.
        """
        with self.reducing:
            self._reduce(spans, scales, fence, takes)

    def _reduce(self, spans: Sequence[Span], scales: Sequence[float], fence: Fence, takes: bool) -> None:
        last, direct = len(self.pieces) - 1, self._direct and not self.shares
        between, wait = self._between, fence if self._between is None else fence.on_host
        where = self._where(takes)
        usual = self._usual
        if usual is not None and spans is usual[0] and scales is usual[1] and where is usual[2]:
            program = usual[3]
        else:
            program = self._program(tuple(spans), tuple(scales), where)
            self._usual = (spans, scales, where, program)
        halves, ahead = self.halves if program.halves else None, self._ahead
        self._ahead = program.factor if halves is not None else None
        if ahead is not None and ahead != self._ahead:
            ahead, self._turn = None, fence.step & 1
            self._post(0, self._turn, 1.0)
            wait()
        post, turn, begun = self._post if halves is None else halves.post, self._turn, []
        for piece in range(last + 1):
            following = fence.step & 1
            if piece < last:
                post(piece + 1, following, program.factor)
            by_halves = halves is not None and (piece > 0 or ahead is not None)
            if halves is not None and by_halves:
                halves.add(piece, turn, program.factor)
            elif takes or not direct:
                for call in program.add[turn][piece]:
                    call()
            if between is not None:
                begun += between.begin(program.sums[turn][piece], are_there=by_halves)
                if piece == last or where is not _Results.COMMON:
                    between.finish(begun, fence)
                    begun = []
            if piece < last or not direct:
                wait()
            if takes:
                for call in program.take[turn][piece]:
                    call()
            turn = following
        if where is _Results.SPARE and takes:
            for region, start, stop in spans:
                self.own[region][start:stop].copy_(self._results(where)[region][start:stop])

    def _where(self, takes: bool) -> _Results:
        if self._common is not None and not self.apart:
            if self.shares and self._strays:
                self._common.discard()
            self._strays = not self.shares and (takes or self._strays)
        if self.shares:
            self._has_shared = True
            return _Results.COMMON
        return _Results.SPARE if self.aside and len(self.pieces) > 1 else _Results.OWN

    def keep_for_child(self) -> None:
        """Let a process that is about to be forked keep the results that it finds: it has no part in what comes."""
        if self._common is None or self.apart or self._strays or not self._has_shared:
            return
        if self.reducing.acquire(blocking=False):  # else another thread forks in the middle of a backward
            self._common.keep()
            self._strays = True
            self.reducing.release()

    def _factor(self, scales: Sequence[float]) -> float:
        """What contributions can be posted with instead of scaling their sum: the same, but for subnormal numbers."""
        exact = all(scale == scales[0] for scale in scales) and math.frexp(scales[0])[0] == 0.5
        return scales[0] if exact and all(dtype in _LIKE_FLOAT32 for dtype, _ in self._layout) else 1.0

    def _results(self, where: _Results) -> list[torch.Tensor]:
        if where is not _Results.SPARE:
            return self.own if where is _Results.OWN else self.common
        if self._spare is None:
            self._spare = _regions(_private(self._layout), self._layout)[0]
        return self._spare

    def _program(self, spans: tuple[Span, ...], scales: tuple[float, ...], where: _Results) -> _Program:
        found = self._programs.get((spans, scales, where))
        if found is None:
            self._forget_some(equal=len(set(scales)) == 1)
            add, sums, take = [], [], []
            factor = self._factor(scales)
            rest = tuple(scale / factor for scale in scales)
            for turn in (0, 1):
                both = [
                    self._calls(turn, piece, spans, rest if number else scales, where)
                    for number, piece in enumerate(self.pieces)
                ]
                add.append([calls for calls, _, _ in both])
                sums.append([between for _, between, _ in both])
                take.append([calls for _, _, calls in both])
            whole = spans == tuple((region, 0, count) for region, (_, count) in enumerate(self._layout))
            alike = whole and scales == (factor,) * len(scales)
            halves = self.halves is not None and where is _Results.COMMON and alike
            found = self._programs[(spans, scales, where)] = _Program(add, sums, take, factor, halves)
        return found

    def _forget_some(self, equal: bool) -> None:
        """Make room for a program of equal or different scales."""
        found = [key for key in self._programs if (len(set(key[1])) == 1) == equal]
        if len(found) >= (_KEPT_EQUAL if equal else _KEPT_DIFFERENT):
            for key in found:
                del self._programs[key]

    def _calls(
        self, turn: int, piece: Sequence[Part], spans: Sequence[Span], scales: Sequence[float], where: _Results
    ) -> tuple[Calls, list[Sum], Calls]:
        add: Calls = []
        sums: list[Sum] = []
        take: Calls = []
        here = scales if self._between is None else [scales[rank] for rank in self._between.here]
        given, everywhere = [scale for scale in here if scale], [scale for scale in scales if scale]
        results, shares = self._results(where), where is _Results.COMMON
        for part in piece:
            slots = [self.slot(turn, part, rank) for rank, scale in enumerate(here) if scale]
            for region, start, stop in spans:
                low, high = max(start, part.start), min(stop, part.stop)
                if region != part.region or low >= high:
                    continue
                result = results[region][low:high]
                low, high = low - part.start, high - part.start
                if self._direct and not shares:
                    add += summation([slot[low:high] for slot in slots], given, result)
                    continue
                if not shares:
                    common = self.slot(turn, part, self.size)[low:high]
                    take.append(_copying(common, result))
                    result = common
                first, end = self._segment(high - low)
                parts = [slot[low + first : low + end] for slot in slots]
                if self._between is None:
                    add += summation(parts, given, result[first:end])
                elif first < end:
                    sums.append(self._between.sum(parts, given, everywhere, result[first:end]))
        return add, sums, take

    def _segment(self, count: int) -> tuple[int, int]:
        """Which of `count` elements this rank adds up for the others."""
        if self._between is not None:
            return self._between.segment(count)
        return segment(count, self.rank, self.size)


_sharing: weakref.WeakSet[SharedGradients] = weakref.WeakSet()


def _keep_for_child() -> None:
    for gradients in list(_sharing):
        gradients.keep_for_child()


os.register_at_fork(before=_keep_for_child)


def _copying(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source)


def _private(layout: Layout) -> mmap.mmap:
    """Memory of this process's own for a layout. Only touched pages become real."""
    return mmap.mmap(-1, max(total_bytes(layout), 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _regions(memory: mmap.mmap, layout: Layout, start: int = 0) -> tuple[list[torch.Tensor], list[int]]:
    """The regions of a layout in memory, from byte `start` on, and their offsets."""
    regions, offsets = [], []
    for dtype, count in layout:
        regions.append(torch.frombuffer(memory, dtype=dtype, count=count, offset=start))
        offsets.append(start)
        start += aligned(count * dtype.itemsize)
    return regions, offsets
