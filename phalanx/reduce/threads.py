"""Two threads in the backward of one wrapped model: their gradients would end up in one synchronisation, or in none."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch.distributed as dist

from phalanx import misuse

_ENGINE = "_engine_run_backward"


def refuse_second_thread(first: int, begins: str) -> None:
    """Raise MisuseError if thread `first` is inside a backward, while this one `begins` something of its own.

    What runs in a thread of the autograd engine itself (of a GPU, or deep inside nested backwards) has no caller of
    backward in its stack, and belongs to one that has.
    """
    other = _call_of_backward(sys._current_frames().get(first))
    if other is None or (begins == "backward" and _call_of_backward(sys._getframe()) is None):
        return
    name = next((thread.name for thread in threading.enumerate() if thread.ident == first), str(first))
    misuse.refuse(
        "backward-in-two-threads",
        f"{begins} of a wrapped model in thread {threading.current_thread().name!r}, while thread {name!r} is in its "
        f"backward at {other}",
        "one thread for each wrapped model, or a lock around forward and backward",
        dist.get_rank() if dist.is_initialized() else None,
    )


def _call_of_backward(frame: FrameType | None) -> str | None:
    """Where a thread with this stack has called backward, if it has."""
    while frame is not None and frame.f_code.co_name != _ENGINE:
        frame = frame.f_back
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
