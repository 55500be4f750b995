"""Memory that the ranks of one host share: a memfd without a name, gone when the last rank is."""

from __future__ import annotations

import mmap
import os
import weakref


class Arena:
    """`size` bytes behind a descriptor, which is taken over; `memory` is what all ranks read and write."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self.memory = mmap.mmap(descriptor, size)

    def copy_on_write(self, start: int, size: int) -> mmap.mmap:
        """Map `size` bytes from `start`, a multiple of the page size, for this rank alone to write to.

        A page that it has written to no longer shows what other ranks write.
        """
        return mmap.mmap(self._descriptor, size, mmap.MAP_PRIVATE, offset=start)
