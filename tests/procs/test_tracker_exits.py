"""Every kind of exit that lets Python run leaves a finished tracker; real processes, real signals."""

from __future__ import annotations

import csv
import json
import signal
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.commands import run_command
from tests.procs.launching import Launch, launch  # noqa: F401 (a fixture)

# Each way out is taken by a forked child that goes on to the very end of the script, so that torch is imported once.
WAYS_OUT = """
import json, os, signal, sys, threading, time, traceback
import phalanx
from phalanx.train.trackers import csv_file, tensorboard  # imported before the forks

WAYS = {
    "end": lambda t: None,
    "finish": lambda t: t.finish(),
    "shutdown": lambda t: (phalanx.init(), phalanx.shutdown(), os._exit(0)),
    "exit": lambda t: sys.exit(3),
    "raise": lambda t: 1 / 0,
    "interrupt": lambda t: os.kill(os.getpid(), signal.SIGINT),
    "sigterm": lambda t: os.kill(os.getpid(), signal.SIGTERM),
    "sigterm while writing": lambda t: write_for_ever(t),
    "sigterm while another thread writes": lambda t: in_a_thread(t),
    "own handler": lambda t: own_handler(t),
    "a forked child ends first": lambda t: (os.waitpid(os.fork() or sys.exit(), 0), t.log({"x": 2}, 2)),
    "a forked child gets sigterm": lambda t: (signalled_child(), t.log({"x": 2}, 2)),
    "writer fails": lambda t: t.add(Broken()),
}

class Broken:
    def close(self, ending):
        raise OSError("no space left")

def after(seconds, signum=signal.SIGTERM):
    threading.Timer(seconds, os.kill, (os.getpid(), signum)).start()

def write_for_ever(t):
    after(0.3)
    for step in range(2, 1 << 60):
        t.log({"x": step, f"y{step % 50}": 1}, step)

def in_a_thread(t):
    threading.Thread(target=write_for_ever, args=(t,), daemon=True).start()
    time.sleep(60)

def own_handler(t):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    write_for_ever(t)

def signalled_child():
    child = os.fork()
    if child == 0:
        time.sleep(60)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM

codes = {}
for way, leave in WAYS.items():
    child = os.fork()
    if child == 0:
        sys.stderr = open("errors", "a")
        tracker = phalanx.tracker("csv", "tensorboard", dir=way, config={"way": way})
        tracker.log({"x": 1.0}, 1)
        leave(tracker)
        break
    codes[way] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
else:
    json.dump(codes, open("codes.json", "w"))
"""

EXPECTED = {
    "end": ("finished", 0),
    "finish": ("finished", 0),
    "shutdown": ("finished", 0),
    "exit": ("finished", 3),
    "raise": ("failed", 1),
    "interrupt": ("killed", -signal.SIGINT),
    "sigterm": ("killed", -signal.SIGTERM),
    "sigterm while writing": ("killed", -signal.SIGTERM),
    "sigterm while another thread writes": ("killed", -signal.SIGTERM),
    "own handler": ("finished", 0),
    "a forked child ends first": ("finished", 0),
    "a forked child gets sigterm": ("finished", 0),
    "writer fails": ("finished", 0),
}


def lines_of(folder: Path) -> list[dict[str, str]]:
    """Return the lines of metrics.csv, each of which must be whole."""
    with (folder / "metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert all(None not in line.values() and None not in line for line in lines)
    return lines


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which every way out was taken once."""
    folder = tmp_path_factory.mktemp("ways")
    (folder / "ways.py").write_text(WAYS_OUT)
    run_command([sys.executable, "ways.py"], folder, env={"PYTHONPATH": str(Path(__file__).parents[2])})
    return folder


@pytest.mark.parametrize("way", EXPECTED)
def test_it_is_finished(way: str, left: Path) -> None:
    status, code = EXPECTED[way]
    assert json.loads((left / "codes.json").read_text())[way] == code
    about = json.loads((left / way / "run.json").read_text())
    assert (about["status"], about["config"]) == (status, {"way": way})
    assert about["ended"] is not None
    events = EventAccumulator(str(left / way), {"scalars": 0}).Reload()  # 0: keep all, not a sample of 10,000
    assert events.Tensors("status/text_summary")[-1].tensor_proto.string_val == [status.encode()]
    assert [event.value for event in events.Scalars("x")][0] == 1.0
    lines = lines_of(left / way)
    assert lines[0]["x"] == "1.0"
    if "while" in way:
        assert len(lines) > 10
    if "forked" in way:
        assert lines[1]["x"] == "2.0"


def test_what_fails_at_the_end_is_said(left: Path) -> None:
    assert "OSError: no space left" in (left / "errors").read_text()


def test_rank_zero_finishes_though_another_rank_dies_in_the_middle_of_a_log(launch: Launch) -> None:  # noqa: F811
    done = launch.run(
        """
        import phalanx
        phalanx.init()
        tracker = phalanx.tracker("csv", dir="run")
        for step in range(1000):
            if rank == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            tracker.log({"loss": step, f"only {rank}": 1}, step)
        """,
        "-n", "2",
    )  # fmt: skip
    assert done.returncode != 0 and "rank 1" in done.stderr
    assert json.loads((launch.folder / "run/run.json").read_text())["status"] in ("failed", "killed")
    assert [line["loss"] for line in lines_of(launch.folder / "run")] == [f"{step}.0" for step in range(20)]


def test_the_launcher_passes_sigterm_on_and_the_tracker_is_finished(launch: Launch) -> None:  # noqa: F811
    process = launch.start(
        """
        import phalanx
        phalanx.init()
        tracker = phalanx.tracker("csv", dir="run")
        step = 0
        while True:
            tracker.log({"loss": 1 / (1 + step)}, step)
            step += 1
            if step == 20 and rank == 0:
                open("running", "w")
        """,
        "-n", "2",
    )  # fmt: skip
    launch.wait_for("running", 1, seconds=30)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert json.loads((launch.folder / "run/run.json").read_text())["status"] == "killed"
    assert len(lines_of(launch.folder / "run")) >= 20
