"""Ranks of one host share memory: one memfd per group, mapped by all, gone when the last rank is.

The arena of a group holds two slots per rank and one result area. A collective posts into the rank's own
slot, passes a fence, and reads the peers' slots. Why no fence is needed after reading:

- slots alternate with the number of the coming fence. What is posted before fence k is read before fence
  k+1, so a rank that posts before fence k+2 into the same slot has no readers left. The number is the
  group's: a count of our own would differ between ranks after a collective that raised on some of them.
- the result area of piece k is written after the fence of piece k, so every peer had copied the result
  of piece k-1 out.

Tensors larger than a slot go through in pieces. Adding with more than two ranks is done in two rounds (each
rank adds its own segment, then all copy the whole result): below three, one round moves fewer bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap

import torch

from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import COMMUTATIVE, Reduction, combine, is_narrow, segment

SLOT_BYTES = 1 << 20
_ALIGN = 64
_ONE_ROUND_BYTES = 64 << 10  # up to here every rank adds everything itself: one fence instead of two


def arena_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """How much shared memory a group of `size` ranks asks for. Only touched pages become real."""
    return (2 * size + 1) * slot_bytes


class SharedMemory:
    """The transport between ranks that map the same arena."""

    name = "shared memory"

    def __init__(self, rank: int, size: int, arena: mmap, slot_bytes: int = SLOT_BYTES) -> None:
        self._rank, self._size, self._slot_bytes = rank, size, slot_bytes
        self._arena = arena
        self._cache: dict[tuple[torch.dtype, int], tuple[list[list[torch.Tensor]], torch.Tensor]] = {}

    def _views(self, dtype: torch.dtype, count: int, fence: Fence) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The slots of all ranks for what is read after `fence`, and the result area, as `count` elements."""
        key = (dtype, count)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) > 200:
                self._cache.clear()
            with torch.inference_mode(False):  # kept views must be good for every later call
                at = [
                    torch.frombuffer(self._arena, dtype=dtype, count=count, offset=place * self._slot_bytes)
                    for place in range(2 * self._size + 1)
                ]
            found = self._cache[key] = ([at[: self._size], at[self._size : -1]], at[-1])
        return found[0][fence.step & 1], found[1]

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int, fence: Fence) -> None:
        """See Transport.reduce."""
        flat = tensor.view(-1)
        total, step = flat.numel(), self._slot_bytes // flat.element_size()
        if not total:
            fence()
        wanted = root in (-1, self._rank)
        for start in range(0, total, step):
            piece = flat if total <= step else flat[start : start + step]
            slots, result = self._views(flat.dtype, piece.numel(), fence)
            slots[self._rank].copy_(piece)
            fence()
            if self._size == 2 and reduction in COMMUTATIVE and wanted and not is_narrow(piece.dtype):
                combine([piece, slots[1 - self._rank]], piece, reduction)
            elif self._size <= 2 or piece.numel() * piece.element_size() <= _ONE_ROUND_BYTES:
                if wanted:
                    combine(slots, piece, reduction)
            else:
                low, high = segment(piece.numel(), self._rank, self._size)
                combine([slot[low:high] for slot in slots], result[low:high], reduction)
                fence()
                if wanted:
                    piece.copy_(result)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction, fence: Fence
    ) -> None:
        """See Transport.reduce_scatter."""
        flat, parts = output.view(-1), [part.view(-1) for part in inputs]
        room = self._room()
        step = room // flat.element_size()
        if not flat.numel():
            fence()
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            count = piece.numel()
            slots, _ = self._views(flat.dtype, count * self._size, fence)
            mine = slots[self._rank]
            for peer, part in enumerate(parts):
                mine[peer * count : (peer + 1) * count].copy_(part[start : start + step])
            fence()
            low, high = self._rank * count, (self._rank + 1) * count
            combine([slot[low:high] for slot in slots], piece, reduction)

    def _room(self) -> int:
        """Bytes of a slot for each of the ranks that its owner writes to."""
        return self._slot_bytes // self._size // _ALIGN * _ALIGN

    def share(self, mine: torch.Tensor | None, outputs: Sequence[torch.Tensor | None], size: int, fence: Fence) -> None:
        """See Transport.share."""
        given = None if mine is None else _bytes(mine)
        wanted = [(peer, _bytes(out)) for peer, out in enumerate(outputs) if out is not None]
        if not size:
            fence()
        for start in range(0, size, self._slot_bytes):
            stop = min(start + self._slot_bytes, size)
            slots, _ = self._views(torch.uint8, stop - start, fence)
            if given is not None:
                slots[self._rank].copy_(given[start:stop])
            fence()
            for peer, out in wanted:
                out[start:stop].copy_(slots[peer])

    def route(
        self, parts: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor | None], largest: int, fence: Fence
    ) -> None:
        """See Transport.route."""
        room = self._room()
        given = [(peer, _bytes(part)) for peer, part in enumerate(parts) if part is not None]
        wanted = [(peer, _bytes(out)) for peer, out in enumerate(outputs) if out is not None]
        if not largest:
            fence()
        for start in range(0, largest, room):
            slots, _ = self._views(torch.uint8, room * self._size, fence)
            for peer, part in given:
                piece = part[start : start + room]
                slots[self._rank][peer * room : peer * room + piece.numel()].copy_(piece)
            fence()
            place = self._rank * room
            for peer, out in wanted:
                piece = out[start : start + room]
                piece.copy_(slots[peer][place : place + piece.numel()])

    def close(self) -> None:
        """See Transport.close. The mapping itself lives as long as a tensor in it."""
        self._cache.clear()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
