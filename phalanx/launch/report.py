"""The report on a failed run: one page of text, and the same as JSON. Pure, but for `write` and `check`.

The page ends with the traceback of the rank that failed first, because the end is what people see.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.launch.memory import MemoryKills
from phalanx.launch.verdict import Ending, State, first_failure, left_early, shortened

_HERE = os.path.dirname(os.path.abspath(__file__))
_LISTED_RANKS = 16
_LONGEST_TRACEBACK = 12_000  # characters on the page; the JSON has more
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


@dataclass(frozen=True)
class Outcome:
    """Everything that is known about a run that has ended.

    `interrupted_by` is the signal that stopped the launcher, or None; `memory_kills` what the kernel's
    counters have gained meanwhile; `logs` maps ranks to their log files.
    """

    run_id: str
    host: str
    world_size: int
    command: Sequence[str]
    seconds: float
    endings: Sequence[Ending]
    interrupted_by: int | None
    memory_kills: MemoryKills
    logs: dict[int, str]

    @property
    def first(self) -> Ending | None:
        """The rank that failed first, or None."""
        return first_failure(self.endings)

    @property
    def exit_code(self) -> int:
        """0; or 128 + signal where the launcher was stopped; or the code of the rank that failed first."""
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        if self.first is not None:
            return self.first.exit_code or 1
        return 0

    def text(self) -> str:
        """The page for people, empty for a run that went well."""
        text = self._failure(self.first) if self.first is not None else ""
        if self.interrupted_by is not None:
            name = signal.Signals(self.interrupted_by).name
            text += f"phalanx: stopped by {name} after {self.seconds:.1f} s (exit code {self.exit_code})\n"
        return text

    def _failure(self, first: Ending) -> str:
        early = left_early(self.endings)
        listed = [ending for ending in self.endings if ending not in early and (early or ending is not first)]
        others = len(self.endings) > 1
        whose = f"rank {first.rank}: " if early else ""  # the line before ends with another rank's
        lines = [
            self._headline(first, early, others),
            f"  {whose}exit code {self.exit_code} after {self.seconds:.1f} s, "
            f"pid {first.pid} on {self.host}, run {self.run_id}",
        ]
        lines += [f"  {hint}" for hint in (self._memory_hint(first), self._blame_hint(first)) if hint]
        for ending in listed[:_LISTED_RANKS]:
            where = f"; it was in {ending.doing}" if ending.doing else ""
            lines.append(f"  rank {ending.rank}: {ending.describe()}{where}")
        if len(listed) > _LISTED_RANKS:
            lines.append(f"  and {len(listed) - _LISTED_RANKS} more ranks")
        if first.rank in self.logs:
            lines.append(f"  log of rank {first.rank}: {self.logs[first.rank]}")
        if others:
            lines += _last_words(first)
        return "\n".join(lines) + "\n"

    def _headline(self, first: Ending, early: Sequence[Ending], others: bool) -> str:
        if not early:
            return f"phalanx: rank {first.rank} failed{' first' if others else ''}: {first.describe()}"
        sure = any(ending.rank in first.record.names for ending in early if first.record)
        who = ", ".join(str(ending.rank) for ending in early)
        return (
            f"phalanx: rank{'s' if len(early) > 1 else ''} {who} {'left' if sure else 'probably left'} early: "
            f"exit code 0 while rank {first.rank} still needed {'them' if len(early) > 1 else 'it'}"
        )

    def _memory_hint(self, first: Ending) -> str:
        if first.returncode != -signal.SIGKILL or first.state is not State.FAILED:
            return ""
        peak = "" if first.peak_memory is None else f" (it had {_size(first.peak_memory)} in use at most)"
        if self.memory_kills.any:
            where = self.memory_kills.where
            return f"the kernel killed a process for want of memory {where} meanwhile: probably this rank{peak}"
        if self.memory_kills.any is None:
            return f"SIGKILL that nobody here sent is most often the kernel's answer to running out of memory{peak}"
        return "the kernel counts no process killed for want of memory: somebody probably sent this SIGKILL"

    def _blame_hint(self, first: Ending) -> str:
        blamed = first.record.blames if first.record is not None else None
        here = {ending.rank for ending in self.endings}
        if blamed is None or blamed in here:
            return ""
        return f"the cause is rank {blamed}, on another host: see the launcher's report there"

    def json(self) -> dict[str, object]:
        """The same as plain data."""
        first = self.first
        return {
            "run_id": self.run_id,
            "host": self.host,
            "world_size": self.world_size,
            "command": list(self.command),
            "seconds": round(self.seconds, 3),
            "exit_code": self.exit_code,
            "interrupted_by": None if self.interrupted_by is None else signal.Signals(self.interrupted_by).name,
            "first_failure": None if first is None else first.rank,
            "left_early": [ending.rank for ending in left_early(self.endings)],
            "likely_out_of_memory": bool(first and self.memory_kills.any and self._memory_hint(first)),
            "ranks": [self._rank_json(ending) for ending in self.endings],
        }

    def _rank_json(self, ending: Ending) -> dict[str, object]:
        record = ending.record
        return {
            "rank": ending.rank,
            "pid": ending.pid,
            "state": ending.state.value,
            "says": ending.describe(),
            "exit_code": ending.exit_code,
            "signal": ending.signal_name,
            "exception": record and record.exception,
            "message": record and record.message,
            "traceback": record and record.traceback,
            "blames": record and record.blames,
            "doing": ending.doing or None,
            "last_output": list(ending.last_output),
            "peak_memory_bytes": ending.peak_memory,
            "log": self.logs.get(ending.rank),
        }


def write(report: dict[str, object], path: str) -> None:
    """Write a report as JSON: whole, or, with OSError, not at all."""
    part = _part(path)
    try:
        with open(part, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.remove(part)
        raise


def check(path: str) -> None:
    """Raise OSError if a report cannot be written there. Leaves nothing behind, and a report that is there alone."""
    if os.path.isdir(path or os.curdir):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    part = _part(path)
    with open(part, "w", encoding="utf-8"):
        os.remove(part)


def _part(path: str) -> str:
    """The file that becomes the report once it is whole."""
    return f"{path}.{os.getpid()}.part"


def _last_words(first: Ending) -> list[str]:
    """The traceback of the rank that failed first; without one, or if it has called sys.exit(), what it wrote last."""
    lines = [f"  {line}" for line in first.last_output if _HERE not in line]  # not our own frames
    if first.record is None or (first.record.exception == "SystemExit" and lines):
        return [f"Last output of rank {first.rank}:", *lines] if lines else []
    if first.record.traceback:
        return [f"Traceback of rank {first.rank}:", shortened(first.record.traceback.rstrip(), _LONGEST_TRACEBACK)]
    return []


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def innermost_call(stacks: str) -> str:
    """Where a rank was, out of what faulthandler wrote: the innermost user's line of the main thread.

    faulthandler writes the newest thread first, so the main thread is the last block; frames of
    installed packages are passed over where there are others.
    """
    block = re.split(r"^(?:Current t|T)hread .*$", stacks, flags=re.MULTILINE)[-1]
    frames = [found for line in block.splitlines() if (found := _FRAME.fullmatch(line))]
    own = [
        frame
        for frame in frames
        if not re.search(r"[/\\](?:site-packages|lib[/\\]python3[^/\\]*)[/\\]|<frozen", frame["file"])
    ]
    if not (own or frames):
        return ""
    frame = (own or frames)[0]
    return f"{frame['function']} ({frame['file']}:{frame['line']})"
