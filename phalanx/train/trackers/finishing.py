"""Finish what is open, however the process ends: normally, by an exception, by SIGTERM, by `phalanx.shutdown`.

SIGTERM is taken over only where nobody else handles it, and only from the main thread, which is what Python
allows. The handler finishes what is open and lets the signal end the process, as it would have. It runs
between two steps of the main thread, so it may interrupt the very code that it needs (a half-written line, a
lock of a library); whoever is in such code says so by `uninterrupted`, and is finished right after it.

A forked child (a DataLoader worker, say) inherits all hooks and finishes nothing. What ends a process without
its Python (SIGKILL, os._exit) passes all this by.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from phalanx.group import world
from phalanx.train.trackers.writer import Ending


class Exits:
    """The open things of this process that must be finished when it ends."""

    def __init__(self) -> None:
        self._open: dict[Finishable, int] = {}  # and the process that each belongs to
        self._hooked_in: int | None = None
        self._ending = Ending.FINISHED  # unless something else comes to light
        self._killed = False
        self._previous_hook: Callable[..., Any] = sys.excepthook

    def add(self, thing: Finishable) -> None:
        """Finish `thing` when the process ends."""
        if self._hooked_in != os.getpid():
            self._hooked_in = os.getpid()
            self._hook_in()
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._on_sigterm)
        self._open[thing] = os.getpid()

    def remove(self, thing: Finishable) -> None:
        """`thing` is finished."""
        self._open.pop(thing, None)
        if not self._mine() and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._on_sigterm and not self._killed:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def finish_all(self) -> None:
        """Finish what this process has open; the first error is raised when all are."""
        self._finish(self._mine())

    def finish_those_of_this_world(self) -> None:
        """Finish what was opened in the world that is about to be closed, or in none."""
        here = dist.group.WORLD if dist.is_initialized() else None
        self._finish([thing for thing in self._mine() if thing.group is None or thing.group is here])

    def go_on(self) -> None:
        """Leave a section that must not be interrupted: be killed now if SIGTERM has come in it."""
        if self._killed:
            os.kill(os.getpid(), signal.SIGTERM)

    def _mine(self) -> list[Finishable]:
        return [thing for thing, owner in list(self._open.items()) if owner == os.getpid()]

    def _finish(self, things: list[Finishable]) -> None:
        errors = []
        for thing in things:
            try:
                thing.finish(self._ending.value)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _hook_in(self) -> None:
        if sys.excepthook != self._on_uncaught:  # which a forked child has from its parent
            self._previous_hook, sys.excepthook = sys.excepthook, self._on_uncaught
        atexit.register(self.finish_all)
        # Processes of multiprocessing may end without running what is registered at exit.
        util.Finalize(None, self.finish_all, exitpriority=1)
        world.before_shutdown(self.finish_those_of_this_world)

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if not issubclass(kind, SystemExit):
            self._ending = Ending.KILLED if issubclass(kind, KeyboardInterrupt) else Ending.FAILED
        self._previous_hook(kind, error, where)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self._ending = Ending.KILLED
        mine = self._mine()
        if any(thing.is_busy for thing in mine):
            self._killed = True
            return
        try:
            self._finish(mine)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


class Finishable:
    """Something with an end: a tracker."""

    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        self._busy = threading.Lock()

    def finish(self, ending: str) -> None:
        """Finish; once it is finished, do nothing."""
        raise NotImplementedError

    @property
    def is_busy(self) -> bool:
        """Whether some thread is in code that `finish` must not interrupt."""
        return self._busy.locked()

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Be in code that `finish` must not interrupt, one thread at a time."""
        try:
            with self._busy:
                yield
        finally:
            exits.go_on()


exits = Exits()
