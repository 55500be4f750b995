"""Cases 26 to 28: a rank that raises or dies in the middle of a step, and a launcher that dies."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import torch
from torch import nn

from phalanx import DistributedDataParallel
from phalanx.errors import PeerFailedError, PeerLostError
from phalanx.testing import Ending, Fault, Faults, Kind, Point, run
from tests.procs.launching import MARK, Launch, gone, launch

__all__ = ["launch"]  # the fixture


def test_the_forward_of_a_compiled_wrapper_is_compiled_once_not_in_every_step() -> None:
    def program(rank: int) -> list[int]:
        from torch._dynamo.utils import counters  # its import takes a second

        compiled, seen = torch.compile(DistributedDataParallel(nn.Linear(3, 3)), backend="eager"), []
        for _ in range(3):
            for _ in range(4):
                compiled(torch.ones(2, 3)).sum().backward()
            seen.append(counters["frames"]["total"])
        return seen

    for _, after_8, after_12 in run(2, program, over="processes", timeout=90):
        assert after_8 == after_12


TRAIN = """
import torch, phalanx
torch.set_num_threads(1)
phalanx.init()
model = phalanx.DistributedDataParallel(torch.nn.Linear(4, 4))
def step(number):
    if number == 3 and rank == 1:
        END
    model(torch.ones(2, 4)).sum().backward()
"""
SIX_STEPS = "for number in range(6): step(number)\n"


class Breaks(torch.autograd.Function):
    """Its backward is where the fault strikes: between two layers."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, strike) -> torch.Tensor:
        ctx.strike = strike
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.strike()
        return grad, None


def train(rank: int, faults: Faults) -> float:
    """Train until the fault strikes; return how long after the fault this rank has learnt of it."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.number = first, second, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.number += 1
            number = self.number
            hidden = Breaks.apply(self.first(x), lambda: faults.point(rank, number, Point.BEFORE_REDUCE))
            return self.second(hidden)

    model = DistributedDataParallel(Net())
    for _ in range(6):
        model(torch.ones(2, 4)).sum().backward()
    return 0.0


def since_the_fault(record: Path) -> float:
    return (time.monotonic_ns() - int((record / "fault-0").read_text())) / 1e9


def watched(rank: int, faults: Faults, record: Path) -> tuple[str, float, int, str]:
    try:
        train(rank, faults)
    except (PeerFailedError, PeerLostError) as error:
        return type(error).__name__, since_the_fault(record), error.peer, str(error)
    raise AssertionError("no error")


def test_case_26_a_rank_raises_in_the_middle_of_a_step(tmp_path: Path):
    for n in (2, 3):
        record = tmp_path / str(n)
        record.mkdir()
        faults = Faults([Fault(1, 3, Point.BEFORE_REDUCE, Kind.RAISE)], record)
        outcomes = run(n, watched, faults, record, over="processes", raises=False, timeout=20)
        assert faults.fired() == faults.planned
        assert outcomes[1].ending is Ending.RAISED and "FaultError" in outcomes[1].text
        for rank in {*range(n)} - {1}:
            kind, seconds, peer, text = outcomes[rank].value
            assert (kind, peer) == ("PeerFailedError", 1)
            assert seconds < 2
            assert "FaultError: rank 1 raises an exception at step 3" in text


def test_case_26_the_launcher_shows_the_failing_ranks_traceback_and_exits_with_its_code(launch: Launch):
    code = TRAIN.replace("END", "raise ValueError('bad batch 3')") + SIX_STEPS
    done = launch.run(code, "-n", "2")
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("rank 1 failed first: ValueError: bad batch 3") :]
    assert report.rstrip().endswith("ValueError: bad batch 3")
    assert re.search(r"rank 0: phalanx\.errors\.PeerFailedError", report)


def test_case_27_a_rank_is_killed_in_the_middle_of_a_step(tmp_path: Path):
    before = set(os.listdir("/dev/shm"))
    for n in (2, 3):
        record = tmp_path / str(n)
        record.mkdir()
        faults = Faults([Fault(1, 3, Point.BEFORE_REDUCE, Kind.KILL)], record)
        outcomes = run(n, watched, faults, record, over="processes", raises=False, timeout=20)
        assert faults.fired() == faults.planned
        assert outcomes[1].ending is Ending.KILLED
        for rank in {*range(n)} - {1}:
            kind, seconds, peer, text = outcomes[rank].value
            assert (kind, peer) == ("PeerLostError", 1)
            assert seconds < 1
            assert "rank 1 is gone" in text
    assert set(os.listdir("/dev/shm")) <= before


def test_case_27_under_the_launcher_nothing_is_left(launch: Launch):
    before = set(os.listdir("/dev/shm"))
    code = MARK + TRAIN.replace("END", "os.kill(os.getpid(), signal.SIGKILL)") + SIX_STEPS
    done = launch.run(code, "-n", "2")
    assert done.returncode == 137
    assert "rank 1 failed first: killed by SIGKILL" in done.stderr
    assert gone(launch.pids("pid-*", 2), 1)
    assert set(os.listdir("/dev/shm")) <= before


def test_case_28_the_launcher_is_killed_in_the_middle_of_training(launch: Launch):
    code = (
        MARK
        + TRAIN.replace("END", "pass")
        + (
            "number = 0\n"
            "while True:\n"
            "    step(number)\n"
            "    number += 1\n"
            "    if number == 5: open(f'training-{rank}', 'w').close()\n"
            "    time.sleep(0.01)\n"
        )
    )
    process = launch.start(code, "-n", "2")
    launch.wait_for("training-*", 2, seconds=30)
    pids = launch.pids("pid-*", 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(pids, 2)
