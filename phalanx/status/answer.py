"""What one rank says when it is asked what it is doing, and what is known of one that does not answer. Pure.

All times are lengths in seconds up to the moment of the answer: clocks of different hosts are not compared.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any

_STACK_FRAMES = 40


class Condition(str, Enum):
    """How a rank's process is, as far as can be seen."""

    ANSWERS = "answers"
    STOPPED = "stopped"  # by a signal or a debugger
    SILENT = "silent"  # runs or sleeps, and does not answer
    ENDED = "ended"
    LEFT = "left"  # its process is there, but no rank of this world any more
    UNREACHABLE = "unreachable"  # on another host, which cannot be asked about it


@dataclass(frozen=True)
class Frame:
    """One line of a stack; `users` marks the user's own code. `text` is the source, where known."""

    file: str
    line: int
    function: str
    text: str = ""
    users: bool = False

    @property
    def place(self) -> str:
        """As people write it: `load (train.py:12)`."""
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Doing:
    """Something that a rank has begun and not ended.

    `waits` says that it needs other ranks to go on, `awaits` which ones (ranks of the world). `key` tells
    groups apart and `step` counts in one; both are equal on all ranks. `printed` is how often the rank has
    reported this wait.
    """

    call: str
    seconds: float
    waits: bool = False
    awaits: tuple[int, ...] = ()
    key: str = ""
    step: int = 0
    printed: int = 0


@dataclass(frozen=True)
class Status:
    """One rank at one moment.

    `idle` is the time since its last collective ended (None: it has had none), `last` what that was, `cpu`
    the cores that its process used over a short interval (None: unknown). The stack is that of the thread
    that joined the world, outermost frame first. `detail` says what is known where it does not answer.
    """

    rank: int
    host: str
    pid: int
    condition: Condition = Condition.ANSWERS
    detail: str = ""
    doing: tuple[Doing, ...] = ()
    idle: float | None = None
    last: str = ""
    cpu: float | None = None
    stack: tuple[Frame, ...] = ()

    @property
    def waiting(self) -> Doing | None:
        """What it has waited in for longest, if it waits for other ranks."""
        return max((each for each in self.doing if each.waits), key=lambda each: each.seconds, default=None)

    @property
    def place(self) -> str:
        """The user's line that it is in, or else the innermost one; empty if its stack is unknown."""
        own = [frame for frame in self.stack if frame.users] or list(self.stack)
        return own[-1].place if own else ""

    def shown_stack(self) -> tuple[Frame, ...]:
        """The stack without what has started the user's code, and without the outer frames of a long one.

        Of a rank that waits for others, what the user's code has called is left out too: it is Phalanx.
        """
        own = [i for i, frame in enumerate(self.stack) if frame.users] or [0]
        end = own[-1] + 1 if self.waiting is not None and len(self.stack) > 1 else len(self.stack)
        return self.stack[own[0] : end][-_STACK_FRAMES:]

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "condition": self.condition.value}


def status_of(data: dict[str, Any]) -> Status:
    """Read a Status back from `json`. Raises ValueError, KeyError or TypeError for anything else."""
    known = {field.name for field in fields(Status)}
    given = {name: value for name, value in data.items() if name in known}
    given["condition"] = Condition(given["condition"])
    given["doing"] = tuple(Doing(**{**each, "awaits": tuple(each["awaits"])}) for each in given["doing"])
    given["stack"] = tuple(Frame(**each) for each in given["stack"])
    return Status(**given)
