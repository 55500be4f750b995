"""A group of ranks that agree, move and commit: every collective of Phalanx goes through here.

    agree   every rank hands every other its ticket; different signatures raise on all ranks
    move    the transport posts and reads; its fences after the first are empty commit frames
    commit  the last fence: from there on the result counts

A rank takes part in one collective of a group at a time (a lock keeps threads apart); different groups
are independent of each other and share the links.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from phalanx.errors import ExhaustedError, InternalError, MisuseError, RankMismatchError, name_ranks
from phalanx.group import call_site, dtypes, rank_zero_block, ticket, tracing
from phalanx.group.link import COMMIT, DESCRIBE, HEADER, TICKET, Link
from phalanx.group.links import Switchboard
from phalanx.group.slow import LongWait, wait_longer
from phalanx.group.ticket import SIGNATURE, Operation
from phalanx.group.wire import give_up
from phalanx.launch.environment import LOOPBACK
from phalanx.misuse import silenced
from phalanx.transport.protocol import Fence, Transport
from phalanx.transport.reductions import Reduction

_REDUCTIONS = {int(reduction): reduction.name for reduction in Reduction}
_EXPLAIN_SECONDS = 2.0


Rest = Callable[[], None] | None
"""What is left to do once a collective is over, when its group may be used again."""
Handler = Callable[[list[bytes], Fence], Rest]
_GATHERING = {Operation.ALL_GATHER, Operation.GATHER}
_Peer = tuple[int, Link, deque[tuple[int, int, bytes]]]
"""A place, the link to it, and what has come from there."""
_OF_OBJECTS = {"all_gather_object", "gather_object"}
"""What would try to unpickle the nothing that a following rank gives."""
_NOT_TO_FOLLOW = {Operation.ARENA, Operation.WRAP, Operation.ALL_TO_ALL, Operation.ALL_REDUCE_SPARSE}


class Group:
    """Some ranks of one Switchboard, in an order of their own.

    `members` are ranks of the world that the links span; a rank of the group is a place in it. `name`
    must be equal on all members and new for every group of the world.
    """

    def __init__(self, board: Switchboard, members: Sequence[int], name: str, timeout: float) -> None:
        self.board, self.members, self.name, self.timeout = board, tuple(members), name, timeout
        self.size = len(self.members)
        self.rank = self.members.index(board.rank)
        self.channel = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
        self.sequence = 0
        self.lock = threading.RLock()
        self.since = self.until = 0.0  # when the last round began and ended: it waits where it has not ended
        self.awaiting = 0  # the first place that the present round waits for
        self.long: LongWait | None = None  # the last wait that was long
        self.labels: dict[int, str] = {}  # what models are called, by the tags of their tickets
        self._peers: list[_Peer] = []
        for place, member in enumerate(self.members):
            if member != board.rank:
                link = board.links[member]
                self._peers.append((place, link, link.boxes[self.channel]))
        self.near = [peer for peer in self._peers if peer[1].same_host]
        self._in_round = self._peers  # those with whom the present round is
        self.here = sorted([self.rank, *(place for place, _, _ in self.near)])  # the places on this host
        self.links = [link for _, link, _ in self._peers]
        self._doing: bytes = b""
        self.followers: tuple[int, ...] = ()
        self.throws_when_joined = False
        self.models_numbered = 0
        self.transport: Transport | None = None
        self.handlers: dict[tuple[int, int], Handler] = {}
        board.groups.add(self)

    def __str__(self) -> str:
        """What this rank is doing in this group right now, and where in the user's code."""
        what = ticket.describe(self._doing, dtypes.NAMES, _REDUCTIONS) if self._doing else "no call"
        return f"{what} at {call_site.here()}"

    @property
    def key(self) -> str:
        """What tells this group from others of its world, on all ranks."""
        return f"{self.channel:x}"

    def described(self) -> str:
        """The call that this rank is in, or was in last, with what else is known of it."""
        what = ticket.describe(self._doing, dtypes.NAMES, _REDUCTIONS) if self._doing else "no call"
        label = self.labels.get(ticket.decode(self._doing).tag & ~1) if self._doing else None
        return f"{what}{f': {label}' if label else ''} [group {self.name}, exchange {self.sequence}]"

    @property
    def address(self) -> str:
        """The address of this host at which ranks of the group on other hosts reach it."""
        for link in self.links:
            if not link.same_host:
                return str(link.sock.getsockname()[0])
        return LOOPBACK

    # -- agree ---------------------------------------------------------------------------------------

    def collective(self, wire: bytes) -> Collective:
        """Begin one collective whose encoded ticket is `wire`. Use as a context; call it to fence."""
        fence = Collective(self, wire)
        return fence if (recorder := tracing.recorder) is None else recorder.traced(fence, wire)

    def tickets(self, wire: bytes) -> list[bytes]:
        """Exchange tickets and return those of all ranks, in rank order.

        Raises RankMismatchError on every rank if the signatures differ, PeerLostError and PeerFailedError
        when a rank can no longer come, CollectiveTimeoutError after the group's timeout.
        """
        block = rank_zero_block.current()
        if block is not None and self.size > 1 and "rank-zero-collective" not in silenced:
            name = ticket.describe(wire, dtypes.NAMES, _REDUCTIONS)
            raise MisuseError(
                f"{name} inside {block}, which only rank 0 runs: it would wait for ranks that never come",
                f"call it outside of {block}, on every rank", self.rank,
            )  # fmt: skip
        if self.board.announced:
            self._refuse(wire)
        self.sequence += 1
        self._doing = wire
        got = [wire] * self.size
        self._round(TICKET, wire, got, self._peers)
        return self._compared(got)

    def _refuse(self, wire: bytes) -> None:
        raise MisuseError(
            f"{ticket.describe(wire, dtypes.NAMES, _REDUCTIONS)} after this rank has told the others that it failed "
            f"({self.board.announced}): they do not wait for it any more",
            "let that error end the process, or build a new process group on every rank", self.rank,
        )  # fmt: skip

    def _compared(self, got: list[bytes]) -> list[bytes]:
        mine = got[self.rank][: SIGNATURE.size]
        if self.followers:
            self.followers = ()
        for other in got:
            if other[: SIGNATURE.size] != mine:
                self._compare_active(got)
                break
        return got

    def _compare_active(self, got: list[bytes]) -> None:
        """Compare the tickets of those who are in a call of their own; note who only follows."""
        following = [place for place, wire in enumerate(got) if ticket.follows(wire)]
        active = [place for place in range(self.size) if place not in following]
        calls = {got[place][: SIGNATURE.size] for place in active}
        if len(calls) > 1:
            self._mismatch(got)
        self.followers = tuple(following)
        if not active or not following:
            return
        if self.throws_when_joined and self.rank in active:
            raise ExhaustedError("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        call = ticket.decode(got[active[0]])
        rooted = call.operation in (Operation.BROADCAST, Operation.SCATTER) and call.tag == 0
        if call.operation in _GATHERING and self.rank in active and call_site.is_within(_OF_OBJECTS):
            raise MisuseError(
                f"objects are gathered inside join() at {call_site.here()}; out of data, with none to give: "
                f"{name_ranks(following)}", "gather them before or after join(); inside, gather tensors", self.rank,
            )  # fmt: skip
        if call.operation in _NOT_TO_FOLLOW or (rooted and call.root in following):
            told = {p: ticket.describe(wire, dtypes.NAMES, _REDUCTIONS) for p, wire in enumerate(got)}
            told[self.rank] += f" at {call_site.here()}" if self.rank in active else ""
            raise RankMismatchError(told, self.rank, "Make this call before or after join(), or while all ranks run.")

    def begin_following(self, wire: bytes) -> None:
        """Send the ticket of a rank that takes part in whatever comes next; see follow.py. Hold the lock."""
        self.sequence += 1
        self._doing = wire
        self.since, self.awaiting = time.perf_counter(), 0
        self._send(TICKET, wire, self._peers)

    def has_begun(self) -> bool:
        """Whether some other rank's ticket for the next collective is here."""
        return any(box and box[0][0] == TICKET and box[0][1] > self.sequence for _, _, box in self._peers)

    def has_arrived(self) -> bool:
        """Whether every other rank's ticket for the present collective is here."""
        return all(box and box[-1][1] >= self.sequence for _, _, box in self._peers)

    def finish_following(self, wire: bytes) -> list[bytes]:
        """The tickets of all ranks, once begin_following has sent this one's."""
        got = [wire] * self.size
        self._collect(TICKET, got, self._peers)
        return self._compared(got)

    def fence(self) -> None:
        """Return when every rank has made this call as often as this one."""
        self.sequence += 1
        self._round(COMMIT, b"", None, self._peers)

    def fence_on_host(self) -> None:
        """Return when the ranks of this host have made this call as often. All ranks make it equally often."""
        self.sequence += 1
        self._round(COMMIT, b"", None, self.near)

    def look_for_lost(self, seconds: float = _EXPLAIN_SECONDS) -> None:
        """See Fence."""
        until = time.monotonic() + seconds
        self.board.wait_for_news(self.links, 0.0, self)
        while (left := until - time.monotonic()) > 0:
            self.board.wait_for_news(self.links, left, self)
        if seconds:
            give_up(self)

    def posting_fence(self) -> None:
        """The fence after tickets of which some only follow: those learn from the tickets what to post.

        It takes two numbers: what was posted before the tickets' fence is read after this one, and the
        parity of a fence's number tells transports where to post.
        """
        self.sequence += 1
        self.fence()

    def _round(self, kind: int, payload: bytes, got: list[bytes] | None, peers: list[_Peer]) -> None:
        self._send(kind, payload, peers)
        self._collect(kind, got, peers)

    def _send(self, kind: int, payload: bytes, peers: list[_Peer]) -> None:
        frame = HEADER.pack(len(payload), kind, self.channel, self.sequence) + payload
        for _, link, _ in peers:
            link.send(frame, self.board)

    def _collect(self, kind: int, got: list[bytes] | None, peers: list[_Peer]) -> None:
        board, sequence, self._in_round = self.board, self.sequence, peers
        started = self.since = time.perf_counter()
        deadline = 0.0
        for place, link, box in peers:
            while True:
                if not box:
                    self.awaiting = place
                    if not deadline:
                        slow, limit = board.slow_after, self.timeout
                        deadline = time.monotonic() + (limit if limit < slow else slow)
                    while not board.wait(link, box, self.links, deadline, self):
                        deadline = wait_longer(self, started)
                kind_got, sequence_got, payload_got = box.popleft()
                if sequence_got >= sequence:  # older ones are left from a collective that raised
                    break
            if kind_got != kind or sequence_got != sequence:
                raise self._out_of_step(place, kind_got, sequence_got, payload_got)
            if got is not None:
                got[place] = payload_got
        self.until = time.perf_counter()
        if (recorder := tracing.recorder) is not None:
            recorder.waited(self, self._doing, kind, started, self.until)

    def _out_of_step(self, place: int, kind: int, sequence: int, payload: bytes) -> Exception:
        other = f"step {sequence} of this group"
        if kind == TICKET:
            other = f"{ticket.describe(payload, dtypes.NAMES, _REDUCTIONS)}, {other}"
        elif kind == DESCRIBE:
            other = payload.decode()
        calls = {self.rank: f"{self}, step {self.sequence} of this group", place: other}
        return RankMismatchError(calls, self.rank, "One of them has left a collective by an exception and gone on.")

    def awaited(self) -> list[int]:
        """The places that the present round waits for: from the first one on, all whose frame is not here."""
        sequence = self.sequence
        late = [place for place, _, box in self._in_round if not (box and box[-1][1] >= sequence)]
        return [place for place in late if place >= self.awaiting]

    def _mismatch(self, got: list[bytes]) -> None:
        """Tell the others in words where this rank is, hear the same from them, raise."""
        said = str(self)
        frame = HEADER.pack(len(said.encode()), DESCRIBE, self.channel, self.sequence) + said.encode()
        calls = {place: ticket.describe(wire, dtypes.NAMES, _REDUCTIONS) for place, wire in enumerate(got)}
        calls[self.rank] = said
        for link in self.links:
            link.send(frame, self.board)
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        for place, link, box in self._peers:
            try:
                heard = self.board.wait(link, box, self.links, deadline, self)
            except RuntimeError:
                break  # a peer that ends right after its own error: its ticket says enough
            if heard and box[0][0] == DESCRIBE:
                calls[place] = box.popleft()[2].decode()
        raise RankMismatchError(calls, self.rank, _hint(got))

    # -- bytes ---------------------------------------------------------------------------------------

    def exchange(self, payload: bytes, call: str, operation: Operation = Operation.EXCHANGE) -> list[bytes]:
        """Give `payload` to every rank and return everybody's, in rank order. For small things; `call` names it."""
        with self.lock:
            got = self.tickets(ticket.plain(operation, 0, 0, 0, -1, ticket.tag_of(call)) + payload)
            return [b"" if ticket.follows(wire) else ticket.extra(wire) for wire in got]

    def close(self) -> None:
        """Forget what has come for this group. The links belong to the world and stay."""
        for _, link, _ in self._peers:
            link.boxes.pop(self.channel, None)


class _Fences:
    """What all fences of a group have in common."""

    _group: Group

    def on_host(self) -> None:
        """See Fence."""
        self._group.fence_on_host()

    def look_for_lost(self, seconds: float = _EXPLAIN_SECONDS) -> None:
        """See Fence."""
        self._group.look_for_lost(seconds)


class Collective(_Fences):
    """One collective in progress: a fence that compares tickets the first time it is called."""

    def __init__(self, group: Group, wire: bytes) -> None:
        self._group, self._wire = group, wire
        self.got: list[bytes] | None = None

    @property
    def step(self) -> int:
        """The number of the coming fence, equal on all ranks: each round checks it."""
        return self._group.sequence + 1

    def __enter__(self) -> Collective:
        self._group.lock.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.got is None and error is None:
            self._group.lock.release()
            raise InternalError("a collective ended without a fence")
        self._group.lock.release()

    def __call__(self) -> list[bytes]:
        """Fence. Returns the tickets of all ranks."""
        if self.got is None:
            self.got = self._group.tickets(self._wire)
            if self._group.followers:
                self._group.posting_fence()
        else:
            self._group.fence()
        return self.got


class Following(_Fences):
    """The fences of a rank that follows, from the posting fence on."""

    def __init__(self, group: Group) -> None:
        self._group, self._posted = group, False

    @property
    def step(self) -> int:
        """What is posted first belongs to the tickets' fence, which has passed."""
        return self._group.sequence + self._posted

    def __call__(self) -> None:
        """Fence."""
        if self._posted:
            self._group.fence()
        else:
            self._posted = True
            self._group.posting_fence()


def _hint(wires: Sequence[bytes]) -> str:
    kinds = {ticket.decode(wire).operation for wire in wires}
    if Operation.GRADIENTS in kinds and len(kinds) > 1:
        return (
            "Usual causes: ranks with different numbers of batches (write `with ddp.join():` around the loop), "
            "no_sync() or a training forward on some ranks only, a collective in code that only some ranks run."
        )
    if kinds == {Operation.GRADIENTS} and len({ticket.decode(wire).tag for wire in wires}) == 1:
        return "Usual cause: sync_policy() or no_sync(pattern) on some ranks only; every rank sets the same."
    if kinds == {Operation.GRADIENTS}:
        return "Usual cause: two wrapped models whose backwards run in a different order on some ranks."
    if len(kinds) > 1 or kinds == {Operation.EXCHANGE}:
        return "Usual cause: a branch that some ranks take and others do not, around one of these calls."
    return "Every rank must pass the same number of elements, dtype, operation and root."
