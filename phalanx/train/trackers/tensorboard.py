"""Metrics as TensorBoard scalars, through torch's own SummaryWriter.

The config and the status are texts under "config" and "status". Events reach the disk within seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from phalanx.train.trackers.writer import Ending, Run

_FLUSH_SECONDS = 5


class TensorBoard:
    """Writes an event file into the run's folder. Options are those of SummaryWriter."""

    def __init__(self, run: Run) -> None:
        options = {"flush_secs": _FLUSH_SECONDS, "purge_step": run.purge_step, **run.options}
        self._events = SummaryWriter(str(run.folder), **options)
        self._last_step = run.purge_step or 0
        if run.config:
            # Four leading spaces make Markdown show it as it is.
            text = json.dumps(dict(run.config), indent=2, default=str)
            self._events.add_text("config", "    " + text.replace("\n", "\n    "), self._last_step)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Add a scalar for each key."""
        self._last_step = max(self._last_step, step)
        for key, value in values.items():
            self._events.add_scalar(key, value, step)

    def close(self, ending: Ending) -> None:
        """Write the status and close the event file."""
        self._events.add_text("status", ending.value, self._last_step)
        self._events.close()


make = TensorBoard
