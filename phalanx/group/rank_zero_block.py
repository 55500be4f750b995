"""A mark on the thread that is running code which only rank 0 runs.

A collective in such code would wait for ranks that never come. `phalanx.train.rank_zero` sets the
mark, and the process group reads it at every collective. It lives here so that the group need not
know who sets it. The mark belongs to one thread: other threads of rank 0 go on as they please.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Mark(threading.local):
    name: str | None = None


_mark = _Mark()


def current() -> str | None:
    """Name the rank-0-only block that this thread is in; None outside of any."""
    return _mark.name


@contextmanager
def entered(name: str) -> Iterator[None]:
    """Mark this thread as being in the rank-0-only block called `name` (the innermost name counts)."""
    outer, _mark.name = _mark.name, name
    try:
        yield
    finally:
        _mark.name = outer
