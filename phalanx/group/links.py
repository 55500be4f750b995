"""The waiting on all links of a process: its Switchboard.

Frames of all groups share a link; a frame names its channel (a group) and its place in that channel's
sequence, and lands in the channel's inbox whichever thread happens to read it. Three rules keep this
free of deadlock:

- a send that finds the socket full goes on reading, from every link, until there is room;
- a thread that waits either reads itself or sleeps until the reader has put something in an inbox;
- a link that breaks, or whose peer says FAILED, raises an alarm that every waiting thread checks.

Waiting spins on non-blocking reads for a few microseconds (only where ranks do not outnumber cores),
then blocks in poll(). Nobody spins on shared memory: the socket calls are the memory barrier.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from phalanx.errors import (
    CollectiveTimeoutError,
    ExhaustedError,
    MisuseError,
    PeerError,
    PeerFailedError,
    PeerLostError,
    RankMismatchError,
)
from phalanx.group import endings, slow
from phalanx.group.link import FAILED, HEADER, LEAVING, Link

_SPIN_SECONDS = 200e-6
_GRACE_SECONDS = 1.0  # for tickets that are on their way, when another rank has raised what they say


class Switchboard:
    """All links of one rank, and the waiting on them."""

    def __init__(self, rank: int, size: int, spin: bool) -> None:
        self.rank, self.size = rank, size
        self.links: dict[int, Link] = {}
        self.groups: weakref.WeakSet[Any] = weakref.WeakSet()  # the Groups that use these links
        self.alarm = False
        self.closed = ""
        self.announced = ""  # the error that this rank has told the others: none of them waits for it any more
        self.owner = os.getpid()
        self.watch: Any = None  # the Watchdog, once all ranks have met
        self.slow_after = slow.default()
        self._spin = _SPIN_SECONDS if spin else 0.0
        self._turn = threading.Condition()
        self._leading = False
        self._poll = select.poll()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wake_read, select.POLLIN)
        self._by_descriptor: dict[int, Link] = {}
        endings.BOARDS.add(self)

    def add(self, link: Link) -> None:
        """Take a new link into service."""
        self.links[link.peer] = link
        self._by_descriptor[link.sock.fileno()] = link
        self._poll.register(link.sock, select.POLLIN)

    def set_spin(self, spin: bool) -> None:
        """Allow or forbid spinning before blocking."""
        self._spin = _SPIN_SECONDS if spin else 0.0

    # -- waiting ---------------------------------------------------------------------------------

    def wait(self, link: Link, box: Sized, members: Iterable[Link], deadline: float, call: Any) -> bool:
        """Wait until `box`, an inbox of `link`, holds a frame; False if the deadline passes first.

        Raises PeerLostError, PeerFailedError or RankMismatchError when the frame can never come,
        CollectiveTimeoutError when another rank has given up waiting for it, and all of them
        when any of `members` is lost or has failed. `call` is what this rank is doing, for the texts.
        """
        now = time.perf_counter
        limit = now() + self._spin
        while not box:
            if self.closed:
                raise MisuseError(self.closed, rank=self.rank)
            frames = link.pump()
            if frames:
                if frames > 1 or not box:
                    self.wake()  # some of them are for other threads
                if box:
                    return True
            if self.alarm or link.lost or link.failed or link.left:
                self._raise_alarm()
                self._check(link, box, members, call)
                if box:
                    return True
            if now() >= limit:
                return self._sleep(link, box, members, deadline, call)
        return True

    def _sleep(self, link: Link, box: Sized, members: Iterable[Link], deadline: float, call: Any) -> bool:
        while True:
            with self._turn:
                while self._leading and not box and time.monotonic() < deadline:
                    self._turn.wait(0.05)
                if box:
                    return True
                leads, self._leading = not self._leading, True
            if leads:
                with self._ceding():
                    if self.alarm:  # raised by the thread that has led before: nothing more will come to wake this one
                        self._check(link, box, members, call)
                    remaining = deadline - time.monotonic()
                    if remaining > 0 and not box:
                        self._read_ready(remaining)
            if box:
                return True
            if self.closed:
                raise MisuseError(self.closed, rank=self.rank)
            if self.alarm:
                self._check(link, box, members, call)
            if not box and time.monotonic() >= deadline:
                return False

    def _read_ready(self, seconds: float) -> None:
        for descriptor, _ in self._poll.poll(min(seconds, 10.0) * 1000):
            if descriptor == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                continue
            link = self._by_descriptor.get(descriptor)
            if link is None:
                continue
            link.pump()
            if link.lost:
                self._retire(link)
            if link.lost or link.failed or link.left:
                self.alarm = True

    def _retire(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._poll.unregister(link.sock)

    @contextlib.contextmanager
    def _ceding(self) -> Iterator[None]:
        """Give up the lead at the end, and tell the others that there may be something to see."""
        try:
            yield
        finally:
            with self._turn:
                self._leading = False
                self._turn.notify_all()

    def read(self, link: Link) -> None:
        """Read what has come on one link, and wake whoever sleeps: it may be for another thread."""
        frames = link.pump()
        if link.lost or link.failed or link.left:
            self._raise_alarm()
        if frames:
            self.wake()

    def _raise_alarm(self) -> None:
        """Have every thread look whether what it waits for can still come."""
        if not self.alarm:
            self.alarm = True
            self.wake()

    def pump_all(self) -> None:
        """Read what has come on every link, and wake whoever sleeps."""
        for link in list(self.links.values()):
            if not link.lost:
                link.pump()
            if link.lost or link.failed or link.left:
                self.alarm = True
        self.wake()

    def wait_for_news(self, links: Iterable[Link], seconds: float, call: Any) -> None:
        """Read what comes on any link within `seconds`; raise if one of `links` is lost or has failed."""
        with self._turn:
            leads = not self._leading
            self._leading = True
            if not leads:
                self._turn.wait(min(seconds, 0.05))  # whoever leads says when it has read
        if leads:
            with self._ceding():
                self._read_ready(seconds)
        if self.alarm:
            for link in links:
                if (link.lost or link.failed) and not self._is_early(link):
                    self._check(link, (), links, call)

    def _is_early(self, link: Link) -> bool:
        """Whether a rank has just raised what this one will raise too, from tickets that are on their way."""
        report, now = link.failed, time.monotonic()
        return report is not None and "agreed" in report and now < report.setdefault("heard", now) + _GRACE_SECONDS

    def wake(self) -> None:
        """Wake the thread that blocks in poll, because an inbox was filled by another thread."""
        if self._leading:
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"x")

    def wait_writable(self, sock: socket.socket) -> None:
        """Block until `sock` takes more bytes, reading from every link meanwhile."""
        poll = select.poll()
        for each in {sock, *(link.sock for link in self.links.values() if not link.lost)}:
            poll.register(each, select.POLLIN | (select.POLLOUT if each is sock else 0))
        poll.poll(1000)
        self.pump_all()

    # -- faults ----------------------------------------------------------------------------------

    def _check(self, awaited: Link, box: Sized, members: Iterable[Link], call: Any) -> None:
        members = list(members)
        self._look_again(awaited, box, members, call)
        if box:
            return
        said = str(call)
        failed = [link for link in members if link.failed and "cause" not in link.failed]
        if awaited.left and all("agreed" in (link.failed or {}) for link in failed):
            failed = []  # they have raised what this rank is about to raise
        lost = [link for link in members if link.lost and not link.left and not link.failed]
        victims = [link for link in members if link.failed and "cause" in link.failed]
        if failed:
            report = failed[0].failed or {}
            if self._waits_for_the_same(report, call):
                late, told = report["late"], f"rank {failed[0].peer} has waited that long"
                raise CollectiveTimeoutError(said, late["missing"], call.rank, late["seconds"], told, late["report"])
            raise PeerFailedError(failed[0].peer, self.rank, said, report["exception"], report["traceback"])
        if lost:
            raise PeerLostError(lost[0].peer, self.rank, said, f"{lost[0].about}: {lost[0].lost}")
        if victims:
            raise self._same_cause((victims[0].failed or {})["cause"], victims[0], said)
        if awaited.left or awaited.lost:
            calls = {self.rank: said, awaited.peer: "nothing any more: it has finished and left"}
            raise RankMismatchError(
                calls, self.rank,
                "Usual cause: that rank made fewer calls, as it had fewer batches or left out a backward (NaN), or "
                "since this call is one that only some ranks make (`if phalanx.is_main():`). Instead: have every rank "
                "make the call; give every rank the same number of batches, or write `with ddp.join():` around the "
                "loop; call `ddp.skip()` in place of a backward that is left out.",
            )  # fmt: skip

    def _look_again(self, awaited: Link, box: Sized, members: list[Link], call: Any) -> None:
        """Read what is there; wait a little for what must be on its way, though another rank has failed by now."""
        until = time.monotonic() + _GRACE_SECONDS
        while True:
            for link in members:
                if not link.lost:
                    self.read(link)
            coming = any(link.failed and self._is_coming(link.failed, call) for link in members)
            if box or not coming or awaited.lost or awaited.failed or awaited.left or time.monotonic() > until:
                return
            time.sleep(0.001)

    def _is_coming(self, failed: dict[str, Any], call: Any) -> bool:
        """Whether a rank that has failed has ended the round that this one is in: so all have sent their part.

        Then this rank has to raise what that one has raised, from the same tickets, and not that it has.
        """
        ended = call in self.groups and failed["ended"].get(call.key, -1) >= call.sequence
        return ended or "agreed" in failed

    def _waits_for_the_same(self, failed: dict[str, Any], call: Any) -> bool:
        """Whether a rank has given up waiting in the round that this one is in, for ranks that this one awaits too."""
        late = failed.get("late")
        if late is None or call not in self.groups or late["rounds"].get(call.key) != call.sequence:
            return False
        return not set(call.awaited()).isdisjoint(late["missing"])

    def _same_cause(self, cause: dict[str, Any], told_by: Link, call: str) -> PeerError:
        """The error that names the first cause, told by a rank that only suffered from it."""
        peer = cause["peer"] if cause["peer"] != self.rank else told_by.peer
        if cause["kind"] == "lost":
            return PeerLostError(peer, self.rank, call, cause["detail"])
        return PeerFailedError(peer, self.rank, call, cause["exception"], cause["traceback"])

    def fail(self, error: BaseException) -> None:
        """Tell every other rank that this one has raised `error`."""
        if isinstance(error, ExhaustedError):
            return  # every rank raises it, from tickets that are on their way
        report: dict[str, Any] = {
            "exception": "".join(traceback.format_exception_only(type(error), error)).strip()[:4000],
            "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__))[-16000:],
        }
        groups = list(self.groups)
        report["ended"] = {group.key: group.sequence - (group.since > group.until) for group in groups}  # rounds
        self.announced = report["exception"]
        if isinstance(error, RankMismatchError):
            report["agreed"] = True
        elif isinstance(error, CollectiveTimeoutError):
            report["late"] = dict(missing=error.missing, seconds=error.seconds, report=error.report[:16000])
            report["late"]["rounds"] = {group.key: group.sequence for group in groups if group.since > group.until}
        elif isinstance(error, PeerLostError):
            report["cause"] = {"kind": "lost", "peer": error.peer, "detail": error.detail}
        elif isinstance(error, PeerFailedError):
            report["cause"] = dict(kind="failed", peer=error.peer, exception=error.exception, traceback=error.traceback)
        self._farewell(FAILED, json.dumps(report).encode())

    def _farewell(self, kind: int, payload: bytes) -> None:
        if self.closed or self.owner != os.getpid():
            return
        frame = HEADER.pack(len(payload), kind, 0, 0) + payload
        for link in self.links.values():
            if link.lost or not link.sending.acquire(timeout=0.2):
                continue
            try:
                link.sock.settimeout(0.2)  # a farewell may wait a little, never hang
                link.sock.sendall(frame)
                link.sock.setblocking(False)
            except OSError:
                link.lost = link.lost or "it has closed the connection"
            finally:
                link.sending.release()

    def leave(self, reason: str = "the process group has been shut down") -> None:
        """Say LEAVING and close every link. Only the owning process; harmless when repeated."""
        if self.closed:
            return
        if not self.announced and (cause := self._cause_of_leaving()) is not None:
            exception = "it has shut its process group down, since another rank was no more"
            report = {"exception": exception, "traceback": "", "ended": {}, "cause": cause}
            self._farewell(FAILED, json.dumps(report).encode())
        self._farewell(LEAVING, b"")
        self.close(reason)

    def _cause_of_leaving(self) -> dict[str, Any] | None:
        """Which rank was lost or has failed before this one leaves: others may wait for this one in a smaller group."""
        for link in self.links.values():
            if link.failed and "cause" not in link.failed and "agreed" not in link.failed:
                failed = {"exception": link.failed["exception"], "traceback": link.failed["traceback"]}
                return {"kind": "failed", "peer": link.peer, **failed}
            if link.lost and not link.left and not link.failed:
                return {"kind": "lost", "peer": link.peer, "detail": f"{link.about}: {link.lost}"}
        return None

    def close(self, reason: str) -> None:
        """Close every link without a word."""
        if self.closed:
            return
        self.closed = reason
        self.wake()
        if self.watch is not None:
            self.watch.close()
        for link in self.links.values():
            link.close()
        with contextlib.suppress(OSError):
            os.close(self._wake_write)
            os.close(self._wake_read)
