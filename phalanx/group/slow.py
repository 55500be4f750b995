"""Waits that take long: reported after `slow_after` seconds, again after each doubling, never an error by themselves.

One rank prints the report of a wait that several share: of those that began within a second of the longest
waiting one, the lowest. It finds out by asking: each rank's answer says since when it waits and what it has
printed. A rank that should leave it to another looks again a little later, and prints if nobody has.

Nothing here runs before a wait has become long.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from phalanx.errors import CollectiveTimeoutError, MisuseError, name_ranks
from phalanx.group import call_site
from phalanx.launch import environment
from phalanx.status.answer import Doing
from phalanx.status.report import Report

_LOOK_AGAIN = 1.0  # seconds; for short `slow_after`, half of that
_log = logging.getLogger("phalanx")
_chosen: list[float] = []  # by the program; else the environment decides


def default() -> float:
    """Seconds after which a wait is reported: the program's choice, PHALANX_SLOW_AFTER, or ten."""
    return _chosen[-1] if _chosen else environment.slow_after()


def choose(seconds: float | None, boards: Iterable[Any] = ()) -> None:
    """Report waits after `seconds` from now on (None: as the environment says), and those of `boards`."""
    if seconds is not None and not seconds > 0:
        raise MisuseError(
            f"init: slow_after={seconds!r} is not a positive time",
            "slow_after=30.0 (seconds), or float('inf') for no reports",
        )
    _chosen[:] = [] if seconds is None else [float(seconds)]
    for board in boards:
        board.slow_after = default()


class Note:
    """Something that a rank does and that the links know nothing of; for the answers to other ranks."""

    def __init__(self, call: str) -> None:
        self._call, self._since = call, time.perf_counter()

    def doing(self) -> Doing:
        """What the rank does."""
        return Doing(self._call, time.perf_counter() - self._since)


@contextmanager
def noted(board: Any, note: Note | LongWait) -> Iterator[None]:
    """Tell of `note` when other ranks ask, during the block; not at all where there is no board."""
    watch = board.watch if board is not None else None
    if watch is None:
        yield
        return
    watch.notes.append(note)
    try:
        yield
    finally:
        watch.notes.remove(note)


