"""The watchdog of one rank: a thread that sleeps until somebody asks what this rank is doing.

Once a second it wakes to look after collectives whose data is on the wire of another backend (wire.py).

Each Switchboard has one. It listens on an abstract Unix socket whose name says process, rank and world, and
where some ranks are on other hosts on a TCP port too; who may ask is said in status/asking.py. The thread
needs Python's global lock to answer, and nothing else that a stuck rank may hold: it reads what the groups
keep anyway, and the stack of the thread that made the links. Nothing else is done for it while nobody asks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import linecache
import os
import select
import socket
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from phalanx.group import endings, wire
from phalanx.group.slow import LongWait, Note
from phalanx.launch.environment import variable
from phalanx.status.answer import Doing, Frame, Status
from phalanx.status.asking import (
    PEERS,
    REQUEST_BYTES,
    STATUS,
    TOKEN_BYTES,
    Caller,
    Peer,
    ask,
    socket_name,
)

THREAD = "phalanx watchdog"
"""How the names of these threads begin. They serve a process, and belong to no rank's program."""

_ASK_SECONDS = 1.5  # how long others are waited for
_ANSWER_SECONDS = 1.0  # how long a caller may take
_CPU_SECONDS = 0.05
_BACKLOG = 128
_OWN_ROOT = os.path.dirname(os.path.dirname(__file__)) + os.sep
_FOREIGN = (
    os.path.dirname(torch.__file__) + os.sep, _OWN_ROOT, "<", sysconfig.get_paths()["stdlib"] + os.sep,
    sysconfig.get_paths()["purelib"] + os.sep, sysconfig.get_paths()["platlib"] + os.sep,
)  # fmt: skip


class Watchdog:
    """Answers for the rank of `board`, and asks the others. `peers` are all ranks of the world, itself included."""

    def __init__(self, board: Any, world: str, peers: Sequence[Peer], tcp: socket.socket | None = None) -> None:
        self.notes: list[Note | LongWait] = []
        self.thread = threading.get_ident()  # the one whose stack is shown
        self._board = weakref.ref(board)
        self._peers = {peer.rank: peer for peer in peers}
        self._me = self._peers[board.rank]
        self._owner = os.getpid()
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners = [unix, *([tcp] if tcp is not None else [])]
        self._ending, self._end = socket.socketpair()  # a byte in the second ends the thread
        self._sockets = [*self._listeners, self._ending]
        unix.bind("\0" + socket_name(os.getpid(), board.rank, board.size, world))
        unix.listen(_BACKLOG)
        for listener in self._listeners:
            listener.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name=f"{THREAD} of rank {board.rank}", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(board, self.close)
        self._finalizer.atexit = False

    def ask(self, wait: LongWait | None = None) -> list[Status]:
        """What every rank of the world is doing, in order; `wait` is what this one waits in."""
        started, used = time.monotonic(), time.process_time()
        others = [peer for peer in self._peers.values() if peer is not self._me]
        found = {each.rank: each for each in ask(others, _ASK_SECONDS)}
        time.sleep(max(0.0, started + _CPU_SECONDS - time.monotonic()))  # or the asking is all that is measured
        cpu = (time.process_time() - used) / max(time.monotonic() - started, 1e-6)
        mine = self.status(cpu, wait)
        if mine is not None:
            found[mine.rank] = mine
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        """End the thread and give the sockets back. In a forked child only the sockets are there."""
        self._finalizer.detach()
        if self._owner != os.getpid():
            _close([*self._sockets, self._end])
            return
        with contextlib.suppress(OSError):
            self._end.send(b"x")
        self._end.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_ANSWER_SECONDS)

    # -- answering -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        looks = wire.Looks()
        try:
            while self._ending not in (ready := _readable(self._sockets, wire.LOOK_SECONDS)):
                if not ready:
                    self._look(looks)
                    continue
                callers = self._accepted()
                started, used = time.monotonic(), time.process_time()
                _readable([self._ending], _CPU_SECONDS)
                cpu = (time.process_time() - used) / (time.monotonic() - started)
                for caller in callers + self._accepted():
                    with caller, contextlib.suppress(OSError):
                        self._answer(caller, cpu)
        finally:
            _close(self._sockets)

    def _look(self, looks: wire.Looks) -> None:
        board = self._board()
        if board is not None:
            looks.look([group for group in _copied(board.groups) if _is_taken(group.lock)], board.slow_after)

    def _accepted(self) -> list[socket.socket]:
        """All who have connected by now."""
        found: list[socket.socket] = []
        for listener in self._listeners:
            with contextlib.suppress(OSError):  # that nobody is left, or no descriptor
                while True:
                    found.append(listener.accept()[0])
        return found

    def _answer(self, caller: socket.socket, cpu: float) -> None:
        """Answer one caller, or close its connection without a word."""
        caller.settimeout(_ANSWER_SECONDS)
        request = b""
        while len(request) < REQUEST_BYTES:
            data = caller.recv(REQUEST_BYTES - len(request))
            if not data:
                return
            request += data
        token, kind = request[:TOKEN_BYTES], request[TOKEN_BYTES:]
        own_user = caller.family == socket.AF_UNIX and Caller.of(caller).uid in (os.geteuid(), 0)
        if kind == STATUS and (own_user or token == self._me.token.encode()):
            status = self.status(cpu)
            caller.sendall(json.dumps(status.json() if status else {}).encode())
        elif kind == PEERS and own_user:
            run = variable("PHALANX_RUN_ID", variable("TORCHELASTIC_RUN_ID", ""))
            peers = [peer.json() for peer in self._peers.values()]
            caller.sendall(json.dumps({"run": run, "peers": peers}).encode())

    def status(self, cpu: float, wait: LongWait | None = None) -> Status | None:
        """What this rank is doing now; None if its links are no more. `wait` stands for the call it is about."""
        board = self._board()
        if board is None:
            return None
        now, frame = time.perf_counter(), self._frame()
        boards = [each for each in _copied(endings.BOARDS) if each.watch and each.watch.thread == self.thread]
        groups = [(each is board, group) for each in boards for group in _copied(each.groups)]
        site = _site(frame)
        doing = [_doing(group, now, site, is_own) for is_own, group in groups if _is_taken(group.lock)]
        doing += [note.doing() for each in boards for note in list(each.watch.notes)]
        if wait is not None:
            doing = [each for each in doing if (each.key, each.step) != (wait.key, wait.step)] + [wait.doing()]
        last = max((group for _, group in groups if group.since), key=_left, default=None)
        return Status(
            board.rank, self._me.host, os.getpid(), doing=tuple(doing), cpu=cpu, stack=_stack(frame),
            idle=None if last is None else max(now - _left(last), 0.0),
            last="" if last is None else last.described(),
        )  # fmt: skip

    def _frame(self) -> FrameType | None:
        frames = sys._current_frames()
        return frames.get(self.thread) or frames.get(threading.main_thread().ident or 0)


