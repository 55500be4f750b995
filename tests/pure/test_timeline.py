"""The pure part of a trace: clocks, rows, and what the JSON looks like."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.observe.timeline import Event, Part, chrome, clock_ahead

seconds = st.floats(1e-6, 1e-2)
exchanges = st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=1, max_size=8)


@given(ahead=st.floats(-1e3, 1e3), exchanges=exchanges)
@example(ahead=1.0, exchanges=[(0.01, 1e-6, 1e-6, 1e-6)])
def test_clocks_are_compared_as_well_as_the_bounds_say(
    ahead: float, exchanges: list[tuple[float, float, float, float]]
) -> None:
    mine, theirs, at = [], [], 100.0
    for late, theirs_late, back, there in exchanges:
        sent, theirs_sent = at + late, at + theirs_late
        over, theirs_over = max(sent, theirs_sent + back), max(theirs_sent, sent + there)
        mine.append((sent + ahead, over + ahead))
        theirs.append((theirs_sent, theirs_over))
        at = max(over, theirs_over)
    found, unsure = clock_ahead(mine, theirs)
    assert abs(found - ahead) <= unsure + 1e-9
    assert unsure <= 2 * max(map(sum, exchanges)) + 1e-9


def test_equal_clocks_are_left_alone() -> None:
    assert clock_ahead([(0.0, 0.3), (1.0, 1.1)], [(0.1, 0.3), (1.0, 1.2)])[0] == 0.0


def part(rank: int, ahead: float = 0.0) -> Part:
    events = [
        Event("inner", "wait", 2.0 + ahead, 3.0 + ahead, 77, {}),
        Event("outer", "call", 2.0 + ahead, 4.0 + ahead, 77, {"at": "train.py:3"}),
        Event("here", "mark", 2.5 + ahead, None, 88, {"step": 1}),
    ]
    return Part(rank, f"host {rank}", ahead, 0.25, 3, {77: "main", 88: "worker"}, events)


def test_each_rank_is_a_process_and_each_thread_a_row() -> None:
    document = chrome([part(1, ahead=10.0), part(0)], zero=1.0, about={"world_size": 2})
    rows = document["traceEvents"]
    names = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert names == {(0, 1): "main", (0, 2): "worker", (1, 1): "main", (1, 2): "worker"}
    spans = [(row["pid"], row["name"], row["ts"], row["dur"]) for row in rows if row["ph"] == "X"]
    # The outer one comes first where both begin at once; the clock that is ahead has been set back.
    assert spans == [(r, *what) for r in (0, 1) for what in [("outer", 1e6, 2e6), ("inner", 1e6, 1e6)]]
    marks = [(row["pid"], row["tid"], row["ts"], row["s"], row["args"]) for row in rows if row["ph"] == "i"]
    assert marks == [(rank, 2, 1.5e6, "t", {"step": 1}) for rank in (0, 1)]
    assert document["otherData"]["world_size"] == 2
    assert document["otherData"]["ranks"]["1"] == {
        "events": 3, "dropped_events": 3, "clock_ahead_us": 10e6, "clock_unsure_us": 250000.0,
    }  # fmt: skip


def test_a_part_comes_through_json_as_it_was() -> None:
    assert Part.from_json(json.loads(json.dumps(part(1).json()))) == part(1)
