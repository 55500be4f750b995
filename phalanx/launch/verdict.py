"""Which rank failed first, and how each one ended. Pure: decides from what is known when all have ended.

Ranks fail in a cascade: one raises, and the others lose it as a peer and raise too, sometimes ending
earlier. A rank that recorded a PeerError blames another; one whose connection broke under another
library probably lost a peer; only then does time decide.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum

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
    that a PeerError among its causes named, or None.
    """

    time: float
    exception: str
    message: str
    traceback: str
    blames: int | None
    code: int

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
        """The exception in one line."""
        if self.exception == "SystemExit":
            return f"sys.exit({self.message})"
        first = self.message.split("\n", 1)[0]
        return f"{self.exception}: {first}" if first else self.exception


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

    `returncode` is negative for a signal, as subprocess has it; `ended` and `stopped` are on the
    host's monotonic clock; `stopped` is when the launcher first signalled the rank, or None.
    """

    rank: int
    pid: int
    returncode: int
    ended: float
    stopped: float | None = None
    record: Record | None = None
    doing: str = ""

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
    def failed_at(self) -> float:
        """When it failed, as far as known."""
        return self.record.time if self.record is not None else self.ended

    def describe(self) -> str:
        """How the rank ended, in one line."""
        if self.state is State.OK:
            return "exit code 0"
        if self.state is State.STOPPED:
            how = self.signal_name or f"exit code {self.returncode}"
            return f"stopped by the launcher ({how})"
        if self.record is not None:
            return self.record.summary
        if self.signal_name is not None:
            return f"killed by {self.signal_name} (signal {-self.returncode})"
        return f"exit code {self.returncode}, without an exception"


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """The rank whose failure the others followed, or None where no rank failed by itself.

    Where every failed rank here blames another one, follow the blame: to a rank of this host that
    failed too, else to the earliest, whose own text then names the rank on another host.
    """
    failed = {ending.rank: ending for ending in endings if ending.state is State.FAILED}
    if not failed:
        return None
    first = min(failed.values(), key=lambda ending: (_guilt(ending), ending.failed_at))
    seen = {first.rank}
    while first.record is not None and first.record.blames in failed.keys() - seen:
        first = failed[first.record.blames]
        seen.add(first.rank)
    return first


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
