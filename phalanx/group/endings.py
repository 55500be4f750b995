"""What the links do when this process fails, ends or forks: say FAILED, say LEAVING, close without a word."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from types import TracebackType
from typing import Any

BOARDS: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every Switchboard of this process."""


def announce_failure(error: BaseException) -> None:
    """Tell every rank that this process is linked to that it has raised `error`."""
    for board in list(BOARDS):
        board.fail(error)


def _on_uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    if not issubclass(kind, (SystemExit,)):
        announce_failure(error.with_traceback(where))
    _previous_hook(kind, error, where)


def _at_exit() -> None:
    for board in list(BOARDS):
        if board.owner == os.getpid():
            board.leave("the process is ending")


def _in_forked_child() -> None:
    # A child (a DataLoader worker, say) must not keep a dead rank's connections open.
    for board in list(BOARDS):
        board.close(f"this process was forked from rank {board.rank} and is no rank itself")


_previous_hook = sys.excepthook
sys.excepthook = _on_uncaught
atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_forked_child)
