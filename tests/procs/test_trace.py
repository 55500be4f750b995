"""`phalanx.trace` on real ranks: the file, its structure, and what is left when a rank fails."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import phalanx
from phalanx.errors import MisuseError
from phalanx.group import profiling, tracing
from phalanx.observe import model_events
from phalanx.observe import trace as tracing_file
from phalanx.testing import Ending, run
from tests.procs.launching import Launch, launch

__all__ = ["launch"]  # the fixture


def processes(n: int, fn: Any, *args: Any, **keywords: Any) -> list[Any]:
    return run(n, fn, *args, over="processes", timeout=60, **keywords)


def load(path: Path) -> list[dict[str, Any]]:
    """Read a trace, and check what has to hold for any."""
    document = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    rows = document["traceEvents"]
    stacks: dict[tuple[int, int], list[float]] = defaultdict(list)
    named = {(row["pid"], row["tid"]) for row in rows if row["name"] == "thread_name"}
    for row in rows:
        assert row["ph"] in ("M", "X", "i") and isinstance(row["name"], str)
        if row["ph"] == "M":
            continue
        assert (row["pid"], row["tid"]) in named
        assert row["ts"] >= 0 and row.get("dur", 0) >= 0
        open_until = stacks[row["pid"], row["tid"]]
        while open_until and row["ts"] >= open_until[-1] - 0.001:  # times are rounded to a nanosecond
            open_until.pop()
        if row["ph"] == "X":
            end = row["ts"] + row["dur"]
            assert not open_until or end <= open_until[-1] + 0.002, f"{row} reaches out of the event around it"
            open_until.append(end)
    return rows


def named(rows: list[dict[str, Any]], rank: int, start: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["pid"] == rank and row["name"].startswith(start) and row["ph"] != "M"]


def train(rank: int, path: str) -> None:
    torch.manual_seed(0)
    model = phalanx.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with phalanx.trace(path) as trace:
        for step in range(2):
            with trace.span("load a batch", step=step):
                time.sleep(0.3 if rank == 1 else 0.0)
            optimizer.zero_grad()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(5000), async_op=True).wait()
        with model.no_sync():
            model(torch.ones(2, 8)).sum().backward()
        trace.mark("done", rate=float("nan"))
        with pytest.raises(MisuseError, match="a trace is on already"):
            phalanx.trace(path)
    assert tracing.recorder is None and not profiling.is_on()
    assert not any(type(call).__module__ == model_events.__name__ for call in model._reducer.after_flush)
    model(torch.ones(2, 8)).sum().backward()  # leaves no trace


def test_every_rank_is_in_one_file(tmp_path: Path) -> None:
    processes(2, train, str(tmp_path / "run.json"))
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    rows = load(tmp_path / "run.json")
    check_clocks_and_waits(rows)
    for rank in range(2):
        assert len(named(rows, rank, "load a batch")) == 2
        assert len(named(rows, rank, "forward of Sequential")) == len(named(rows, rank, "backward")) == 3
        assert len(named(rows, rank, "SGD.step")) == 2
        synchronised = named(rows, rank, "synchronise Sequential")
        assert [row["args"]["bytes"] for row in synchronised] == [synchronised[0]["args"]["bytes"]] * 2
        assert synchronised[0]["args"]["bytes"] >= 4 * (72 + 9) and synchronised[0]["args"]["parameters"] == 4
        bucket = named(rows, rank, "bucket 0 of plan")[0]["args"]
        assert bucket["parameters"] == ["1.bias", "1.weight", "0.bias", "0.weight"] and bucket["dtype"] == "float32"
        small, large = named(rows, rank, "phalanx:all_reduce")
        assert small["args"]["tensors"] == [["float32", 3]] and "test_trace.py" in small["args"]["at"]
        (moved,) = named(rows, rank, "all_reduce")
        assert moved["tid"] != large["tid"]  # the worker's thread
        assert moved["args"]["moving_us"] > 0 and moved["args"]["waiting_us"] > 0
        assert named(rows, rank, "done")[0]["args"] == {"rate": "nan"}
        assert not tracing.recorder


def check_clocks_and_waits(rows: list[dict[str, Any]]) -> None:
    (early, _), (late, _) = (named(rows, rank, "gradients") for rank in range(2))
    assert early["args"]["waiting_us"] > 200_000 > late["args"]["waiting_us"]
    assert early["args"]["moving_us"] < 200_000
    loading = named(rows, 1, "load a batch")[0]
    wait = next(row for row in named(rows, 0, "wait for tickets") if row["ts"] >= early["ts"])
    # Rank 0 waited until rank 1 had loaded: true only if their clocks are on one scale.
    assert wait["ts"] < loading["ts"] + loading["dur"] < wait["ts"] + wait["dur"]
    assert wait["args"]["last seen waiting for rank"] == 1


def fail(rank: int, path: str, how: str) -> None:
    with phalanx.trace(path) as trace:
        trace.mark("before")
        if rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("bad batch")
        dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize(("how", "left"), [("raise", [0, 1, 2]), pytest.param("kill", [0, 2], marks=pytest.mark.full)])
def test_when_a_rank_fails_each_writes_its_own_part(tmp_path: Path, how: str, left: list[int]) -> None:
    began = time.monotonic()
    outcomes = processes(3, fail, str(tmp_path / "run.json"), how, raises=False)
    assert time.monotonic() - began < 30  # nobody waits for the part of one that fails
    assert Ending.RETURNED not in [outcome.ending for outcome in outcomes]
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"run.rank-{rank}.json" for rank in left]
    for rank in left:
        rows = load(tmp_path / f"run.rank-{rank}.json")
        assert named(rows, rank, "before") and {row["pid"] for row in rows} == {rank}
    assert named(rows, 2, "phalanx:all_reduce")[0]["args"]["raised"].startswith("Peer")


def fail_alone(rank: int, path: str) -> None:
    with phalanx.trace(path) as trace:
        trace.mark("before")
        if rank == 1:
            raise ValueError("bad batch")


def test_rank_0_does_not_wait_for_the_part_of_one_that_has_failed(tmp_path: Path) -> None:
    outcomes = processes(2, fail_alone, str(tmp_path / "run.json"), raises=False)
    assert outcomes[0].ending is Ending.RETURNED and outcomes[0].at < tracing_file._PARTS_WITHIN / 2
    assert {row["pid"] for row in load(tmp_path / "run.json")} == {0}
    assert named(load(tmp_path / "run.rank-1.json"), 1, "before")


def until_the_end(rank: int, path: str) -> None:
    phalanx.trace(path).mark("begun")
    dist.all_reduce(torch.ones(3))
    time.sleep(0.3 * rank)


def test_a_trace_that_nobody_stops_ends_with_the_program(tmp_path: Path) -> None:
    processes(2, until_the_end, str(tmp_path / "run.json"), backend="gloo")
    rows = load(tmp_path / "run.json")
    assert all(named(rows, rank, "begun") for rank in range(2))


def missing_folder(rank: int, path: str) -> str:
    with pytest.raises(MisuseError, match="no folder"):
        phalanx.trace(path)
    return "raised"


def test_a_missing_folder_is_an_error_on_every_rank(tmp_path: Path) -> None:
    assert processes(2, missing_folder, str(tmp_path / "absent" / "run.json")) == ["raised"] * 2


def test_alone_and_beyond_the_limit(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="limit=0"):
        phalanx.trace(tmp_path / "run.json", limit=0)
    with phalanx.trace(tmp_path / "run.json", limit=3) as trace:
        for step in range(5):
            trace.mark(f"step {step}")
    trace.stop()
    trace.mark("too late")
    with trace.span("too late"):
        pass
    rows = load(tmp_path / "run.json")
    assert [row["name"] for row in rows if row["ph"] == "i"] == ["step 0", "step 1", "step 2"]
    about = json.loads((tmp_path / "run.json").read_text())["otherData"]
    assert about["ranks"]["0"]["dropped_events"] == 2


LEAVE = """
import phalanx, torch
from phalanx.observe import trace
trace._PARTS_WITHIN_AT_EXIT = 60.0
phalanx.init()
phalanx.trace("run.json")
if rank == 0:
    sys.exit(0)
began = time.monotonic()
try:
    torch.distributed.all_reduce(torch.ones(3))
except phalanx.RankMismatchError as error:
    print("told", error, int(time.monotonic() - began))
"""


def test_who_leaves_early_is_told_so_before_anything_waits_for_parts(launch: Launch) -> None:
    done = launch.run(LEAVE, "-n", "2")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if "finished and left" in line]
    assert told and {row["pid"] for row in load(launch.folder / "run.json")} == {0, 1}
