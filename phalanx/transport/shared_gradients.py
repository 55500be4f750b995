"""How the gradients of one reducer are added up when the ranks share memory.

Autograd makes gradients where it likes: having it add to memory of ours, zeroed before, costs more than to copy what
it has made once. They are reduced in pieces that fit into caches, and shared memory holds two of them per rank:

    post    a rank copies its contribution to a piece into its slot
    add     few ranks: each adds up all slots for itself. Many: each adds up one segment, into a result that all copy

While one piece is added up, the next one is posted into the other slot; the fence after that says that both is done
everywhere. A slot is written again only after the next but one (see shm.py for why alternating slots suffice). What
is small is one piece, posted before the tickets' fence, and needs no other.

Results go to memory of this rank's own, never to where a contribution is that has not been reduced yet: until the
last fence every contribution is intact, so that a reduction can be repeated after a death.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import scale_into, summation

Layout = Sequence[tuple[torch.dtype, int]]
Span = tuple[int, int, int]
"""Region, start, stop."""
Calls = list[Callable[[], object]]

_ALIGN = 64
_LIKE_FLOAT32 = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes of so many exponents that halving a gradient loses nothing."""


class Cut(NamedTuple):
    """All gradients together are one piece up to `whole` bytes; beyond, pieces have `piece` bytes.

    Up to `direct` ranks, each adds up all slots of a piece for itself.
    """

    whole: int = 2 << 20
    piece: int = 1 << 20
    direct: int = 3


class Part(NamedTuple):
    """Elements `start` to `stop` of a region, in the slot of a piece from byte `offset` on."""

    region: int
    start: int
    stop: int
    offset: int


class _Program(NamedTuple):
    """What a rank calls, by turn and piece: to add up, and to take over what others have added up.

    `factor` is what contributions to all pieces but the first are posted with.
    """

    add: list[list[Calls]]
    take: list[list[Calls]]
    factor: float


