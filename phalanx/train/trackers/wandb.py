"""Metrics in Weights & Biases.

A run that is resumed in the same folder goes on in the same run there: its id is kept in the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

import wandb

from phalanx.train.trackers.averaging import STEP
from phalanx.train.trackers.identity import kept_identity
from phalanx.train.trackers.writer import Ending, Run

_EXIT_CODES = {Ending.FINISHED: 0, Ending.FAILED: 1, Ending.KILLED: 143}


class WandB:
    """Writes to a run of its own. Options are those of wandb.init: project, entity, mode and so on."""

    def __init__(self, run: Run) -> None:
        name = kept_identity(run.folder / "wandb.id", lambda: uuid4().hex)
        defaults = {"dir": str(run.folder), "config": dict(run.config), "id": name, "resume": "allow"}
        self._run = wandb.init(**{**defaults, **run.options})
        # wandb's own step may only grow, and drops what comes later for an earlier one.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log the values."""
        self._run.log({**values, STEP: step})

    def close(self, ending: Ending) -> None:
        """Finish the run: wait until everything is uploaded, or on disk in the offline mode."""
        self._run.finish(exit_code=_EXIT_CODES[ending])


make = WandB
