"""Collectives whose data is on the wire of another backend, which says nothing until its own timeout.

The thread that made the call is inside that backend then. So the watchdog's thread looks about once a second
whether a group has been there for long, and has it reported as any other wait. Who is late cannot be told from the
links: each rank has sent its tickets and waits for all others, and only one that does not answer is named.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from phalanx.errors import CollectiveTimeoutError
from phalanx.group.slow import LongWait
from phalanx.status.answer import Doing
from phalanx.transport.backend import Backend

LOOK_SECONDS = 1.0


def is_out(group: Any) -> bool:
    """Whether a group's ranks have agreed and its data may be on the wire. The lock has to be taken, too."""
    return isinstance(group.transport, Backend) and group.sequence > 0 and group.since <= group.until


def doing(group: Any, call: str, now: float) -> Doing:
    """The wait of this rank for data, for the answers to other ranks."""
    return Doing(_told(group, call), now - group.until, True, tuple(_others(group)), group.key, group.sequence)


class Looks:
    """What one rank's watchdog has seen when it last looked."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()
        self._reporting: threading.Thread | None = None

    def look(self, taken: Iterable[Any], slow_after: float) -> None:
        """Report the first group of `taken`, those whose lock is held, whose data has been out for long.

        In a thread of its own, since it asks the others, whose watchdogs may ask this one at the same moment.
        """
        now = time.perf_counter()
        groups = [group for group in taken if is_out(group) and now - group.until >= slow_after]
        before, self._seen = self._seen, {(group.key, group.sequence) for group in groups}
        # Seen once it may only just begin, and have ended its last round long ago.
        long = [group for group in groups if (group.key, group.sequence) in before]
        if long and (self._reporting is None or not self._reporting.is_alive()):
            self._reporting = threading.Thread(
                target=_wait_of(long[0]).look, name="phalanx watchdog report", daemon=True
            )  # fmt: skip
            self._reporting.start()


def give_up(group: Any) -> None:
    """Raise CollectiveTimeoutError, with who is late, if data has been on the wire for the group's timeout."""
    if is_out(group) and time.perf_counter() - group.until >= group.timeout:
        late, report = _wait_of(group).late()
        missing = [group.members.index(rank) for rank in late if rank in group.members]
        raise CollectiveTimeoutError(_told(group, str(group)), missing, group.rank, group.timeout, report=report)


def _wait_of(group: Any) -> LongWait:
    known = group.long
    if known is None or (known.step, known.since) != (group.sequence, group.until):
        awaited = partial(_awaited, weakref.ref(group), group.sequence, group.until)
        call = _told(group, group.described())
        known = group.long = LongWait(group.board, call, group.key, group.sequence, group.until, awaited)
    return known  # type: ignore[no-any-return]


def _awaited(reference: weakref.ref[Any], step: int, until: float) -> list[int]:
    group = reference()
    return _others(group) if group is not None and (group.sequence, group.until) == (step, until) else []


def _others(group: Any) -> list[int]:
    return [member for member in group.members if member != group.board.rank]


def _told(group: Any, call: str) -> str:
    return f"{call}, with its data on the way over {group.transport.name}"
