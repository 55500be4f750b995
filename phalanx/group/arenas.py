"""Making memory that ranks of one host share: one of them makes it and passes its descriptor over the links."""

from __future__ import annotations

import os
import socket
import time
from collections import deque

from phalanx.group import ticket
from phalanx.group.group import Group
from phalanx.group.link import Link
from phalanx.group.slow import wait_longer
from phalanx.group.ticket import Operation
from phalanx.transport.arena import Arena


def make_arena(core: Group, size: int) -> Arena:
    """Make `size` bytes of memory on each host, which its ranks share. Every rank of the group."""
    with core.lock:
        core.tickets(ticket.plain(Operation.ARENA, 0, 0, size, 0))
        key = core.channel.to_bytes(8, "little") + core.sequence.to_bytes(8, "little")
        maker = core.here[0]
        if core.rank == maker:
            descriptor = os.memfd_create("phalanx")
            os.ftruncate(descriptor, size)
            for _, link, _ in core.near:
                socket.send_fds(link.side, [key], [descriptor])
        else:
            descriptor = _descriptor(core, core.board.links[core.members[maker]], key)
        return Arena(descriptor, size)


def _descriptor(core: Group, link: Link, key: bytes) -> int:
    started, deadline = time.perf_counter(), time.monotonic() + min(core.timeout, core.board.slow_after)
    while True:
        with link.side_lock:
            if key in link.descriptors:
                return link.descriptors.pop(key)
            link.side.settimeout(0.2)
            try:
                name, descriptors, _, _ = socket.recv_fds(link.side, 16, 1)
            except TimeoutError:
                name, descriptors = b"", []
            if descriptors:
                link.descriptors[name] = descriptors[0]
                continue
        if name == b"" and link.lost is None:
            core.board.read(link)
        if link.lost or link.failed or link.left:
            core.board.wait(link, deque(), core.links, 0.0, core)
        if time.monotonic() > deadline:
            deadline = wait_longer(core, started, [core.members.index(link.peer)])
