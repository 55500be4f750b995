"""What a process group consists of, and in which order it is closed."""

from __future__ import annotations

import os

from phalanx.group.accelerator import Accelerator
from phalanx.group.group import Group
from phalanx.group.messages import Messages
from phalanx.group.works import Worker
from phalanx.transport.protocol import Transport


class Parts:
    """All that has to be closed with a group; apart from it, so that closing needs no group."""

    def __init__(self, core: Group, transport: Transport, accelerator: Accelerator, owns_board: bool) -> None:
        self.core, self.transport, self.accelerator, self.owns_board = core, transport, accelerator, owns_board
        self.worker = Worker(f"phalanx collectives of group {core.name}")
        self.messages = Messages(core)
        self.closed = ""
        self._owner = os.getpid()

    def close(self, reason: str) -> None:
        """Close everything, in the process that has made it."""
        if self.closed or self._owner != os.getpid():
            return
        self.closed = reason
        if self.owns_board:
            self.core.board.leave(reason)  # first, so that threads that wait on the links end
        self.worker.stop(reason)
        self.messages.close(reason)
        self.accelerator.close()
        self.transport.close()
        self.core.close()
