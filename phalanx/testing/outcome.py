"""What became of each rank of a test world, and the one error that tells it."""

from __future__ import annotations

import enum
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class Ending(enum.Enum):
    """How a rank came to its end."""

    RETURNED = "returned"
    RAISED = "raised"
    KILLED = "was killed by a signal"
    EXITED = "exited without returning"
    HUNG = "was still running at the timeout"
    ENDED = "was ended, because another rank had failed and it had not noticed"


@dataclass(frozen=True)
class Outcome:
    """The end of one rank.

    `at` is in seconds since the world was started. `text` is the traceback of a rank that raised, the stacks
    of one that hung, and what is known of one that was killed or left. `exitcode` is that of the process: 0
    or a positive number, or minus the number of the signal; None for threads.
    """

    rank: int
    ending: Ending
    at: float
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    exitcode: int | None = None

    @property
    def ok(self) -> bool:
        return self.ending is Ending.RETURNED

    @property
    def sentence(self) -> str:
        what = self.ending.value
        if self.error is not None:
            what += f" {type(self.error).__name__}"
        return f"rank {self.rank} {what} after {self.at:.2f} s"


class WorldError(AssertionError):
    """Some ranks of a test world failed; the text has all of their tracebacks, the first in time on top.

    `outcomes` has the end of every rank, in order of rank. `errors` has, for each rank that failed, its
    exception, or the text about it where there is none; its order is that of the failures.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        failed = sorted((o for o in self.outcomes if not o.ok), key=_time_of_failure)
        self.errors: dict[int, BaseException | str] = {o.rank: o.text if o.error is None else o.error for o in failed}
        parts = [f"{len(failed)} of {len(self.outcomes)} ranks failed"]
        parts += [f"--- {o.sentence}\n{o.text.rstrip()}" for o in failed]
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.outcomes,)


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return each rank's value in order of rank, or raise `WorldError` if any rank failed."""
    if all(o.ok for o in outcomes):
        return [o.value for o in outcomes]
    error = WorldError(outcomes)
    first = next(iter(error.errors.values()))
    raise error from (first if isinstance(first, BaseException) else None)


def _time_of_failure(outcome: Outcome) -> tuple[bool, float, int]:
    # A rank that the test bed ended is a consequence, even where the clock says otherwise.
    return outcome.ending is Ending.ENDED, outcome.at, outcome.rank


def failure_text(error: BaseException) -> str:
    """Return the traceback from the rank's program on, without the frame of the test bed that called it."""
    trace = error.__traceback__
    below = trace.tb_next or trace if trace is not None else None
    return "".join(traceback.format_exception(type(error), error, below))
