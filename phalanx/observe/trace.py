"""`phalanx.trace`: what every rank was doing and when, as one file that Perfetto opens.

    begin    the ranks compare their clocks; then hooks (group/tracing.py, model_events.py) feed a Recorder
    end      every rank lays its part into the store that the world met in; rank 0 puts them together
    failure  a rank that raises, or finds rank 0 gone, writes its part next to the file instead

The parts travel through the store and not through a collective: ranks may end at different times, one
of them by an exception, and a trace must not be what a healthy rank then waits for.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from phalanx.errors import MisuseError, PeerLostError
from phalanx.group import departures, profiling, tracing, world
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.observe.model_events import ModelEvents
from phalanx.observe.recorder import Recorder, now
from phalanx.observe.timeline import Part, chrome, clock_ahead

_CLOCK_ROUNDS = 8
_PIECE_BYTES = 1 << 20  # what the store takes at once
_PARTS_WITHIN = 60.0  # how long rank 0 waits at the end of a `with`, or in stop(), for parts of other ranks
_PARTS_WITHIN_AT_EXIT = 10.0
_LOOK_EVERY = 0.02
_FAILED = b"failed"
_log = logging.getLogger("phalanx")
_traces = count()


def trace(path: str | os.PathLike[str] = "trace.json", *, limit: int = 500_000) -> Trace:
    """Record from now on what all ranks do, into a Chrome trace for Perfetto. Collective: every rank.

    Recorded are collectives (each with the time spent waiting for other ranks and moving data), every
    exchange of tickets, forward and backward of wrapped models, the buckets of each synchronisation,
    optimizer steps, and what the program marks itself. Use as a context:

        with phalanx.trace("run.json") as trace:
            with trace.span("load a batch"):
                ...
            trace.mark("learning rate lowered", to=0.01)

    or call `stop()`; at the latest the trace ends with the program. Rank 0 then writes `path`. If a rank
    fails, it and those that find out write `path` with `.rank-R` before its suffix, each its own part. At
    most `limit` events are kept on each rank; the file says how many were dropped. Without a trace nothing
    is recorded and nothing costs time.

    Raises MisuseError if there is a trace already, if the world has not been joined, or if the folder of
    `path` does not exist.
    """
    if tracing.recorder is not None:
        raise MisuseError("phalanx.trace: a trace is on already", "stop() that one first")
    if not dist.is_initialized() and world.world_size() > 1:
        raise MisuseError("phalanx.trace before phalanx.init()", "phalanx.init(); phalanx.trace(...)", world.rank())
    if limit < 1:
        raise MisuseError(f"phalanx.trace: limit={limit} keeps no event", "limit=500_000")
    return Trace(os.path.abspath(os.fspath(path)), limit)


class Trace:
    """A trace that is on. `path` is where rank 0 writes it."""

    def __init__(self, path: str, limit: int) -> None:
        self.path, self.rank, self.size = path, world.rank(), world.world_size()
        self._store: Any = None
        if self.size > 1:
            self._store = dist.PrefixStore(f"phalanx-trace-{next(_traces)}", distributed_c10d._get_default_store())
        self._label = f"{socket.gethostname()}, pid {os.getpid()}"
        self._clock, self._zero = self._compare_clocks()
        self._recorder = Recorder(limit)
        self._models = ModelEvents(self._recorder)
        self._stopped, self._owner = False, os.getpid()
        self._hook: Callable[..., object] = sys.excepthook
        self._models.begin()
        profiling.listen(self._recorder)
        sys.excepthook = self._uncaught
        atexit.register(self._at_exit)

    # -- what programs call --------------------------------------------------------------------------

    def mark(self, name: str, **details: Any) -> None:
        """Put an instant on this rank's row. `details` are shown with it."""
        if not self._stopped:
            self._recorder.add(name, "mark", now(), None, **details)

    def span(self, name: str, **details: Any) -> AbstractContextManager[None]:
        """Put what the body of a `with` takes on this rank's row. Spans may be nested."""
        return contextlib.nullcontext() if self._stopped else self._recorder.span(name, "mark", details)

    def stop(self) -> None:
        """End the trace and write it. Every rank, though not at the same time; harmless when repeated.

        Rank 0 waits for the others' parts, at most a minute, and writes what it has.
        """
        self._stop(_PARTS_WITHIN)

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.stop()
        elif not issubclass(kind, SystemExit):  # which is for the end of the program to deal with
            self._give_up()

    # -- the beginning -------------------------------------------------------------------------------

    def _compare_clocks(self) -> tuple[tuple[float, float], float]:
        """By how much this clock is ahead of rank 0's and how sure that is; and rank 0's time now."""
        folder = os.path.dirname(self.path)
        missing = "" if self.rank or os.path.isdir(folder) else f"there is no folder {folder}"
        rounds = []
        for _ in range(_CLOCK_ROUNDS):
            sent = now()
            self._exchange(None)
            rounds.append((sent, now()))
        said = self._exchange([rounds, missing, now()])
        if said[0][1]:
            raise MisuseError(f"phalanx.trace({self.path!r}): {said[0][1]}", "make the folder first", self.rank)
        return clock_ahead(rounds, said[0][0]) if self.rank else (0.0, 0.0), said[0][2]

    def _exchange(self, value: Any) -> list[Any]:
        """Give a value to all ranks and return everybody's."""
        if self.size == 1:
            return [value]
        group = dist.group.WORLD
        if isinstance(group, PhalanxProcessGroup):
            return [json.loads(each) for each in group.exchange(json.dumps(value).encode(), "phalanx.trace()")]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    # -- the end -------------------------------------------------------------------------------------

    def _stop(self, patience: float) -> None:
        if not self._end_recording():
            return
        part = self._part()
        if self.size == 1:
            self._write([part])
        elif self.rank:
            self._hand_over(part)
        else:
            self._write([part, *self._parts_of_others(patience)])

    def _give_up(self) -> None:
        """This rank is failing: keep what it has, and tell rank 0 not to wait for it."""
        if not self._end_recording():
            return
        if self.size == 1:
            self._write([self._part()])
            return
        self._write_alone(self._part())
        if self._store is not None and self.rank:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"size/{self.rank}", _FAILED)

    def _end_recording(self) -> bool:
        """Remove all hooks; False if that has been done, or in a process forked from the rank."""
        if self._stopped or os.getpid() != self._owner:
            return False
        self._stopped = True
        profiling.listen(None)
        self._models.end()
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook
        return True

    def _uncaught(self, kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
        self._hook(kind, error, at)  # first, because the other ranks wait for the word
        self._give_up()

    def _at_exit(self) -> None:
        if os.getpid() == self._owner:
            world.shutdown()  # a rank that still waits for this one must hear that it leaves, before this one waits
            self._stop(_PARTS_WITHIN_AT_EXIT)

    def _part(self) -> Part:
        return self._recorder.part(self.rank, self._label, self._clock)

    def _hand_over(self, part: Part) -> None:
        data = zlib.compress(json.dumps(part.json()).encode())
        pieces = math.ceil(len(data) / _PIECE_BYTES)
        try:
            for piece in range(pieces):
                start = piece * _PIECE_BYTES
                self._store.set(f"part/{self.rank}/{piece}", data[start : start + _PIECE_BYTES])
            self._store.set(f"size/{self.rank}", str(pieces))
        except RuntimeError:  # the store is gone, and with it rank 0
            self._write_alone(part)

    def _parts_of_others(self, patience: float) -> list[Part]:
        deadline = time.monotonic() + patience
        parts, waiting = [], set(range(1, self.size))
        while waiting and time.monotonic() < deadline:
            for rank in sorted(waiting):
                if self._store.check([f"size/{rank}"]):
                    waiting.discard(rank)
                    parts += self._taken(rank)
                elif self._has_ended(rank) and not self._store.check([f"size/{rank}"]):
                    waiting.discard(rank)
                    _log.warning("the trace %s is without rank %d, whose process has ended", self.path, rank)
            time.sleep(_LOOK_EVERY if waiting else 0.0)
        for rank in sorted(waiting):
            _log.warning("the trace %s is without rank %d, which has not ended its own", self.path, rank)
        return parts

    def _taken(self, rank: int) -> list[Part]:
        size = self._store.get(f"size/{rank}")
        if size == _FAILED:
            return []
        data = b"".join(self._store.get(f"part/{rank}/{piece}") for piece in range(int(size)))
        for piece in range(int(size)):
            self._store.delete_key(f"part/{rank}/{piece}")
        return [Part.from_json(json.loads(zlib.decompress(data)))]

    def _has_ended(self, rank: int) -> bool:
        try:
            departures.check(rank, self.rank, self.size, "phalanx.trace")
        except PeerLostError:
            return True
        return False

    def _write(self, parts: list[Part]) -> None:
        _put(self.path, chrome(parts, self._zero, {"world_size": self.size}))

    def _write_alone(self, part: Part) -> None:
        stem, suffix = os.path.splitext(self.path)
        path = f"{stem}.rank-{self.rank}{suffix}"
        os.makedirs(os.path.dirname(path), exist_ok=True)  # on another host than rank 0's it may be missing
        _put(path, chrome([part], self._zero, {"world_size": self.size}))
        _log.warning("rank %d has written its part of the trace to %s", self.rank, path)


def _put(path: str, document: dict[str, Any]) -> None:
    """Write a file that is there whole or not at all."""
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(document, file, separators=(",", ":"), allow_nan=False)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise
