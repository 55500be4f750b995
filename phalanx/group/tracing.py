"""Where a trace listens. Nobody does, as a rule, so that the hot path pays one `if` for it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class Recorder(Protocol):
    """What is told of every exchange of every group of this process, in the thread that makes it."""

    def traced(self, fence: Any, wire: bytes) -> Any:
        """Wrap the collective `fence`, whose ticket is `wire`, so that its beginning and end are known."""

    def waited(self, core: Any, wire: bytes, kind: int, began: float, ended: float) -> None:
        """One round of frames of a `kind` (see links.py) is over; times are of time.perf_counter()."""

    def call(self, name: str, tensors: Any) -> AbstractContextManager[None]:
        """Stand around one call of a process group, whose profiler event has these arguments."""


recorder: Recorder | None = None
