"""Ask ranks what they are doing, all at once and for a limited time.

    request   the token of the rank that is asked (zeros if unknown), and one letter: status or peers
    answer    JSON, then the end of the connection

A rank listens on an abstract Unix socket, whose name says who it is: so a stopped rank is known too. It
answers its own user there, and whoever knows its token. Ranks of other hosts listen on a TCP port and answer
to their token only. A connection is taken by the kernel, whatever the process is doing; so one that is made
and not answered tells of a process that is stopped, or busy with Python's global lock in its hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.status.answer import Condition, Status, status_of
from phalanx.status.process import known_of, look

TOKEN_BYTES = 32
REQUEST_BYTES = TOKEN_BYTES + 1
STATUS, PEERS = b"S", b"P"
PREFIX = "phalanx-watch"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_NOBODY = 65534  # what the uid of a process in another user namespace reads as
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Peer:
    """Where a rank is asked: `unix` on this host, else the addresses in `tcp`, with its token."""

    rank: int
    pid: int
    host: str
    unix: str = ""
    tcp: tuple[tuple[str, int], ...] = ()
    token: str = ""

    def json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Peer:
        """Read it back from `json`."""
        return cls(**{**data, "tcp": tuple((host, port) for host, port in data["tcp"])})


@dataclass(frozen=True)
class Caller:
    """The process at the other end of a Unix socket, as the kernel tells it."""

    pid: int
    uid: int

    @classmethod
    def of(cls, sock: socket.socket) -> Caller:
        """Who is at the other end; for a connection that was made to a listener, who listens."""
        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(data)
        return cls(pid, uid)


def socket_name(pid: int, rank: int, size: int, world: str) -> str:
    """The name of a rank's Unix socket, without the byte that makes it abstract."""
    return f"{PREFIX}-{pid}-{rank}-{size}-{world}"


def ask(peers: Sequence[Peer], seconds: float) -> list[Status]:
    """What each of `peers` is doing, in the same order; the kernel's word for those that do not answer.

    Takes `seconds` and 0.2 more if some do not answer.
    """
    talks = [talk for peer in peers for talk in _talks(peer, STATUS)]
    _converse(talks, seconds)
    by_rank: dict[int, list[_Talk]] = {peer.rank: [] for peer in peers}
    for talk in talks:
        by_rank[talk.peer.rank].append(talk)
    found = {peer.rank: _first_status(by_rank[peer.rank]) for peer in peers}
    silent = [peer for peer in peers if found[peer.rank] is None]
    return [status for status in (found | _silent(silent, by_rank)).values() if status is not None]


def ask_peers(unix: str, seconds: float) -> dict[str, Any] | None:
    """What a rank of this host and user knows of its world: `run` and `peers`; None if it does not answer."""
    talks = _talks(Peer(0, 0, "", unix), PEERS)
    _converse(talks, seconds)
    for talk in talks:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(talk.heard)
            return {"run": str(said["run"]), "peers": [Peer.of(each) for each in said["peers"]]}
    return None


def listener_of(unix: str) -> Caller | None:
    """The process that listens on a Unix socket of this host; None if nobody does. It need not run."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        return Caller.of(sock) if sock.connect_ex("\0" + unix) == 0 else None


class _Talk:
    """One connection to one rank."""

    def __init__(self, peer: Peer, kind: bytes, family: int, address: Any) -> None:
        self.peer, self.heard, self.ended = peer, b"", False
        self.pid: int | None = None  # of the process that listens, on this host
        self._request = peer.token.encode().ljust(TOKEN_BYTES, b"\0") + kind
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        try:
            self.sock.connect(address)
            if family == socket.AF_UNIX:
                self._meet()
        except BlockingIOError:
            self.ended = family == socket.AF_UNIX  # too many wait there already
        except OSError:
            self.ended = True

    def _meet(self) -> None:
        """Look at who listens: the token is for our own user only, and nothing is to be had of a stopped process."""
        caller = Caller.of(self.sock)
        self.pid = caller.pid
        process = look(caller.pid)
        trusted = os.geteuid() == 0 or caller.uid in (os.geteuid(), _NOBODY)
        self.ended = not trusted or (process is not None and process.is_stopped)

    def write(self) -> None:
        """The connection is made: send the request."""
        try:
            self.sock.send(self._request)
        except OSError:
            self.ended = True

    def read(self) -> None:
        """Take in a piece of the answer."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.heard += data
        self.ended = not data


def _talks(peer: Peer, kind: bytes) -> list[_Talk]:
    if peer.unix:
        return [_Talk(peer, kind, socket.AF_UNIX, "\0" + peer.unix)]
    families = [socket.AF_INET6 if ":" in host else socket.AF_INET for host, _ in peer.tcp]
    return [_Talk(peer, kind, family, address) for family, address in zip(families, peer.tcp, strict=True)]


def _converse(talks: Sequence[_Talk], seconds: float) -> None:
    """Have all conversations until they end or the time is over."""
    deadline = time.monotonic() + seconds
    answered: set[int] = set()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for talk in talks:
            stack.callback(talk.sock.close)
            if not talk.ended:
                selector.register(talk.sock, selectors.EVENT_WRITE, talk)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, events in selector.select(left):
                talk = key.data
                if events & selectors.EVENT_WRITE:
                    talk.write()
                    selector.modify(talk.sock, selectors.EVENT_READ, talk)
                else:
                    talk.read()
                    answered |= {talk.peer.rank} if talk.ended and talk.heard else set()
                if talk.ended or talk.peer.rank in answered:
                    selector.unregister(talk.sock)


def _first_status(talks: Iterable[_Talk]) -> Status | None:
    for talk in talks:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return status_of(json.loads(talk.heard))
    return None


def _silent(peers: Sequence[Peer], talks: Mapping[int, Sequence[_Talk]]) -> dict[int, Status]:
    """What can be known of ranks that have not answered."""
    listening = {peer.rank: talk.pid for peer in peers for talk in talks[peer.rank] if talk.pid}
    here = [peer for peer in peers if peer.unix]
    known = known_of({listening.get(peer.rank, peer.pid) for peer in here}) if here else {}
    found = {}
    for peer in peers:
        condition, detail, cpu = Condition.UNREACHABLE, f"does not answer from {peer.host}", None
        pid = listening.get(peer.rank, peer.pid)
        if peer.unix:
            condition, detail, cpu = known[pid]
            if peer.rank not in listening and condition is not Condition.ENDED:
                condition, detail = Condition.LEFT, f"has left the others; its process {peer.pid} is still there"
        found[peer.rank] = Status(peer.rank, peer.host, pid, condition, detail, cpu=cpu)
    return found
