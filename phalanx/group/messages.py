"""Tensors from one rank to another: send and recv, with tags, beside the collectives and never in their way.

A message is cut into frames of at most a mebibyte, so that a ticket never waits behind more than one of
them. The last frame ends in a trailer that names dtype and size. Small messages are written by the caller;
large ones, and whatever follows one that is still on its way, by a sender thread.

A receive is matched with the earliest message of its source and tag; where several receives could take it,
the one that was posted first does. No thread waits for messages: whoever waits for a receive, or asks whether
it has finished, looks through the inboxes for all of them.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from phalanx.errors import CollectiveTimeoutError, MisuseError, RankMismatchError
from phalanx.group import call_site, dtypes
from phalanx.group.collectives import Copies, laid_out
from phalanx.group.group import Group
from phalanx.group.link import HEADER, PAYLOAD, Frame, Link
from phalanx.group.slow import LongWait
from phalanx.group.works import DoneWork, PendingWork, Worker, seconds_of

USER_CHANNEL, RING_CHANNEL = (
    1 << 62,
    1 << 61,
)  # bits in which a channel differs from that of the group's tickets
_FRAME_BYTES = 1 << 20
_SENT_BY_CALLER = 64 << 10
_SHARE_SECONDS = 0.2
_TRAILER = struct.Struct("<BQ")  # dtype, elements


class Messages:
    """All messages of one rank in one group; messages of different channels do not see each other."""

    def __init__(self, core: Group, channel: int = USER_CHANNEL) -> None:
        self._core = core
        self._channel = core.channel ^ channel
        self._posted: list[Receive] = []
        self._lock = threading.Lock()
        self._sender = Worker(f"phalanx sender of group {core.name}")
        self._own: deque[Frame] = deque()
        self._links: dict[int, Link] = {
            place: core.board.links[member] for place, member in enumerate(core.members) if place != core.rank
        }
        self._pieces: defaultdict[tuple[int, int], list[bytes]] = defaultdict(list)

    def send(self, place: int, tensor: Tensor, tag: int) -> Work:
        """Send to the rank at `place`. The tensor may be changed when the work has been waited for."""
        flat = laid_out(tensor, [])
        trailer = _TRAILER.pack(dtypes.CODES[flat.dtype], flat.numel())
        size = flat.numel() * flat.element_size()
        if size <= _SENT_BY_CALLER and not self._sender.pending:
            self._write(flat, size, trailer, place, tag)
            work = DoneWork()
            work.tensors = [tensor]
            return work
        pending = PendingWork([tensor], f"send(dst={place}, tag={tag})", self._core.rank)
        return self._sender.submit(lambda: self._write(flat, size, trailer, place, tag), pending)

    def recv(self, place: int, tensor: Tensor, tag: int) -> None:
        """Receive from the rank at `place`, now."""
        self.receive(tensor, [place], tag).wait()

    def receive(self, tensor: Tensor, places: Sequence[int], tag: int) -> Receive:
        """Post a receive into `tensor` from any of `places`."""
        work = Receive(self, tensor, places, tag, self._core.rank)
        with self._lock:
            self._posted.append(work)
        return work

    def close(self, reason: str = "the process group has been shut down") -> None:
        """End the sender thread and forget what has come."""
        self._sender.stop(reason)
        for link in self._links.values():
            link.boxes.pop(self._channel, None)

    def _write(self, flat: Tensor, size: int, trailer: bytes, place: int, tag: int) -> None:
        start, address = 0, flat.data_ptr()
        while True:
            count = min(_FRAME_BYTES, size - start)
            data = ctypes.string_at(address + start, count) if count else b""
            start += count
            last = start >= size
            # The lowest bit of the sequence says whether the message goes on.
            self._put(place, tag << 1 | (not last), data + trailer if last else data)
            if last:
                return

    def _put(self, place: int, sequence: int, payload: bytes) -> None:
        if place == self._core.rank:
            self._own.append((PAYLOAD, sequence, payload))
            return
        link = self._links[place]
        link.send(HEADER.pack(len(payload), PAYLOAD, self._channel, sequence) + payload, self._core.board)
        if link.lost:
            self._core.board.wait(
                link, (), [link], 0.0, f"send(dst={place}, tag={sequence >> 1}) at {call_site.here()}"
            )

    # -- receiving -----------------------------------------------------------------------------------

    def _box(self, place: int) -> deque[Frame]:
        return self._own if place == self._core.rank else self._links[place].boxes[self._channel]

    def count(self, places: Sequence[int]) -> int:
        """How many frames lie in the inboxes of `places`."""
        return sum(len(self._box(place)) for place in places)

    def progress(self) -> None:
        """Give the messages that have come to the receives that were posted for them."""
        with self._lock:
            self._posted = [work for work in self._posted if not self._serve(work)]

    def _serve(self, work: Receive) -> bool:
        for place in work.places if work.bound is None else (work.bound,):
            message = self._message(place, work.tag)
            if message is not None:
                work.fill(place, *message)
                return True
            if self._pieces.get((place, work.tag)):
                work.bound = place  # its beginning is here: nobody else may give the rest
        return False

    def _message(self, place: int, tag: int) -> tuple[list[bytes], bytes] | None:
        box, pieces = self._box(place), self._pieces[place, tag]
        at = 0
        while at < len(box):
            _, sequence, payload = box[at]
            if sequence >> 1 != tag:
                at += 1
                continue
            del box[at]
            pieces.append(payload)
            if not sequence & 1:
                del self._pieces[place, tag]
                return pieces, payload[-_TRAILER.size :]
        return None

    def wait(self, work: Receive, seconds: float | None) -> None:
        """Wait until `work` has its message."""
        core = self._core
        seconds = core.timeout if seconds is None else seconds
        began = time.monotonic()
        deadline = began + seconds
        links = [self._links[place] for place in work.places if place != core.rank]
        while True:
            before = self.count(work.places)
            self.progress()
            if work.is_completed():
                return
            now = time.monotonic()
            if now - began > _SHARE_SECONDS or now > deadline:
                work.report_long_wait(core, now - began, seconds)
            # Another thread may take what this one waits for, so no wait is long.
            share = min(deadline, now + _SHARE_SECONDS)
            awaited = next((link for link in links if not link.left), links[0] if links else None)
            if awaited is None:
                time.sleep(0.001)
            else:
                core.board.wait(awaited, _More(self, work, before), links, share, work)

    def poll(self, work: Receive) -> None:
        """Read what has come, without waiting."""
        for place in work.places:
            if place != self._core.rank:
                self._core.board.read(self._links[place])
        self.progress()


class _More:
    """True once there is something new for a receive to look at."""

    def __init__(self, messages: Messages, work: Receive, before: int) -> None:
        self._messages, self._work, self._before = messages, work, before

    def __bool__(self) -> bool:
        return self._work.filled or self._messages.count(self._work.places) > self._before

    def __len__(self) -> int:
        return int(bool(self))


class Receive(Work):
    """A posted receive."""

    def __init__(self, messages: Messages, tensor: Tensor, places: Sequence[int], tag: int, rank: int) -> None:
        super().__init__()
        self.places, self.tag = tuple(places), tag
        self.bound: int | None = None
        self.filled = False
        self._messages, self._tensor, self._rank = messages, tensor, rank
        self._site = call_site.here()
        self._error: BaseException | None = None
        self._long: LongWait | None = None
        self._source = -1
        self._future: Future[Any] | None = None

    def __str__(self) -> str:
        source = f"src={self.places[0]}" if len(self.places) == 1 else "any source"
        return f"recv({source}, tag={self.tag}) at {self._site}"

    def fill(self, place: int, pieces: list[bytes], trailer: bytes) -> None:
        """Take the message; called by whichever thread finds it."""
        self._source = place
        code, count = _TRAILER.unpack(trailer)
        tensor = self._tensor
        if code != dtypes.CODES.get(tensor.dtype) or count != tensor.numel():
            calls = {
                place: f"send({count} x {dtypes.NAMES.get(code, code)}, dst={self._rank}, tag={self.tag})",
                self._rank: f"recv({tensor.numel()} x {str(tensor.dtype).removeprefix('torch.')}, "
                f"src={place}, tag={self.tag}) at {self._site}",
            }
            hint = "The receiver must pass a tensor of the dtype and number of elements that the sender sends."
            self._error = RankMismatchError(calls, self._rank, hint)
        else:
            copies: Copies = []
            flat = laid_out(tensor, copies)
            address, end = flat.data_ptr(), flat.numel() * flat.element_size()
            at = 0
            for piece in pieces:
                size = min(len(piece), end - at)
                ctypes.memmove(address + at, piece, size)
                at += size
            with torch.no_grad():
                for plain, original in copies:
                    original.copy_(plain)
        self.filled = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is in the tensor."""
        if not self.filled:
            try:
                self._messages.wait(self, seconds_of(timeout))
            finally:
                if self._long is not None:
                    self._long.end()
        if self._error is not None:
            raise self._error
        return True

    def report_long_wait(self, core: Group, waited: float, limit: float) -> None:
        """It has been waited for for `waited` seconds: report that when due, and raise after `limit`."""
        if self._long is None:
            members = [core.members[place] for place in self.places]
            key, since = f"recv {core.key} {core.rank}", time.perf_counter() - waited
            awaited = partial(_unless_filled, weakref.ref(self), members)
            self._long = LongWait(core.board, str(self), key, self.tag, since, awaited)
            self._long.begin()
        if waited > limit:
            report = self._long.report()
            raise CollectiveTimeoutError(str(self), list(self.places), core.rank, limit, report=report)
        self._long.look()

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Say whether the message has come."""
        if not self.filled:
            self._messages.poll(self) if not self._messages._lock.locked() else None
        return self.filled

    def is_success(self) -> bool:
        """Say whether the message has come and fits."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error, if the message has come and does not fit."""
        return self._error

    def result(self) -> list[Any]:
        """Return the tensor."""
        return [self._tensor]

    def get_future(self) -> Future[Any]:
        """Return a future of the tensor; a thread waits for it."""
        if self._future is None:
            self._future = Future()
            threading.Thread(target=self._complete, args=(self._future,), name="phalanx recv", daemon=True).start()
        return self._future

    def _complete(self, future: Future[Any]) -> None:
        try:
            self.wait()
            future.set_result([self._tensor])
        except BaseException as error:
            future.set_exception(error)

    def source_rank(self) -> int:
        """Return the rank of the group that has sent the message."""
        return self._source

    _source_rank = source_rank


def _unless_filled(receive: weakref.ref[Any], members: Sequence[int]) -> Sequence[int]:
    """The ranks that a receive waits for."""
    work = receive()
    return () if work is None or work.filled else members


def checked_tag(tag: int) -> int:
    """Refuse a tag that cannot be sent."""
    if not 0 <= tag < 1 << 32:
        raise MisuseError(f"send or recv with tag={tag}: Tag must be nonnegative", "a tag from 0 to 2**32 - 1")
    return tag
