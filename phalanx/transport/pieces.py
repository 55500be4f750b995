"""How the gradients that ranks exchange through shared memory are cut into pieces, and what room they take. Pure."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple

import torch

Layout = Sequence[tuple[torch.dtype, int]]
Span = tuple[int, int, int]
"""Region, start, stop."""

_ALIGN = 64


class Cut(NamedTuple):
    """Pieces have `piece` bytes.

    Up to `direct` ranks, each adds up all slots of a piece for itself; but beyond `common` bytes in all, results are
    shared. What is less than `small` bytes of a gradient is posted though it lies in a rank's own segment.
    """

    piece: int = 2 << 20
    direct: int = 3
    common: int = 128 << 10
    small: int = 16 << 10


class Part(NamedTuple):
    """Elements `start` to `stop` of a region, in the slot of a piece from byte `offset` on."""

    region: int
    start: int
    stop: int
    offset: int


def pieces_of(layout: Layout, cut: Cut) -> list[list[Part]]:
    """The pieces that regions are cut into."""
    room = limit = max(cut.piece, _ALIGN)
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
            room -= aligned(taken * dtype.itemsize)
    return pieces


def slot_bytes(pieces: Sequence[Sequence[Part]], layout: Layout) -> int:
    """How large a slot must be for any of the pieces."""
    ends = [part.offset + (part.stop - part.start) * layout[part.region][0].itemsize for p in pieces for part in p]
    return aligned(max(ends, default=0))


def before_results(size: int, pieces: Sequence[Sequence[Part]], layout: Layout) -> int:
    """How far into the arena of `size` ranks the common results begin, behind the slots."""
    return -(-2 * (size + 1) * slot_bytes(pieces, layout) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def has_common(layout: Layout, cut: Cut) -> bool:
    """Whether it is enough for results to be shared."""
    return total_bytes(layout) > cut.common


def total_bytes(layout: Layout) -> int:
    """The bytes of all regions, each aligned."""
    return sum(aligned(count * dtype.itemsize) for dtype, count in layout)


def aligned(count: int) -> int:
    """A number of bytes, rounded up so that what comes next is aligned."""
    return -(-count // _ALIGN) * _ALIGN
