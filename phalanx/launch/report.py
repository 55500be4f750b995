"""The report on a failed run: one page of text, and the same as JSON. Pure.

The page ends with the traceback of the rank that failed first, because the end is what people see.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.launch.verdict import Ending, State, first_failure

_LISTED_RANKS = 16
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')


@dataclass(frozen=True)
class Outcome:
    """Everything that is known about a run that has ended.

    `interrupted_by` is the signal that stopped the launcher, or None; `memory_kills` how many
    processes the kernel killed for want of memory meanwhile, None if it does not say; `logs` maps
    ranks to their log files.
    """

    run_id: str
    host: str
    world_size: int
    command: Sequence[str]
    seconds: float
    endings: Sequence[Ending]
    interrupted_by: int | None
    memory_kills: int | None
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
        if self.interrupted_by is not None:
            name = signal.Signals(self.interrupted_by).name
            return f"phalanx: stopped by {name} after {self.seconds:.1f} s (exit code {self.exit_code})\n"
        first = self.first
        if first is None:
            return ""
        others = [ending for ending in self.endings if ending is not first]
        lines = [
            f"phalanx: rank {first.rank} failed{' first' if others else ''}: {first.describe()}",
            f"  exit code {self.exit_code} after {self.seconds:.1f} s, "
            f"pid {first.pid} on {self.host}, run {self.run_id}",
        ]
        lines += [f"  {hint}" for hint in (self._memory_hint(first), self._blame_hint(first)) if hint]
        for ending in others[:_LISTED_RANKS]:
            where = f"; it was in {ending.doing}" if ending.doing else ""
            lines.append(f"  rank {ending.rank}: {ending.describe()}{where}")
        if len(others) > _LISTED_RANKS:
            lines.append(f"  and {len(others) - _LISTED_RANKS} more ranks")
        if first.rank in self.logs:
            lines.append(f"  log of rank {first.rank}: {self.logs[first.rank]}")
        text = "\n".join(lines) + "\n"
        if first.record is not None and first.record.traceback and others:
            text += f"Traceback of rank {first.rank}:\n{first.record.traceback.rstrip()}\n"
        return text

    def _memory_hint(self, first: Ending) -> str:
        if first.returncode != -signal.SIGKILL or first.state is not State.FAILED:
            return ""
        if self.memory_kills:
            return "the kernel killed a process for want of memory meanwhile: very likely this rank"
        if self.memory_kills is None:
            return "SIGKILL that nobody sent is most often the kernel's answer to running out of memory"
        return "the kernel counts no process killed for want of memory: somebody sent this SIGKILL"

    def _blame_hint(self, first: Ending) -> str:
        blamed = first.record.blames if first.record is not None else None
        here = {ending.rank for ending in self.endings}
        if blamed is None or blamed in here:
            return ""
        return f"the cause is rank {blamed}, on another host: see the launcher's report there"

    def json(self) -> dict:
        """The same as plain data."""
        first = self.first
        return {
            "run_id": self.run_id,
            "host": self.host,
            "world_size": self.world_size,
            "command": list(self.command),
            "seconds": round(self.seconds, 3),
            "exit_code": self.exit_code,
            "interrupted_by": None
            if self.interrupted_by is None
            else signal.Signals(self.interrupted_by).name,
            "first_failure": None if first is None else first.rank,
            "likely_out_of_memory": bool(first and self.memory_kills and self._memory_hint(first)),
            "ranks": [self._rank_json(ending) for ending in self.endings],
        }

    def _rank_json(self, ending: Ending) -> dict:
        record = ending.record
        return {
            "rank": ending.rank,
            "pid": ending.pid,
            "state": ending.state.value,
            "exit_code": ending.exit_code,
            "signal": ending.signal_name,
            "exception": record and record.exception,
            "message": record and record.message,
            "traceback": record and record.traceback,
            "blames": record and record.blames,
            "doing": ending.doing or None,
            "log": self.logs.get(ending.rank),
        }


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