class SharedGradients:
    """The slots of all ranks, and `own`: this rank's results, and contributions that are accumulated there.

    `post(piece, turn, factor)` writes this rank's contribution to a piece, times a factor, into its slot; it is
    replaced by whoever knows of contributions that are not in `own`. `aside` says that some contributions are there.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        arena: mmap.mmap | None,
        layout: Layout,
        cut: Cut,
    ) -> None:
        self._rank, self._size, self._arena, self._layout = rank, size, arena, layout
        self._spare: list[torch.Tensor] | None = None
        self._turn = 0
        self._programs: dict[tuple[tuple[Span, ...], tuple[float, ...], bool], _Program] = {}
        # The last one. Both sequences are kept, so that their identity proves that they are the same.
        self._usual: tuple[Sequence[Span], Sequence[float], bool, _Program] | None = None
        self.renew()
        self.pieces = pieces_of(layout, cut if size > 1 else Cut(whole=_total(layout)))
        self._slot_bytes = _slot_bytes(self.pieces, layout)
        self._direct = size <= cut.direct or len(self.pieces) == 1
        self.post: Callable[[int, int, float], None] = self._post_own
        self.aside = False

    def renew(self) -> None:
        """See Gradients.renew."""
        self.memory, self.own, self.offsets = _private(self._layout)
        self._spare = self._usual = None
        self._programs.clear()

    @staticmethod
    def bytes_needed(size: int, layout: Layout, cut: Cut) -> int:
        """How large the arena must be for `size` ranks."""
        return 2 * (size + 1) * _slot_bytes(pieces_of(layout, cut), layout)

    def slot(self, turn: int, part: Part, rank: int | None = None) -> torch.Tensor:
        """Where a rank, or this one, posts its contribution to a part in turn 0 or 1; `size` has the results."""
        if self._arena is None:
            return self.own[part.region][part.start : part.stop]
        place = turn * (self._size + 1) + (self._rank if rank is None else rank)
        return torch.frombuffer(
            self._arena, dtype=self._layout[part.region][0], count=part.stop - part.start,
            offset=place * self._slot_bytes + part.offset,
        )  # fmt: skip

    def begin(self, turn: int) -> None:
        """Post the first piece, in the turn of the fence that comes next."""
        self._turn = turn
        self.post(0, turn, 1.0)

    def _post_own(self, piece: int, turn: int, factor: float) -> None:
        for part in self.pieces[piece]:
            scale_into(self.own[part.region][part.start : part.stop], factor, self.slot(turn, part))

    def reduce(self, spans: Sequence[Span], scales: Sequence[float], fence: Fence, takes: bool = True) -> None:
        """Replace `spans` of every rank by sum(scale[r] x contribution of r), in rank order.

        Every rank calls it after begin() and the fence that follows. A rank of scale 0 is not read. Equal scales
        are applied to the sum, so that it is rounded once; where they are exact, in posting all pieces but the first,
        which spares a pass. A rank that does not take the result keeps what it has.
        """
        last, turn = len(self.pieces) - 1, self._turn
        aside = self.aside and last > 0
        usual = self._usual
        if usual is not None and spans is usual[0] and scales is usual[1] and aside == usual[2]:
            program = usual[3]
        else:
            program = self._program(tuple(spans), tuple(scales), aside)
            self._usual = (spans, scales, aside, program)
        for piece in range(last + 1):
            following = fence.step & 1
            if piece < last:
                self.post(piece + 1, following, program.factor)
            if takes or not self._direct:
                for call in program.add[turn][piece]:
                    call()
            if piece < last or not self._direct:
                fence()
            if takes and not self._direct:
                for call in program.take[turn][piece]:
                    call()
            turn = following
        if aside and takes:
            for region, start, stop in spans:
                self.own[region][start:stop].copy_(self._results(True)[region][start:stop])

    def _factor(self, scales: Sequence[float]) -> float:
        """What contributions can be posted with instead of scaling their sum: the same, but for subnormal numbers."""
        exact = all(scale == scales[0] for scale in scales) and math.frexp(scales[0])[0] == 0.5
        return scales[0] if exact and all(dtype in _LIKE_FLOAT32 for dtype, _ in self._layout) else 1.0

    def _results(self, aside: bool) -> list[torch.Tensor]:
        if not aside:
            return self.own
        if self._spare is None:
            self._spare = _private(self._layout)[1]
        return self._spare

    def _program(self, spans: tuple[Span, ...], scales: tuple[float, ...], aside: bool) -> _Program:
        found = self._programs.get((spans, scales, aside))
        if found is None:
            if len(self._programs) > 50:
                self._programs.clear()
            add, take = [], []
            factor = self._factor(scales)
            rest = tuple(scale / factor for scale in scales)
            for turn in (0, 1):
                both = [
                    self._calls(turn, piece, spans, rest if number else scales, aside)
                    for number, piece in enumerate(self.pieces)
                ]
                add.append([calls for calls, _ in both])
                take.append([calls for _, calls in both])
            found = self._programs[(spans, scales, aside)] = _Program(add, take, factor)
        return found

    def _calls(
        self, turn: int, piece: Sequence[Part], spans: Sequence[Span], scales: Sequence[float], aside: bool
    ) -> tuple[Calls, Calls]:
        add: Calls = []
        take: Calls = []
        given = [scale for scale in scales if scale]
        results = self._results(aside)
        for part in piece:
            slots = [self.slot(turn, part, rank) for rank, scale in enumerate(scales) if scale]
            for region, start, stop in spans:
                low, high = max(start, part.start), min(stop, part.stop)
                if region != part.region or low >= high:
                    continue
                own = results[region][low:high]
                low, high = low - part.start, high - part.start
                if self._direct:
                    add += summation([slot[low:high] for slot in slots], given, own)
                    continue
                common = self.slot(turn, part, self._size)
                take.append(_copying(common[low:high], own))
                length = high - low
                low, high = low + length * self._rank // self._size, low + length * (self._rank + 1) // self._size
                add += summation([slot[low:high] for slot in slots], given, common[low:high])
        return add, take


def _copying(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source)


def pieces_of(layout: Layout, cut: Cut) -> list[list[Part]]:
    """The pieces that regions are cut into. Pure."""
    room = limit = max(cut.whole if _total(layout) <= cut.whole else cut.piece, _ALIGN)
    pieces: list[list[Part]] = [[]]
    for region, (dtype, count) in enumerate(layout):
        start = 0
        while start < count:
            if room < _ALIGN:
                pieces.append([])
                room = limit
            taken = min(count - start, room // _ALIGN * _ALIGN // dtype.itemsize)
            pieces[-1].append(Part(region, start, start + taken, limit - room))
            start += taken
            room -= _aligned(taken * dtype.itemsize)
    return pieces


def _slot_bytes(pieces: Sequence[Sequence[Part]], layout: Layout) -> int:
    ends = [part.offset + (part.stop - part.start) * layout[part.region][0].itemsize for p in pieces for part in p]
    return _aligned(max(ends, default=0))


def _private(layout: Layout) -> tuple[mmap.mmap, list[torch.Tensor], list[int]]:
    """Memory of this process's own for a layout, its regions, and their offsets. Only touched pages become real."""
    memory = mmap.mmap(-1, max(_total(layout), 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    regions, offsets = [], []
    at = 0
    for dtype, count in layout:
        regions.append(torch.frombuffer(memory, dtype=dtype, count=count, offset=at))
        offsets.append(at)
        at += _aligned(count * dtype.itemsize)
    return memory, regions, offsets


def _total(layout: Layout) -> int:
    return sum(_aligned(count * dtype.itemsize) for dtype, count in layout)


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
