"""What Linux tells of a process that does not answer: stopped, running, asleep, ended. Reads /proc only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from phalanx.status.answer import Condition

_CPU_SECONDS = 0.2
_BUSY = 0.5  # of a core
_OVERLOADED = 4.0  # processes that want a core, for each there is

Known = tuple[Condition, str, float | None]
"""How a process is, the same in words, and how many cores it uses (None: unknown)."""


@dataclass(frozen=True)
class Process:
    """One look at a process: the kernel's letter for its state, its CPU time in seconds, who debugs it."""

    pid: int
    letter: str
    cpu_seconds: float
    tracer: int

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger holds it."""
        return self.letter in "Tt"


def look(pid: int) -> Process | None:
    """Look at a process once; None if there is none of that number, or the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Process(pid, fields[0], ticks, _tracer(pid))


def known_of(pids: Iterable[int]) -> dict[int, Known]:
    """Say how processes are that do not answer. Takes 0.2 seconds."""
    before = {pid: look(pid) for pid in pids}
    if any(process is not None and process.letter not in "ZXTt" for process in before.values()):
        time.sleep(_CPU_SECONDS)
    return {pid: _known(process) for pid, process in before.items()}


def _known(before: Process | None) -> Known:
    after = look(before.pid) if before is not None else None
    if before is None or after is None or after.letter in "ZX":
        return Condition.ENDED, "has ended" + (" (a zombie)" if after else ""), None
    if after.is_stopped:
        return Condition.STOPPED, stopped_by(after), 0.0
    cpu, asleep = (after.cpu_seconds - before.cpu_seconds) / _CPU_SECONDS, _asleep_in(after.pid)
    if after.letter == "D":
        return Condition.SILENT, f"does not answer: storage or a device holds its process{asleep}", cpu
    doing = "computes" if cpu >= _BUSY else f"sleeps{asleep}"
    return Condition.SILENT, f"does not answer: its process {doing}, {_likely()}", cpu


def _likely() -> str:
    """Why a process that runs or sleeps may not answer."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > _OVERLOADED * cores:
        return f"and this host has far too much to do (load {load:.0f} on {cores} cores)"
    return "most likely in C code that holds Python's global lock"


def stopped_by(process: Process) -> str:
    """Say what holds a stopped process."""
    if process.tracer:
        name = _text(process.tracer, "comm")
        return f"is held by a debugger ({name + ', ' if name else ''}pid {process.tracer})"
    return "is stopped by a signal (SIGSTOP, Ctrl-Z)"


def descendants(pid: int) -> set[int]:
    """All processes that descend from `pid`, without itself."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _text(int(name), "stat").rpartition(")")[2].split()
            if fields:
                children.setdefault(int(fields[1]), []).append(int(name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = [child for child in children.get(waiting.pop(), []) if child not in found]
        found.update(new)
        waiting += new
    return found


def _tracer(pid: int) -> int:
    for line in _text(pid, "status").splitlines():
        if line.startswith("TracerPid:"):
            return int(line.split()[1])
    return 0


def _asleep_in(pid: int) -> str:
    function = _text(pid, "wchan")
    return f" in {function} of the kernel" if function not in ("", "0") else ""


def _text(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace").strip()
    except OSError:
        return ""
