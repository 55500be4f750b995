"""`spawn` with real processes, from a module, a script, a prompt and a notebook-like program."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.errors import MisuseError
from phalanx.launch.spawn import SpawnError, spawn

ROOT = Path(__file__).resolve().parents[2]
ENV = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
ENV["PYTHONPATH"] = str(ROOT)


def report(rank: int, queue: Any, extra: dict[str, int]) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    queue.put((rank, [os.environ[name] for name in names], extra, os.environ["MASTER_PORT"]))


def fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("spawned bad")
    time.sleep(60)


def die_on_rank_0(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def exit_on_rank_1(rank: int) -> None:
    sys.exit(7 * rank)


def sleep(rank: int, seconds: float) -> None:
    time.sleep(seconds)


def test_ranks_get_their_place_and_arguments() -> None:
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    assert spawn(report, (queue, {"a": 1}), nprocs=2) is None
    (_, first, extra, port), (_, second, _, same) = sorted(queue.get() for _ in range(2))
    queue.close()
    assert first[:4] == ["0", "2", "0", "127.0.0.1"] and second[:4] == ["1", "2", "1", "127.0.0.1"]
    assert int(first[4]) == max(1, len(os.sched_getaffinity(0)) // 2) or "OMP_NUM_THREADS" in os.environ
    assert extra == {"a": 1} and port == same


def test_a_function_without_a_name_travels_by_value() -> None:
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    offset = 5
    spawn(lambda rank, queue: queue.put(rank + offset), (queue,), nprocs=1)
    assert queue.get() == 5
    queue.close()


def test_the_first_failure_is_raised_with_its_traceback() -> None:
    began = time.monotonic()
    with pytest.raises(SpawnError, match="rank 1 failed first: ValueError: spawned bad") as caught:
        spawn(fail_on_rank_1)
    assert time.monotonic() - began < 8
    error = caught.value
    assert (error.rank, error.exit_code, error.exception) == (1, 1, "ValueError: spawned bad")
    assert "in fail_on_rank_1" in error.traceback and "spawned.py" not in error.traceback
    assert str(error).endswith("ValueError: spawned bad")


def test_deaths_and_exits_are_failures_too() -> None:
    with pytest.raises(SpawnError, match="rank 0 failed first: killed by SIGKILL") as killed:
        spawn(die_on_rank_0)
    assert (killed.value.rank, killed.value.exit_code, killed.value.traceback) == (0, 137, "")
    with pytest.raises(SpawnError, match=r"sys.exit\(7\)") as left:
        spawn(exit_on_rank_1)
    assert (left.value.rank, left.value.exit_code) == (1, 7)


def test_timeout_ends_all_and_says_where_they_were() -> None:
    with pytest.raises(SpawnError, match=r"timeout=2 s: rank 0 in \S+ \(.+:\d+\), rank 1 in "):
        spawn(sleep, (60,), timeout=2)


def test_without_join() -> None:
    ranks = spawn(sleep, (1.5,), join=False)
    assert ranks is not None
    assert not ranks.join(timeout=0.1)
    assert all(psutil.pid_exists(pid) for pid in ranks.pids())
    assert ranks.join() and ranks.join()
    assert not any(psutil.pid_exists(pid) for pid in ranks.pids())


def test_from_a_thread() -> None:
    worker = threading.Thread(target=spawn, args=(sleep, (0.1,)))
    worker.start()
    worker.join(timeout=20)
    assert not worker.is_alive()


@pytest.mark.parametrize("wrong", [{"fn": 3}, {"nprocs": 0}, {"start_method": "fork"}])
def test_misuse(wrong: dict[str, Any]) -> None:
    with pytest.raises(MisuseError, match=next(iter(wrong))):
        spawn(**{"fn": sleep, **wrong})


PROGRAM = """
import multiprocessing, os, sys
from phalanx.launch.spawn import spawn
def double(x): return 2 * x
def work(rank, queue): queue.put(double(rank))
if __name__ == "__main__":
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    spawn(work, (queue,))
    print(sorted([queue.get(), queue.get()]))
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize("how", ["script", "module", "stdin", "-c", "prompt"])
def test_from_a_script_and_where_functions_cannot_be_imported(tmp_path: Path, how: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    given = {
        "script": ["program.py"],
        "module": ["-m", "program"],
        "stdin": ["-"],
        "-c": ["-c", PROGRAM],
        "prompt": ["-i"],
    }
    typed = (
        PROGRAM.replace("\ndef", "\n\ndef").replace("\nif", "\n\nif") + "\n\n"
    )  # a prompt ends blocks by a blank line
    done = subprocess.run(
        [sys.executable, *given[how]],
        input=typed,
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "[0, 2]\nFalse\n", done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from phalanx.launch.spawn import spawn\ndef work(rank): pass\nspawn(work, nprocs=1)\n"
    )
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 1
    assert "if __name__ == '__main__'" in done.stderr


SLEEPER = """
import os, subprocess, sys, time
from phalanx.launch.spawn import spawn
def work(rank):
    child = subprocess.Popen(["sleep", "60"])
    open(f"pid-{rank}", "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(60)
if __name__ == "__main__":
    try:
        spawn(work)
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(5)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_script_and_so_does_what_they_have_started(tmp_path: Path, signum: int) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(SLEEPER))
    process = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**ENV, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    until = time.monotonic() + 15
    while not all((tmp_path / f"pid-{rank}").is_file() and (tmp_path / f"pid-{rank}").read_text() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.02)
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"pid-{rank}").read_text().split()]
    process.send_signal(signum)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == ((5, "interrupted\n") if signum == signal.SIGINT else (-signum, ""))
    until = time.monotonic() + 2
    while [pid for pid in pids if _runs(pid)] or list(tmp_path.glob("phalanx-*")):
        assert time.monotonic() < until
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
