"""The course of a run from the first failure or interruption to its end. Pure: no process, no clock.

    RUNNING --failed-------> SETTLING   the others get a moment to print errors of their own
    SETTLING --time is up--> ENDING     SIGTERM to who is left
    any --interrupted------> ENDING     the signal is passed on
    ENDING --time is up----> KILLED     SIGKILL
    ENDING --interrupted---> KILLED     a second Ctrl-C does not wait

Every event returns the signal to send to all ranks that still run, or None.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

SETTLE_SECONDS = 1.0


class Phase(Enum):
    """How far a run has come."""

    RUNNING = "running"
    SETTLING = "settling"
    ENDING = "ending"
    KILLED = "killed"


@dataclass
class Course:
    """The state of one run; times are seconds on the caller's clock.

    `deadline` is when `tick` has something to do, or None. `interrupted_by` is the first signal that
    the launcher itself got, or None.
    """

    grace: float
    settle: float = SETTLE_SECONDS
    phase: Phase = Phase.RUNNING
    deadline: float | None = None
    interrupted_by: int | None = None

    def failed(self, now: float) -> int | None:
        """A rank has failed."""
        if self.phase is Phase.RUNNING:
            self.phase, self.deadline = Phase.SETTLING, now + self.settle
        return None

    def interrupted(self, signum: int, now: float) -> int | None:
        """The launcher got a signal that means: stop."""
        if self.interrupted_by is None:
            self.interrupted_by = signum
            if self.phase in (Phase.RUNNING, Phase.SETTLING):
                return self._end(signum, now)
        return self._kill()

    def expired(self, now: float) -> int | None:
        """The time limit of the whole run has passed."""
        return self._end(signal.SIGTERM, now) if self.phase in (Phase.RUNNING, Phase.SETTLING) else None

    def tick(self, now: float) -> int | None:
        """Time has passed."""
        if self.deadline is None or now < self.deadline:
            return None
        if self.phase is Phase.SETTLING:
            return self._end(signal.SIGTERM, now)
        return self._kill()

    def _end(self, signum: int, now: float) -> int:
        self.phase, self.deadline = Phase.ENDING, now + self.grace
        return signum

    def _kill(self) -> int:
        self.phase, self.deadline = Phase.KILLED, None
        return signal.SIGKILL
