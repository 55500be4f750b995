"""A rank that `spawn` started: find the caller's modules again, load the function, call it.

Kept apart from `bootstrap.py`, which must stay free of multiprocessing for scripts that do not use it.
"""

from __future__ import annotations

import json
import pickle
import sys
from multiprocessing import process, resource_tracker
from multiprocessing import spawn as mp_spawn

from phalanx.launch import bootstrap


def main() -> None:
    """Run the rank that the command line describes; `spawn` puts it there."""
    run_dir, rank, parent, payload, tracker = json.loads(sys.argv[2])
    if parent is not None:
        bootstrap.die_with(parent)
    bootstrap.enable_stacks(run_dir, rank)
    bootstrap.recorded(run_dir, rank, lambda: _call(payload, rank, tracker))


def _call(payload: str, rank: int, tracker: int) -> None:
    # What multiprocessing's own spawned child does, so that its queues, locks and shared tensors can be
    # arguments: use the caller's resource tracker, and let objects know that they are being inherited.
    resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
    with open(payload, "rb") as file:
        process.current_process()._inheriting = True  # type: ignore[attr-defined]
        try:
            mp_spawn.prepare(pickle.load(file))
            function, args = pickle.load(file)
        finally:
            del process.current_process()._inheriting  # type: ignore[attr-defined]
    function(rank, *args)
