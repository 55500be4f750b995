"""How ranks find each other: through a c10d store, then over sockets that stay.

1. Every rank listens on an abstract Unix socket and writes its record (name, token, world size, pid) into
   the store, then waits for all records. Who does not appear is named.
2. Rank i connects to every lower rank over its Unix socket. If that works, the tokens match and a
   descriptor passes, the two are on one host, whatever hostnames and namespaces say.
3. Where it does not, the lower rank is told so through the store, opens a TCP port for the time of the
   meeting, and rank i connects there. On one host no port is ever opened.

Both sides prove that they read the store: the caller sends the listener's token and gets its own back.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import struct
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.errors import CollectiveTimeoutError, MisuseError, PeerLostError, name_ranks
from phalanx.group import departures, slow
from phalanx.group.link import Link
from phalanx.group.links import Switchboard
from phalanx.group.watchdog import Watchdog, world_name
from phalanx.status.asking import Peer, socket_name

_HELLO = struct.Struct("<32sIB")  # token of the listener, rank of the caller, which socket
_DATA, _SIDE = 0, 1
_log = logging.getLogger("phalanx")


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Switchboard:
    """Connect this rank to all others. Every rank of the world calls it, once per world.

    Raises CollectiveTimeoutError naming the ranks that did not come within `timeout`, and MisuseError if
    ranks disagree about the world size or two processes claim one rank.
    """
    return _Meeting(store, rank, size, timeout.total_seconds()).run()


class _Meeting:
    def __init__(self, store: dist.Store, rank: int, size: int, seconds: float) -> None:
        self.store, self.rank, self.size, self.seconds = store, rank, size, seconds
        self.began, self.say_after = time.monotonic(), slow.default()
        self.deadline = self.began + seconds
        self.token = os.urandom(16).hex()
        self.own_record = {"token": self.token, "pid": os.getpid(), "host": socket.gethostname()}
        self.records: dict[int, dict[str, Any]] = {}
        self.halves: dict[int, dict[int, socket.socket]] = {}
        self.tcp: set[int] = set()
        self.listeners: list[socket.socket] = []

    def run(self) -> Switchboard:
        board = Switchboard(self.rank, self.size, spin=False)
        try:
            if self.size == 1:
                board.watch = self._watchdog(board)
                return board
            self._publish()
            self._read_records()
            unreachable = [peer for peer in range(self.rank) if not self._connect_unix(peer)]
            self.store.set(f"unreachable/{self.rank}", json.dumps(unreachable))
            self._open_tcp_for(self._callers_by_tcp())
            for peer in unreachable:
                self._connect_tcp(peer)
            self._accept_all()
            for peer in sorted(self.halves):
                board.add(self._link(peer))
            board.watch = self._watchdog(board)
        except BaseException:
            for pair in self.halves.values():
                for sock in pair.values():
                    sock.close()
            board.close("the ranks did not meet")
            raise
        finally:
            for listener in self.listeners:
                listener.close()
        here = 1 + sum(link.same_host for link in board.links.values())
        threads = any(record["pid"] == os.getpid() for record in self.records.values())
        board.set_spin(not threads and here <= len(os.sched_getaffinity(0)))
        return board

    # -- records -----------------------------------------------------------------------------------

    def _publish(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0phalanx-{os.urandom(8).hex()}")
        listener.listen(self.size * 2)
        self.listeners.append(listener)
        claimed = self.store.add(f"claim/{self.rank}", 1)
        if claimed > 1:
            raise MisuseError(
                f"two processes claim rank {self.rank} of {self.size}",
                "give every process its own RANK; one job needs its own MASTER_PORT or store path", self.rank,
            )  # fmt: skip
        record = self.own_record | {"unix": listener.getsockname().hex(), "size": self.size}
        self.store.set(f"record/{self.rank}", json.dumps(record))

    def _read_records(self) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                self.records[peer] = self._get(f"record/{peer}", peer)
                theirs = self.records[peer]["size"]
                if theirs != self.size:
                    raise MisuseError(
                        f"rank {self.rank} was started with a world size of {self.size}, rank {peer} with {theirs}",
                        "start all ranks with the same WORLD_SIZE", self.rank,
                    )  # fmt: skip

    def _get(self, key: str, peer: int) -> Any:
        """Read a JSON value that `peer` writes, or say which ranks are missing."""
        pause = 0.002
        while not self._written(key):
            if time.monotonic() > self.deadline:
                raise self._late(peer)
            departures.check(peer, self.rank, self.size, "joining the process group")
            self._say_when_slow(peer)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        return json.loads(self.store.get(key))

    def _written(self, key: str) -> bool:
        # check(), not wait() with a short timeout: that prints a warning every time it runs out.
        try:
            return self.store.check([key])
        except (dist.DistNetworkError, RuntimeError) as error:
            where = "the store (it runs in rank 0 or in the launcher)"
            raise PeerLostError(0, self.rank, "joining the process group", f"{where}: {error}") from None

    def _missing(self) -> list[int]:
        missing = []
        for other in range(self.size):
            with contextlib.suppress(RuntimeError):
                if other != self.rank and not self.store.check([f"record/{other}"]):
                    missing.append(other)
        return missing

    def _say_when_slow(self, peer: int) -> None:
        """Say who has not come when that takes long, and after each doubling: the lowest rank that has."""
        waited = time.monotonic() - self.began
        if waited < self.say_after:
            return
        self.say_after *= 2
        missing = self._missing() or [peer]
        if self.rank == min(set(range(self.size)) - set(missing)):
            text = "phalanx: %d of %d ranks have waited %.1f s to join the process group: %s not there yet"
            verb = "is" if len(missing) == 1 else "are"
            here = self.size - len(missing)
            _log.warning(text, here, self.size, waited, f"{name_ranks(missing)} {verb}")

    def _late(self, peer: int) -> CollectiveTimeoutError:
        missing = self._missing()
        return CollectiveTimeoutError(
            "joining the process group", missing or [peer], self.rank, self.seconds,
            f"{self.size - len(missing or [peer])} of {self.size} ranks are here. Usual causes: the process "
            "ended before it got this far, another MASTER_ADDR or MASTER_PORT, a world size that counts "
            "ranks nobody starts.",
        )  # fmt: skip

    # -- connecting --------------------------------------------------------------------------------

    def _connect_unix(self, peer: int) -> bool:
        address = bytes.fromhex(self.records[peer]["unix"])
        return self._greet(peer, lambda: _connected(socket.AF_UNIX, address, 30.0))

    def _connect_tcp(self, peer: int) -> None:
        tried = []
        for host, port in self._get(f"tcp/{peer}", peer):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            if self._greet(peer, lambda f=family, a=(host, port): _connected(f, a, 5.0)):
                self.tcp.add(peer)
                return
            tried.append(f"{host}:{port}")
        record = self.records[peer]
        raise PeerLostError(
            peer, self.rank, "joining the process group",
            f"pid {record['pid']} on {record['host']} cannot be reached at {', '.join(tried)}: is a firewall "
            "between the hosts, or does MASTER_ADDR lead through another network?",
        )  # fmt: skip

    def _greet(self, peer: int, connect: Any) -> bool:
        """Make both sockets to `peer`; False if its listener is not there or is somebody else."""
        made: dict[int, socket.socket] = {}
        try:
            for which in (_DATA, _SIDE):
                sock = connect()
                made[which] = sock
                sock.sendall(_HELLO.pack(self.records[peer]["token"].encode(), self.rank, which))
                if _read(sock, 32) != self.token.encode():
                    raise ConnectionError("not the rank that wrote the record")
        except OSError:
            for sock in made.values():
                sock.close()
            return False
        self.halves[peer] = made
        return True

    def _callers_by_tcp(self) -> set[int]:
        """The higher ranks that could not reach this one over its Unix socket."""
        waiting = set(range(self.rank + 1, self.size))
        callers = set()
        while waiting:
            for peer in sorted(waiting):
                if self._written(f"unreachable/{peer}"):
                    waiting.discard(peer)
                    if self.rank in json.loads(self.store.get(f"unreachable/{peer}")):
                        callers.add(peer)
            if waiting:
                self._accept(0.02)  # a caller that has connected waits for its answer
            if waiting and time.monotonic() > self.deadline:
                raise self._late(min(waiting))
        return callers

    def _open_tcp_for(self, callers: set[int]) -> None:
        if not callers:
            return
        listener = socket.create_server(("", 0), backlog=self.size * 2)
        self.listeners.append(listener)
        port = listener.getsockname()[1]
        self.store.set(f"tcp/{self.rank}", json.dumps([[host, port] for host in _addresses(self.store)]))

    def _accept_all(self) -> None:
        expected = set(range(self.size)) - {self.rank}
        while True:
            missing = sorted(peer for peer in expected if len(self.halves.get(peer, {})) < 2)
            if not missing:
                return
            if time.monotonic() > self.deadline:
                raise self._late(missing[0])
            self._accept(0.5)

    def _accept(self, seconds: float) -> None:
        poll = select.poll()  # select() takes no descriptor above 1023
        for listener in self.listeners:
            poll.register(listener, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        for listener in [each for each in self.listeners if each.fileno() in ready]:
            sock, _ = listener.accept()
            sock.settimeout(5.0)
            try:
                token, peer, which = _HELLO.unpack(_read(sock, _HELLO.size))
                if token != self.token.encode() or peer not in self.records:
                    raise ConnectionError("a stranger")
                sock.sendall(self.records[peer]["token"].encode())
            except OSError:
                sock.close()
                continue
            self.halves.setdefault(peer, {})[which] = sock
            if listener.family != socket.AF_UNIX:
                self.tcp.add(peer)

    def _watchdog(self, board: Switchboard) -> Watchdog:
        """The one that says what this rank is doing; it listens for other hosts only where there are any."""
        records = self.records | {self.rank: self.own_record}
        world, tcp, peers = world_name(records[0]["token"]), None, []
        if self.tcp:
            tcp = socket.create_server(("", 0), backlog=self.size * 2)
            port = tcp.getsockname()[1]
            addresses = [[host, port] for host in _addresses(self.store)]
            self.store.set(f"watch/{self.rank}", json.dumps(addresses))
        for rank, record in sorted(records.items()):
            pid, unix, far = record["pid"], "", []
            if rank in self.tcp:
                far = self._get(f"watch/{rank}", rank)
            else:
                unix = socket_name(pid, rank, self.size, world)
            ways = tuple((str(host), int(port)) for host, port in far)
            peers.append(Peer(rank, pid, record["host"], unix, ways, record["token"]))
        return Watchdog(board, world, peers, tcp)

    def _link(self, peer: int) -> Link:
        record, pair = self.records[peer], self.halves[peer]
        if peer in self.tcp:
            for sock in pair.values():
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Link(peer, pair[_DATA], pair[_SIDE], peer not in self.tcp, f"pid {record['pid']} on {record['host']}")


def _connected(family: int, address: Any, seconds: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(seconds)
    try:
        sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _read(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionError("closed while greeting")
        data += piece
    return data


def _addresses(store: dist.Store) -> list[str]:
    """Addresses of this host that others may reach, the one on the way to the store's host first."""
    found: list[str] = []
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):
        for family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((store.host, store.port))
                found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found.append(str(address[0]))
    return list(dict.fromkeys(found)) or ["127.0.0.1"]
