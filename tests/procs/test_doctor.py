"""Stuck ranks as processes: stopped, deep in C code, gone; reports from within, `phalanx doctor` from outside."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from phalanx.testing import run
from tests.procs.launching import ENV, Launch, launch  # noqa: F401 (a fixture)

JOB = """
import ctypes
import torch
import torch.distributed as dist
import phalanx

phalanx.init()

class Batches(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.ones(1)
        open(f'pid-{rank}', 'w').write(str(os.getpid()))
        if rank == 1:
            time.sleep(60)
        if rank == 2:
            ctypes.PyDLL(None).sleep(60)
        yield torch.ones(1)

model = phalanx.DistributedDataParallel(torch.nn.Linear(1, 1))
for batch in torch.utils.data.DataLoader(Batches()):
    model(batch).sum().backward()
"""


def doctor(*args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "phalanx", "doctor", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=30, check=False)


def told_when(complete: Callable[[str], bool], *args: object) -> subprocess.CompletedProcess:
    """Ask until the report is complete: on a busy machine ranks are slow to begin and to answer."""
    limit = time.monotonic() + 40
    while not complete((told := doctor(*args)).stdout):
        assert time.monotonic() < limit, told.stdout + told.stderr
    return told


def test_the_doctor_asks_a_running_job_from_outside(launch: Launch) -> None:  # noqa: F811
    launcher = launch.start(JOB, "-n", "3")
    launch.wait_for("pid-*", 3, seconds=60)
    pids = launch.pids("pid-*", 3)
    told = told_when(lambda said: "ranks 1-2 are late" in said and "at __iter__" in said, launcher.pid)
    assert told.returncode == 1 and not told.stderr, "rank 2 does not answer"
    text = told.stdout
    assert text.startswith("phalanx: ranks 1-2 are late: rank 0 has waited ")
    assert "  rank 0  waiting for ranks 1-2 in the gradient synchronisation of model" in text
    assert "Linear, parameters weight to bias, 1 bucket" in text
    assert f"; at __iter__ ({launch.folder}/script.py:" in text and f"(pid {pids[1]} on " in text
    assert "  rank 2  does not answer: its process sleeps" in text and f"(pid {pids[2]} on " in text
    assert f'  > File "{launch.folder}/script.py"' in text and "        time.sleep(60)\n" in text
    assert "rank 2 is in a long call of a C extension" in text and "rank 1 waits for its next batch" in text

    told = told_when(lambda said: json.loads(said)["late"] == [1, 2], "--json", "--seconds", "0.5", pids[1])
    data = json.loads(told.stdout)
    assert data["size"] == 3 and data["waiting"] == 0 and [rank["pid"] for rank in data["ranks"]] == pids
    assert [rank["condition"] for rank in data["ranks"]] == ["answers", "answers", "silent"]

    os.kill(pids[1], signal.SIGSTOP)
    told = told_when(lambda said: "waiting for" in said, data["run"], "--seconds", "0.5")
    os.kill(pids[1], signal.SIGCONT)
    assert told.returncode == 1
    assert "  rank 1  is stopped by a signal" in told.stdout and f"kill -CONT {pids[1]}" in told.stdout


def test_a_job_that_is_well() -> None:
    def program(rank: int) -> tuple[int, dict]:
        told = doctor("--json", os.getpid()) if rank == 0 else None
        dist.barrier()
        return (told.returncode, json.loads(told.stdout)) if told else (0, {})

    code, data = run(2, program, over="processes")[0]
    assert code == 0 and data["size"] == 2
    assert [rank["condition"] for rank in data["ranks"]] == ["answers", "answers"]
    assert any("subprocess.py" in frame["file"] for frame in data["ranks"][0]["stack"])


@pytest.mark.parametrize("job", ["no-such-run", "4200000"])
def test_a_job_that_does_not_run(job: str) -> None:
    told = doctor(job)
    assert told.returncode == 3 and f"no rank of {job} runs on this host" in told.stderr


def test_exit_codes_are_documented() -> None:
    told = doctor("--help")
    text = " ".join(told.stdout.split())
    assert told.returncode == 0 and "exit codes: 0 if every rank has answered; 1 if some rank did not" in text
    assert doctor("--nonsense").returncode == 2


class Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("way", ["stopped", "in C code"])
def test_a_rank_that_cannot_answer_is_named_from_within(way: str) -> None:
    def program(rank: int) -> str:
        board, handler = dist.group.WORLD.board, Texts()
        board.slow_after = 0.3
        logging.getLogger("phalanx").addHandler(handler)
        pids: list[int] = [0, 0, 0]
        dist.all_gather_object(pids, os.getpid())
        if rank == 2 and way == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 2 and way == "in C code":
            ctypes.PyDLL(None).sleep(3)  # in C, with Python's global lock in hand, as a bad extension does
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            limit = time.monotonic() + 20
            while not handler.texts and time.monotonic() < limit:
                time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[2], signal.SIGCONT)
            work.wait()
        else:
            dist.all_reduce(torch.ones(3))
        return "\n".join(handler.texts)

    said = run(3, program, over="processes")
    text = said[0] or said[1]
    assert text.startswith("phalanx: rank 2 is late: rank ")
    if way == "stopped":
        assert re.search(r"\n  rank 2 +is stopped by a signal", text) and "kill -CONT" in text
    else:
        assert re.search(r"\n  rank 2 +does not answer: its process sleeps", text) and "gdb -p" in text
