"""Which rank failed first, and how each one ended. Pure: decides from what is known when all have ended.

Ranks fail in a cascade: one raises, and the others lose it as a peer and raise too, sometimes ending
earlier. A rank whose error came from another one blames that; one whose connection broke under another
library probably lost a peer; only then does time decide. A rank that ended well, and early, is no
failure by itself; where others failed for want of it, it is named as their cause.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import takewhile

# What torch, Gloo and NCCL say when the other end of a connection has gone.
_LOST_CONNECTION = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection was likely closed",
    "remote process exited",
    "socket closed",
)


@dataclass(frozen=True)
class Record:
    """What a rank wrote about the exception that ended it.

    `time` is on the host's monotonic clock; `code` the exit code it is ending with; `blames` the rank
    that its error came from, if that is another one; `names` all ranks that the call in question needed.
    """

    time: float
    exception: str
    message: str
    traceback: str
    blames: int | None
    code: int
    names: Sequence[int] = ()

    @classmethod
    def read(cls, path: str) -> Record | None:
        """Read a rank's record; None if it has not written one."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls(**json.load(file))
        except FileNotFoundError:
            return None

    @property
    def summary(self) -> str:
        """The exception in one line; of a text that begins a list, the list too."""
        first, *rest = self.message.strip().split("\n")
        if first.endswith(":"):
            listed = [line.strip() for line in takewhile(lambda line: line.startswith("  "), rest)]
            first = f"{first} {'; '.join(listed)}".rstrip()
        if self.exception == "SystemExit":
            return f"sys.exit({first})" if re.fullmatch(r"-?\d+", first) else f"sys.exit: {shortened(first)}"
        return f"{self.exception}: {shortened(first)}" if first else self.exception


# The launcher may notice a rank's end so much later than the other ranks do.
_NOTICED_WITHIN = 0.5


class State(Enum):
    """How a rank ended, as the report says it."""

    OK = "ok"
    FAILED = "failed"
    STOPPED = "stopped"  # by the launcher, after a failure elsewhere or a signal


class _Guilt(IntEnum):
    OWN = 0  # its own error, or a death that nobody here caused
    LIKELY_VICTIM = 1
    VICTIM = 2


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    `returncode` is negative for a signal, as subprocess has it. Times are on the host's monotonic clock:
    `ended` is the process's end, `stopped` when the launcher first signalled the rank, `finished` when its
    script had come to a good end (what follows are threads and exit handlers); the last two may be None.
    `doing` is where it was when it was stopped, `peak_memory` in bytes, `last_output` its last lines of
    standard error.
    """

    rank: int
    pid: int
    returncode: int
    ended: float
    stopped: float | None = None
    record: Record | None = None
    doing: str = ""
    finished: float | None = None
    peak_memory: int | None = None
    last_output: Sequence[str] = ()

    @property
    def state(self) -> State:
        """Whether the rank was well, failed by itself, or was stopped."""
        if self.record is not None and (self.stopped is None or self.record.time <= self.stopped):
            return State.FAILED
        if self.stopped is not None:
            return State.STOPPED
        return State.FAILED if self.returncode else State.OK

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it: 128 + signal for a signal. A rank that hung on its way out
        after an error, and had to be killed, keeps the code of its error."""
        if self.record is not None and self.state is State.FAILED:
            return self.record.code
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    @property
    def signal_name(self) -> str | None:
        """The name of the signal that ended the rank, or None."""
        return _signal_name(-self.returncode) if self.returncode < 0 else None

    @property
    def well_since(self) -> float | None:
        """Since when it needed nobody any more, because all was done; None if it failed or was stopped before."""
        if self.finished is not None and self.record is None:
            return self.finished
        return self.ended if self.state is State.OK else None

    @property
    def failed_at(self) -> float:
        """When it failed, as far as known."""
        return self.record.time if self.record is not None else self.ended

    def describe(self) -> str:
        """How the rank ended, in one line."""
        if self.state is State.OK:
            return "exit code 0"
        if self.state is State.STOPPED:
            how = self.signal_name or f"exit code {self.returncode}"
            done = "its script had ended well; " if self.finished is not None else ""
            return f"{done}stopped by the launcher ({how})"
        if self.record is not None:
            return self.record.summary
        if self.signal_name is not None:
            number = "" if self.signal_name.startswith("signal") else f" (signal {-self.returncode})"
            return f"killed by {self.signal_name}{number}"
        return f"exit code {self.returncode}, without an exception"


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """The rank whose failure the others followed, or None where no rank failed by itself.

    Where every failed rank here blames another one, follow the blame: to a rank of this host that
    failed too, else to the earliest, whose own text then names the rank on another host. Of ranks that
    blame each other, the earliest.
    """
    failed = {ending.rank: ending for ending in endings if ending.state is State.FAILED}
    if not failed:
        return None
    first = min(failed.values(), key=lambda ending: (_guilt(ending), ending.failed_at))
    path = [first.rank]
    while first.record is not None and first.record.blames in failed:
        if first.record.blames in path:
            circle = path[path.index(first.record.blames) :]
            return min((failed[rank] for rank in circle), key=lambda ending: ending.failed_at)
        first = failed[first.record.blames]
        path.append(first.rank)
    return first


def left_early(endings: Sequence[Ending]) -> list[Ending]:
    """The ranks that had ended well when others failed for want of them.

    A failed rank's error says whom it missed; where another library only says that a connection was
    closed, whoever had ended well before may be meant.
    """
    early = []
    for ending in endings:
        since = ending.well_since
        if since is not None and any(_missed(other, ending.rank, since) for other in endings):
            early.append(ending)
    return early


def _missed(failed: Ending, rank: int, since: float) -> bool:
    """Whether a rank failed for want of `rank`, which had ended well at `since`."""
    record = failed.record
    if failed.state is not State.FAILED or record is None or record.time < since - _NOTICED_WITHIN:
        return False
    return rank in record.names or _guilt(failed) is _Guilt.LIKELY_VICTIM


def shortened(text: str, limit: int = 400) -> str:
    """A long text without its middle, which is where least is lost."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]} ... ({len(text) - head - tail} characters left out) ... {text[-tail:]}"


def _guilt(ending: Ending) -> _Guilt:
    if ending.record is None:
        return _Guilt.OWN
    if ending.record.blames is not None:
        return _Guilt.VICTIM
    text = ending.record.message.lower()
    return _Guilt.LIKELY_VICTIM if any(words in text for words in _LOST_CONNECTION) else _Guilt.OWN


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
