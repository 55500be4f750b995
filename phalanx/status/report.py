"""The report on what all ranks of a world are doing: who waits, who is late, since when, and why. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.errors import name_ranks
from phalanx.status.answer import Condition, Frame, Status
from phalanx.status.causes import usual_causes

_ROWS, _STACKS = 40, 3
_WAITS_AT_LEAST = 1.0  # seconds; below that, asked from outside, nobody is late


@dataclass(frozen=True)
class Report:
    """What the ranks of a world were doing at one moment (`at`, seconds since the epoch).

    `waiter` is the rank whose wait it is about; by default the one that waits longest.
    """

    statuses: Sequence[Status]
    waiter: int | None = None
    at: float = field(default_factory=time.time)

    @property
    def waiting(self) -> Status | None:
        """The rank whose wait it is about; None if nobody waits."""
        waiting = [each for each in self.statuses if each.waiting is not None]
        chosen = [each for each in waiting if each.rank == self.waiter]
        return next(iter(chosen or sorted(waiting, key=_longest)), None)

    @property
    def late(self) -> list[Status]:
        """Those for whom the others wait: of the ranks awaited, the ones that do not wait themselves.

        If all of them wait for each other, all of them.
        """
        by_rank = {each.rank: each for each in self.statuses}
        seen: set[int] = set()
        todo = [] if self.waiting is None else list(_awaited_by(self.waiting))
        while todo:
            rank = todo.pop()
            if rank in by_rank and rank not in seen:
                seen.add(rank)
                todo += _awaited_by(by_rank[rank])
        chain = [by_rank[rank] for rank in sorted(seen)]
        return [each for each in chain if not _awaited_by(each)] or chain

    @property
    def deadlocked(self) -> list[Status]:
        """The ranks that wait for each other, if those that are late do."""
        return [each for each in self.late if _awaited_by(each)]

    def headline(self) -> str:
        """Who is late, for whom and since when, in one sentence."""
        waiting, late = self.waiting, self.late
        if waiting is None or waiting.waiting is None or (self.waiter is None and _longest(waiting) > -_WAITS_AT_LEAST):
            odd = [each.rank for each in self.statuses if each.condition is not Condition.ANSWERS]
            return f"{name_ranks(odd)} did not answer" if odd else "no rank waits for another"
        wait = waiting.waiting
        since = time.strftime("%H:%M:%S", time.localtime(self.at - wait.seconds))
        told = f"rank {waiting.rank} has waited {wait.seconds:.1f} s (since {since}) in {wait.call}"
        if not late:
            return told
        if self.deadlocked:
            return f"{name_ranks([each.rank for each in late])} wait for each other: {told}"
        verb = "is" if len(late) == 1 else "are"
        return f"{name_ranks([each.rank for each in late])} {verb} late: {told}"

    def text(self, all_stacks: bool = False) -> str:
        """The report for people: headline, a table of all ranks, the stacks of late ranks, usual causes."""
        lines = [f"phalanx: {self.headline()}", *_table(self.statuses)]
        shown = [each for each in (self.statuses if all_stacks else self.late[:_STACKS]) if each.stack]
        for status in shown:
            lines.append(
                f"Stack of rank {status.rank}, pid {status.pid} on {status.host} "
                "(most recent call last, > marks your own lines):"
            )
            lines += [line for frame in status.shown_stack() for line in _lines_of(frame)]
        causes = usual_causes(self.statuses, self.waiting, self.late)
        lines += [f"{'Usual cause' if len(causes) == 1 else 'One of the usual causes'}: {cause}" for cause in causes]
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "headline": self.headline(),
            "waiting": None if self.waiting is None else self.waiting.rank,
            "late": [each.rank for each in self.late],
            "causes": usual_causes(self.statuses, self.waiting, self.late),
            "ranks": [each.json() for each in self.statuses],
        }


def _awaited_by(status: Status) -> tuple[int, ...]:
    return status.waiting.awaits if status.waiting is not None else ()


def _longest(status: Status) -> float:
    return -status.waiting.seconds if status.waiting is not None else 0.0


def _table(statuses: Iterable[Status]) -> list[str]:
    """One row for all ranks that do the same, with the range of their times."""
    together: dict[tuple[str, str], list[tuple[Status, float | None]]] = {}
    for status in sorted(statuses, key=lambda each: each.rank):
        before, seconds, after = _sentence(status)
        together.setdefault((before, after), []).append((status, seconds))
    rows = []
    for (before, after), members in together.items():
        times = _range([seconds for _, seconds in members if seconds is not None], "{:.1f}", " s")
        cpu = _range([100 * each.cpu for each, _ in members if each.cpu is not None], "{:.0f}", " %")
        told = " ".join(part for part in (before, f"for {times}" if times else "") if part)
        rows.append((name_ranks([each.rank for each, _ in members]), told + after + (f"; CPU {cpu}" if cpu else "")))
    width = max((len(names) for names, _ in rows[:_ROWS]), default=0)
    lines = [f"  {names:{width}}  {told}" for names, told in rows[:_ROWS]]
    return lines + ([f"  and {len(rows) - _ROWS} more rows"] if len(rows) > _ROWS else [])


def _sentence(status: Status) -> tuple[str, float | None, str]:
    """What a rank is doing, cut where the time belongs."""
    process = f" (pid {status.pid} on {status.host})"
    if status.condition is not Condition.ANSWERS:
        return status.detail + process, None, ""
    if (wait := status.waiting) is not None:
        awaited = f" for {name_ranks(wait.awaits)}" if wait.awaits else ""
        return f"waiting{awaited} in {wait.call}", wait.seconds, ""
    place = f"; at {status.place}" if status.place else ""
    if status.doing:
        return f"in {status.doing[0].call}", status.doing[0].seconds, place + process
    if status.idle is None:
        return "in no collective yet", None, place + process
    return "in no collective", status.idle, f", the last was {status.last}{place}{process}"


def _range(values: Sequence[float], form: str, unit: str) -> str:
    if not values:
        return ""
    low, high = form.format(min(values)), form.format(max(values))
    return (low if low == high else f"{low} to {high}") + unit


def _lines_of(frame: Frame) -> list[str]:
    mark = ">" if frame.users else " "
    lines = [f'  {mark} File "{frame.file}", line {frame.line}, in {frame.function}']
    return lines + ([f"        {frame.text}"] if frame.text else [])
