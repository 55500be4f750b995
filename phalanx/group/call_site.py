"""Where in the user's code a collective was called, for texts: the innermost line neither torch's nor ours.

A collective that another thread runs was called elsewhere: that thread is told where.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Container
from types import FrameType

import torch

_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_OWN_ROOT = os.path.dirname(os.path.dirname(__file__)) + os.sep


class _Told(threading.local):
    site = ""


_told = _Told()


def set_for_this_thread(site: str) -> None:
    """Answer `site` in this thread from now on."""
    _told.site = site


def here() -> str:
    """Name file and line, as `train.py:12`."""
    if _told.site:
        return _told.site
    frame = sys._getframe(1)
    last = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH_ROOT, _OWN_ROOT, "<")) and "/contextlib.py" not in file:
            return f"{file}:{frame.f_lineno}"
        last, frame = frame, frame.f_back  # type: ignore[assignment]
    return f"{last.f_code.co_filename}:{last.f_lineno}"


def is_within(names: Container[str]) -> bool:
    """Whether this call comes from one of torch's functions with these names."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in names and frame.f_code.co_filename.startswith(_TORCH_ROOT):
            return True
        frame = frame.f_back
    return False
