"""Checkpoints of a run on many ranks: whole or not there, the same bytes for every rank, resumable.

    start = phalanx.checkpoint.resume("runs/a", model=ddp, optimizer=optimizer)     # at the top of a script
    phalanx.checkpoint.save("runs/a", step=step, model=ddp, optimizer=optimizer, keep=3)

saving.py and loading.py are the two stories; agreement.py is how ranks act together, folder.py what is on the
disk, content.py and tree.py what is in a file, preempt.py the end by a signal. See docs/checkpoints.md.
"""

from __future__ import annotations

from phalanx.checkpoint.failure import CheckpointError
from phalanx.checkpoint.loading import Loaded, best, latest, load, resume
from phalanx.checkpoint.preempt import Stop, preemption
from phalanx.checkpoint.saving import Handle, save

__all__ = [
    "CheckpointError",
    "Handle",
    "Loaded",
    "Stop",
    "best",
    "latest",
    "load",
    "preemption",
    "resume",
    "save",
]
