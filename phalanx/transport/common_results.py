"""Results that the ranks of one host write together, each a part of them, and that every rank reads as its own.

Each rank maps them copy on write: nobody else sees what it writes to its gradients (clipping, say). The page that it
writes to is copied for that, which takes longer than to copy a result, and from then on no longer shows what the
ranks write together. So the ranks share results only while nobody does that; shows_all() tells.
"""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path

import torch

from phalanx.transport.arena import Arena

_ENTRY = 8  # bytes of an entry about one page
_OF_A_FILE, _SWAPPED_OR_PRESENT = 1 << 61, 3 << 62


class CommonResults:
    """The `size` bytes of an arena from `start`, a multiple of the page size; `memory` is this rank's mapping."""

    _pages = Path("/proc/self/pagemap")

    def __init__(self, arena: Arena, start: int, size: int) -> None:
        self._arena, self._start, self._size = arena, start, size
        self._map()

    def _map(self) -> None:
        self.memory = self._arena.copy_on_write(self._start, self._size)
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._faults = -1

    def keep(self) -> None:
        """Let this mapping keep the values that it shows, whatever the ranks write from now on."""
        self._bytes[:: mmap.PAGESIZE].bitwise_or_(0)  # writes what is there

    def renew(self) -> None:
        """Map them anew, and let the mapping before keep its values."""
        self.keep()
        self._map()

    def discard(self) -> None:
        """Let this mapping show all results again, in place of what has been written to it."""
        self.memory.madvise(mmap.MADV_DONTNEED)

    def shows_all(self) -> bool:
        """Whether the whole mapping shows what the ranks have written together: nothing was written to it here."""
        faults = resource.getrusage(resource.RUSAGE_SELF)
        seen = faults.ru_minflt + faults.ru_majflt
        if seen != self._faults:  # without a page fault no page has been copied
            if self._has_copies():
                return False
            self._faults = seen
        return True

    def _has_copies(self) -> bool:
        count = -(-self._size // mmap.PAGESIZE)
        try:
            with self._pages.open("rb", buffering=0) as file:
                found = os.pread(file.fileno(), count * _ENTRY, self._bytes.data_ptr() // mmap.PAGESIZE * _ENTRY)
        except OSError:
            return True
        if len(found) < count * _ENTRY:
            return True
        entries = torch.frombuffer(bytearray(found), dtype=torch.int64)
        there = entries & (_SWAPPED_OR_PRESENT - (1 << 64)) != 0
        return bool((there & (entries & _OF_A_FILE == 0)).any())
