"""A progress bar that only rank 0 shows.

On a terminal it is a bar; elsewhere (a file, a pipe, a launcher that prefixes lines) a plain line now and
then. Other ranks get the iterable back as it is. Not collective: nothing is exchanged.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from phalanx.group import world
from phalanx.parallel import epochs

T = TypeVar("T")

_SECONDS_BETWEEN_BARS = 0.1
_SECONDS_TO_FIRST_LINE, _MOST_SECONDS_BETWEEN_LINES = 1.0, 30.0


class _Display(Protocol):
    """Shows how far an iteration has come."""

    seconds_between: float

    def show(self, done: int) -> None:
        """Show that `done` items are done."""

    def close(self, done: int) -> None:
        """Show the last state, and leave the terminal as it was."""


def progress(iterable: Iterable[T], description: str = "", total: int | None = None) -> Iterator[T]:
    """Iterate over `iterable` and show on rank 0 how far it has come, on standard error.

    `total` is taken from `len(iterable)` where it has one. Costs a fraction of a microsecond per item on
    rank 0 and nothing on the others. May be nested.
    """
    epochs.pass_begins(iterable)
    if world.rank() != 0:
        return iter(iterable)
    if total is None:
        total = _length(iterable)
    console = Console(file=sys.stderr)
    display = _Bar(console, description, total) if console.is_terminal else _Lines(description, total)
    return _shown(iterable, display)


def _shown(iterable: Iterable[T], display: _Display) -> Iterator[T]:
    done, next_time = 0, time.monotonic() + display.seconds_between
    # An exception in the loop's body leaves this generator suspended, and the bar on the screen.
    atexit.register(display.close, 0)
    try:
        for item in iterable:
            yield item
            done += 1
            if time.monotonic() >= next_time:
                display.show(done)
                next_time = time.monotonic() + display.seconds_between
    finally:
        atexit.unregister(display.close)
        display.close(done)


class _Bar:
    """A live bar on a terminal."""

    seconds_between = _SECONDS_BETWEEN_BARS

    def __init__(self, console: Console, description: str, total: int | None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn(show_speed=True),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._progress.add_task(description, total=total)
        self._progress.start()

    def show(self, done: int) -> None:
        self._progress.update(self._task, completed=done)

    def close(self, done: int) -> None:
        if done:
            self._progress.update(self._task, completed=done)
        self._progress.stop()


class _Lines:
    """Plain lines, less and less often; an iteration that is soon over gets none."""

    def __init__(self, description: str, total: int | None) -> None:
        self.seconds_between = _SECONDS_TO_FIRST_LINE
        self._description, self._total = description, total
        self._began = time.monotonic()
        self._shown = False

    def show(self, done: int) -> None:
        self._shown = True
        self.seconds_between = min(2 * self.seconds_between, _MOST_SECONDS_BETWEEN_LINES)
        seconds = time.monotonic() - self._began
        of_total = f"/{self._total} ({done / self._total:.0%})" if self._total else ""
        subject = f"{self._description}: " if self._description else ""
        line = f"{subject}{done}{of_total} in {seconds:.0f} s, {done / seconds:.3g}/s"
        print(line, file=sys.stderr, flush=True)

    def close(self, done: int) -> None:
        if self._shown and done:
            self.show(done)


def _length(iterable: Iterable[object]) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:
        return None
