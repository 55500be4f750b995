"""Faults as data: which rank, at which step and point, does what; a record shows that it happened.

    faults = Faults([Fault(rank=1, step=2, at=Point.BEFORE_REDUCE, kind=Kind.KILL)], record=tmp_path)
    outcomes = run(2, program, faults, over="processes", raises=False)
    assert faults.fired() == faults.planned

The program calls `faults.point(rank, step, at)` wherever a fault may strike. Each fault fires once, even if
its rank is started again. Its record is on disk before it strikes, because a killed process writes no more.
"""

from __future__ import annotations

import enum
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import MisuseError
from phalanx.testing.thread_world import in_threads


class Point(enum.Enum):
    """Where in a training step a fault strikes."""

    BETWEEN = "between two steps"
    BEFORE_FORWARD = "before the forward"
    BEFORE_BACKWARD = "before the backward"
    BEFORE_REDUCE = "before the reduction"
    IN_REDUCE = "in the reduction"
    AFTER_REDUCE = "after the reduction"
    AFTER_STEP = "after the optimizer's step"


class Kind(enum.Enum):
    """What happens to the rank."""

    RAISE = "raises an exception"
    SLEEP = "sleeps"
    EXIT = "leaves, with no exception and no cleaning up"
    KILL = "is killed"
    STOP = "is stopped, as by a debugger"


class FaultError(RuntimeError):
    """The exception of `Kind.RAISE`."""


@dataclass(frozen=True)
class Fault:
    """One fault. `seconds` is for SLEEP; `exitcode` for EXIT."""

    rank: int
    step: int
    at: Point
    kind: Kind
    seconds: float = 0.0
    exitcode: int = 1

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind.value} at step {self.step}, {self.at.value}"


class Faults:
    """A plan of faults, and the folder that records which of them have fired; pickles to every rank."""

    def __init__(self, planned: Iterable[Fault], record: str | os.PathLike[str]) -> None:
        self.planned = list(planned)
        self._record = Path(record)

    def point(self, rank: int, step: int, at: Point) -> None:
        """Let the faults strike that are planned for this rank here and now."""
        for index, fault in enumerate(self.planned):
            if (fault.rank, fault.step, fault.at) == (rank, step, at) and self._claim(index, fault):
                _strike(fault)

    def fired(self) -> list[Fault]:
        """Return the faults that have fired, in order of time."""
        times = {}
        for index in range(len(self.planned)):
            if (file := self._file(index)).exists():
                times[index] = int(file.read_text())
        return [self.planned[index] for index in sorted(times, key=times.__getitem__)]

    def _file(self, index: int) -> Path:
        return self._record / f"fault-{index}"

    def _claim(self, index: int, fault: Fault) -> bool:
        """Put it on record that the fault fires; False if it has fired before."""
        if fault.kind in _ENDS_THE_PROCESS and in_threads():
            raise MisuseError(
                f"a fault of a threads world that would end the whole test: {fault}",
                'run(..., over="processes")',
                rank=fault.rank,
            )
        try:
            descriptor = os.open(self._file(index), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, str(time.monotonic_ns()).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return True


_ENDS_THE_PROCESS = {Kind.EXIT, Kind.KILL, Kind.STOP}


def _strike(fault: Fault) -> None:
    if fault.kind is Kind.RAISE:
        raise FaultError(str(fault))
    if fault.kind is Kind.SLEEP:
        time.sleep(fault.seconds)
    elif fault.kind is Kind.EXIT:
        os._exit(fault.exitcode)
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault.kind is Kind.KILL else signal.SIGSTOP)
