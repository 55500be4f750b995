"""What a trace is made of, and how it becomes a Chrome trace. Pure: no clock, no torch, no file.

A Chrome trace is JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open: complete events ("X") with a
beginning and a duration in microseconds, instants ("i"), and metadata ("M") that names the rows. Here a process
row is a rank and a thread row one of its threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAIN = 1
"""The number of the row of a rank's main thread; other threads follow in the order of their first event."""


class Event(NamedTuple):
    """Something that happened on one rank: a span, or an instant where `ended` is None.

    Times are seconds on that rank's clock, `thread` is the thread's identifier.
    """

    name: str
    category: str
    began: float
    ended: float | None
    thread: int
    details: dict[str, Any]


@dataclass
class Part:
    """One rank's share of a trace.

    `ahead` is by how many seconds its clock is ahead of rank 0's, give or take `unsure`; `threads` names the
    threads by identifier, the main thread's first; `dropped` counts events beyond the limit.
    """

    rank: int
    label: str
    ahead: float = 0.0
    unsure: float = 0.0
    dropped: int = 0
    threads: dict[int, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Part:
        """Read back what `json` has made."""
        events = [Event(*event) for event in data.pop("events")]
        threads = {int(thread): name for thread, name in data.pop("threads").items()}
        return cls(**data, threads=threads, events=events)

    def json(self) -> dict[str, Any]:
        """The part as plain data."""
        return {**vars(self), "events": [list(event) for event in self.events]}


def chrome(parts: Iterable[Part], zero: float, about: dict[str, Any]) -> dict[str, Any]:
    """Put the parts together; `zero` is the trace's beginning on rank 0's clock, `about` goes with it as it is."""
    ordered = sorted(parts, key=lambda part: part.rank)
    rows: list[dict[str, Any]] = []
    for part in ordered:
        rows += _rows(part, zero)
    ranks = {
        str(part.rank): {
            "events": len(part.events),
            "dropped_events": part.dropped,
            "clock_ahead_us": _micro(part.ahead),
            "clock_unsure_us": _micro(part.unsure),
        }
        for part in ordered
    }
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {**about, "ranks": ranks}}


def _rows(part: Part, zero: float) -> list[dict[str, Any]]:
    numbers = {thread: number for number, thread in enumerate(part.threads, MAIN)}
    rows: list[dict[str, Any]] = [
        _named(part.rank, 0, "process_name", name=f"rank {part.rank} ({part.label})"),
        _named(part.rank, 0, "process_sort_index", sort_index=part.rank),
    ]
    for thread, number in numbers.items():
        rows.append(_named(part.rank, number, "thread_name", name=part.threads[thread]))
        rows.append(_named(part.rank, number, "thread_sort_index", sort_index=number))
    shift = part.ahead + zero
    for event in sorted(part.events, key=lambda event: (event.began, -(event.ended or event.began))):
        row: dict[str, Any] = {
            "name": event.name,
            "cat": event.category,
            "ph": "i" if event.ended is None else "X",
            "ts": _micro(event.began - shift),
            "pid": part.rank,
            "tid": numbers[event.thread],
        }
        if event.ended is None:
            row["s"] = "t"  # drawn on its thread's row
        else:
            row["dur"] = _micro(event.ended - event.began)
        if event.details:
            row["args"] = event.details
        rows.append(row)
    return rows


def _named(rank: int, thread: int, what: str, **details: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": details}


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def clock_ahead(mine: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """By how many seconds my clock is ahead of theirs, and how far off that may be.

    Both have made the same exchanges; each entry is when one was begun and when it was over, on that
    clock. What they sent had begun before it was over here, and the other way round: each exchange gives
    an upper and a lower bound, and all of them together the narrowest (Cristian 1989). Where the bounds
    allow for equal clocks they are taken as equal: ranks of one host share theirs.
    """
    most = min(over - sent for (_, over), (sent, _) in zip(mine, theirs, strict=True))
    least = max(sent - over for (sent, _), (_, over) in zip(mine, theirs, strict=True))
    if least <= 0.0 <= most:
        return 0.0, max(most, -least)
    return (most + least) / 2, abs(most - least) / 2