def world_name(token: str) -> str:
    """The name of a world, from the token of its rank 0, which is not to be read from it."""
    return hashlib.blake2b(token.encode(), digest_size=4).hexdigest()


def _doing(group: Any, now: float, site: str, is_own: bool) -> Doing:
    """What a rank does in a group whose lock is taken: it waits for others, or works in a collective.

    Groups of other links have ranks of their own, which mean nothing in this world.
    """
    call, since, until, long = group.described() + site, group.since, group.until, group.long
    if since <= until:
        return wire.doing(group, call, now) if is_own and wire.is_out(group) else Doing(call, now - until)
    if not is_own:
        return Doing(call, now - since, waits=True)
    if long is not None and long.step == group.sequence:
        doing: Doing = long.doing()
        return doing
    awaits = tuple(group.members[place] for place in group.awaited())
    return Doing(call, now - since, True, awaits, group.key, group.sequence)


def _left(group: Any) -> float:
    """When a rank was last in a collective of a group, on the clock of perf_counter."""
    latest: float = max(group.since, group.until)
    return latest


def _is_taken(lock: Any) -> bool:
    if lock.acquire(False):
        lock.release()
        return False
    return True


def _copied(things: Any) -> list[Any]:
    """The members of a set that another thread may change meanwhile."""
    for _ in range(100):
        with contextlib.suppress(RuntimeError):
            return list(things)
    return []


def _site(frame: FrameType | None) -> str:
    """The user's line that has called Phalanx, if the innermost calls of a stack are of Phalanx."""
    ours = False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_OWN_ROOT):
            ours = True
        elif not file.startswith(_FOREIGN):
            return f" at {file}:{frame.f_lineno}" if ours else ""
        frame = frame.f_back
    return ""


def _stack(frame: FrameType | None) -> tuple[Frame, ...]:
    frames = []
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        users = not file.startswith(_FOREIGN)
        # Only the user's source is read: the others' may lie where reading hangs.
        text = linecache.getline(file, line, frame.f_globals).strip() if users else ""
        frames.append(Frame(file, line, frame.f_code.co_name, text, users))
        frame = frame.f_back
    return tuple(reversed(frames))


def _readable(socks: Sequence[socket.socket], seconds: float | None = None) -> list[socket.socket]:
    """Sleep until some of `socks` can be read (in poll: select() takes no descriptor above 1023)."""
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(None if seconds is None else seconds * 1000)}
    return [sock for sock in socks if sock.fileno() in ready]


def _close(socks: Sequence[socket.socket]) -> None:
    for sock in socks:
        sock.close()
