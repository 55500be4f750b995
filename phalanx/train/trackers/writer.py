"""What a tracker writes to: the seam between `phalanx.tracker` and one library or file format.

Writers exist on rank 0 only. Each is in a file of its own, which imports the library that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol


class Ending(str, Enum):
    """How a run ended."""

    FINISHED = "finished"
    FAILED = "failed"  # by an exception
    KILLED = "killed"  # by SIGTERM or Ctrl-C


@dataclass(frozen=True)
class Run:
    """The run that a writer is made for.

    `folder` exists. `options` are keyword arguments for this writer's library. What was logged at
    `purge_step` and later, in an earlier life of a resumed run, does not count any more.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    purge_step: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Writer(Protocol):
    """Writes the metrics of one run somewhere."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Write what was measured at one step. What is written survives a SIGKILL a few seconds later."""

    def close(self, ending: Ending) -> None:
        """Write how the run ended and give everything back. Called once."""