class LongWait:
    """One wait of this rank for others, from when it may have become long.

    `key` and `step` tell the collective, equal on all ranks; `since` is on the clock of perf_counter;
    `awaited()` gives the ranks of the world that are not here yet. Where there is no `board` (a group of another
    backend) a report says no more than who waits.
    """

    def __init__(
        self, board: Any, call: str, key: str, step: int, since: float, awaited: Callable[[], Sequence[int]]
    ) -> None:
        self.call, self.key, self.step, self.since = call, key, step, since
        self._awaited = awaited
        self.printed = 0
        self._board = weakref.ref(board) if board is not None else None
        self._slow_after = board.slow_after if board is not None else default()
        self._watch: Any = None
        self._level = 0
        self._left_to_others = False
        self.due = since + self._slow_after

    def begin(self) -> None:
        """Tell of this wait when other ranks ask, until `end`: for what no group knows of."""
        board = self._board() if self._board is not None else None
        self._watch = board.watch if board is not None else None
        if self._watch is not None:
            self._watch.notes.append(self)

    def end(self) -> None:
        """It waits no longer."""
        if self._watch is not None:
            self._watch.notes.remove(self)
            self._watch = None

    def doing(self) -> Doing:
        """The wait, for the answers to other ranks."""
        seconds = time.perf_counter() - self.since
        return Doing(self.call, seconds, True, tuple(self._awaited()), self.key, self.step, self.printed)

    def look(self) -> float:
        """Report the wait if it is time; return when to look again."""
        if time.perf_counter() < self.due:
            return self.due
        report = self._report()
        if not self._awaited():
            return self.due  # they have come while others were asked
        if report is None:
            self._print(self._plain())
        elif not self._others_have_printed(report):
            if not self._left_to_others and self._is_anothers(report):
                self._left_to_others = True
                self.due += self._look_again
                return self.due
            self._print(report.text())
        self._left_to_others = False
        self._level += 1
        self.due = self.since + self._slow_after * 2**self._level
        return self.due

    def report(self) -> str:
        """The report on what every rank is doing; empty where they cannot be asked."""
        return self.late()[1]

    def late(self) -> tuple[list[int], str]:
        """The ranks of the world that hold this wait up, all that are awaited if they cannot be asked, and report()."""
        report = self._report()
        if report is None:
            return list(self._awaited()), ""
        return [each.rank for each in report.late] or list(self._awaited()), report.text()

    @property
    def _look_again(self) -> float:
        return min(_LOOK_AGAIN, self._slow_after / 2)

    def _report(self) -> Report | None:
        board = self._board() if self._board is not None else None
        if board is None or board.watch is None:
            return None
        statuses = board.watch.ask(self)
        board.pump_all()  # nobody may have read meanwhile
        return Report(statuses, board.rank)

    def _print(self, text: str) -> None:
        self.printed = self._level + 1
        _log.warning("%s", text)

    def _plain(self) -> str:
        waited = time.perf_counter() - self.since
        return f"phalanx: this rank has waited {waited:.1f} s for {name_ranks(self._awaited())} in {self.call}"

    def _same(self, report: Report) -> dict[int, Doing]:
        """The waits of all ranks in this collective, and of those that wait for each other, if any do."""
        found = {
            status.rank: doing for status in report.statuses for doing in status.doing
            if doing.waits and doing.key == self.key and abs(doing.step - self.step) <= 1
        }  # fmt: skip
        return {each.rank: each.waiting for each in report.deadlocked if each.waiting is not None} | found

    def _others_have_printed(self, report: Report) -> bool:
        return any(doing.printed > self._level for rank, doing in self._same(report).items() if rank != report.waiter)

    def _is_anothers(self, report: Report) -> bool:
        same = self._same(report)
        longest = max((doing.seconds for doing in same.values()), default=0.0)
        near = [rank for rank, doing in same.items() if doing.seconds >= longest - self._look_again]
        return bool(near) and min(near) != report.waiter


def wait_longer(group: Any, since: float, places: Sequence[int] = ()) -> float:
    """A round of `group` waits since `since` (perf_counter): report that when due; return when to look again.

    `places` are awaited, by default those whose frames are not here. Raises CollectiveTimeoutError after the
    group's timeout. What it returns is on the clock of monotonic.
    """
    missing = list(places) or group.awaited()
    if not missing:
        return time.monotonic()  # the last frame has come this very moment
    if group.long is None or (group.long.step, group.long.since) != (group.sequence, since):
        group.long = _wait_of(group, since, places)
    limit = since + group.timeout
    if time.perf_counter() >= limit:
        report = group.long.report()
        raise CollectiveTimeoutError(str(group), missing, group.rank, group.timeout, report=report)
    left: float = min(group.long.look(), limit) - time.perf_counter()
    return time.monotonic() + max(left, 0.0)


def who_is_late(group: Any) -> tuple[list[int], str]:
    """The places that `group` waits for at this moment, for another thread than the one that waits, and a report."""
    if group.since <= group.until:
        return [], ""
    missing = group.awaited()
    return missing, (group.long or _wait_of(group, group.since)).report()


def _wait_of(group: Any, since: float, places: Sequence[int] = ()) -> LongWait:
    call = f"{group.described()} at {call_site.here()}"
    awaited = partial(_awaited, weakref.ref(group), tuple(places))
    return LongWait(group.board, call, group.key, group.sequence, since, awaited)


def _awaited(reference: weakref.ref[Any], places: Sequence[int]) -> list[int]:
    """The ranks of the world that a group waits for; the group must not be held by what it holds."""
    group = reference()
    return [] if group is None else [group.members[place] for place in places or group.awaited()]
