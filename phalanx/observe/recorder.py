"""Takes down what one rank does while a trace is on: appends to a list, and does no more than it must.

What costs time, such as describing a ticket in words, is done when the trace is written.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from phalanx.group import call_site, dtypes, profiling, ticket
from phalanx.group.link import TICKET
from phalanx.group.ticket import Operation
from phalanx.observe.timeline import Event, Part
from phalanx.transport.reductions import Reduction

_REDUCTIONS = {int(reduction): reduction.name for reduction in Reduction}
_WIRE = "wire"  # in details: an encoded ticket, described when the trace is written
_LATE_FROM = 20e-6  # a shorter wait is the exchange itself, and names nobody
now = time.perf_counter


class Recorder:
    """The events of this rank, at most `limit` of them. Threads may record at the same time."""

    def __init__(self, limit: int) -> None:
        self.limit, self.dropped = limit, 0
        self.events: list[Event] = []
        self.threads = {threading.main_thread().ident or 0: "main"}
        self.waits: defaultdict[int, float] = defaultdict(float)  # seconds so far, by thread

    def add(self, name: str, category: str, began: float, ended: float | None, **details: Any) -> None:
        """Take down one event of the calling thread."""
        if len(self.events) >= self.limit:
            self.dropped += 1
            return
        thread = threading.get_ident()
        if thread not in self.threads:
            self.threads[thread] = threading.current_thread().name
        self.events.append(Event(name, category, began, ended, thread, details))

    def traced(self, fence: Any, wire: bytes) -> TracedCollective:
        """See tracing.Recorder."""
        return TracedCollective(self, fence, wire)

    def waited(self, core: Any, wire: bytes, kind: int, began: float, ended: float) -> None:
        """See tracing.Recorder."""
        if core.size == 1:
            return
        self.waits[threading.get_ident()] += ended - began
        details: dict[str, Any] = {"exchange": core.sequence, "group": core.name}
        if ended - began > _LATE_FROM:
            details["last seen waiting for rank"] = core.members[core.awaiting]
        what = "tickets" if kind == TICKET else "commit"
        self.add(f"wait for {what}", "wait", began, ended, **details, **{_WIRE: wire[: ticket.HEAD_BYTES]})

    @contextmanager
    def call(self, name: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """See tracing.Recorder."""
        shapes = [[str(tensor.dtype).removeprefix("torch."), *tensor.shape] for tensor in tensors]
        with self.span(name, "call", {"tensors": shapes, "at": call_site.here()}):
            yield

    @contextmanager
    def span(self, name: str, category: str, details: dict[str, Any]) -> Iterator[None]:
        """Take down how long the body takes, and what it raises."""
        began = now()
        try:
            yield
        except BaseException as error:
            details = {**details, "raised": type(error).__qualname__}
            raise
        finally:
            self.add(name, category, began, now(), **details)

    def part(self, rank: int, label: str, clock: tuple[float, float]) -> Part:
        """Everything so far, told in words and numbers that JSON has."""
        part = Part(rank, label, *clock, dropped=self.dropped, threads=dict(self.threads))
        for event in list(self.events):
            details = dict(event.details)
            wire = details.pop(_WIRE, None)
            if wire is not None:
                details["call"] = ticket.describe(wire, dtypes.NAMES, _REDUCTIONS)
            part.events.append(event._replace(details=plain(details)))
        return part


class TracedCollective:
    """A collective in progress, as group.Collective, that is taken down when it is over."""

    def __init__(self, recorder: Recorder, fence: Any, wire: bytes) -> None:
        self._recorder, self._fence, self._wire = recorder, fence, wire
        self._began = self._waits = 0.0

    @property
    def step(self) -> int:
        """As of the collective."""
        step: int = self._fence.step
        return step

    @property
    def got(self) -> list[bytes] | None:
        """As of the collective."""
        got: list[bytes] | None = self._fence.got
        return got

    def __enter__(self) -> TracedCollective:
        self._began, self._waits = now(), self._recorder.waits[threading.get_ident()]
        self._fence.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, at: Any) -> None:
        try:
            self._fence.__exit__(kind, error, at)
        finally:
            ended = now()
            waiting = self._recorder.waits[threading.get_ident()] - self._waits
            details: dict[str, Any] = {
                "waiting_us": round(waiting * 1e6, 3),
                "moving_us": round((ended - self._began - waiting) * 1e6, 3),
            }
            if kind is not None:
                details["raised"] = kind.__qualname__
            name = profiling.name_of(Operation(self._wire[0]))
            wire = {_WIRE: self._wire[: ticket.HEAD_BYTES]}
            self._recorder.add(name, "collective", self._began, ended, **details, **wire)

    def __call__(self) -> list[bytes]:
        got: list[bytes] = self._fence()
        return got

    def on_host(self) -> None:
        """As of the collective."""
        self._fence.on_host()

    def look_for_lost(self, *seconds: float) -> None:
        """As of the collective."""
        self._fence.look_for_lost(*seconds)


def plain(value: Any) -> Any:
    """A value that JSON can hold and every reader of JSON understands: no NaN, no objects."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, str)) or isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)
