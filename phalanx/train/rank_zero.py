"""Work that rank 0 does alone, or first.

`rank_zero_first` is not a barrier. A barrier gives up after the group's timeout, and what rank 0 prepares
(a download, a data set to unpack) may take longer than any sensible one. So rank 0 writes into the store of
the default process group: when it begins who it is, and at the end how it went. The others look there a few
times a second, with any backend. Rank 0 must have begun within the store's timeout, as for any collective;
from then on they wait for as long as it lives. If it dies, its store is gone with it where it hosts the
store, and its process is gone for those that share its host; otherwise the launcher ends the run.

All code that runs on rank 0 alone is marked (`phalanx.group.rank_zero_block`), so that a collective in it
raises MisuseError on the phalanx backend, instead of waiting for ranks that never come.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from phalanx.errors import CollectiveTimeoutError, MisuseError, PeerFailedError, PeerLostError
from phalanx.group import call_site, rank_zero_block, slow, world
from phalanx.group.links import Switchboard
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.launch.environment import Place

P = ParamSpec("P")
R = TypeVar("R")

_CALL = "rank_zero_first()"
_CALL_PER_HOST = 'rank_zero_first(per="host")'
_ONLY = "rank_zero_only function "
_LOOK_FIRST, _LOOK_LONGEST = 0.001, 0.1  # seconds between two looks into the store
_TO_TELL = 2.0  # seconds that a failed rank 0 stays, so that the others can read why

_turns_taken: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def rank_zero_only(fn: Callable[P, R]) -> Callable[P, R | None]:
    """Decorate a function so that it runs on rank 0 and does nothing, returning None, on all others.

    Which rank this is, is looked up at each call. Not collective: rank 0 does not wait for anybody, and
    a collective inside raises MisuseError on the phalanx backend.
    """
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise MisuseError(
            f"rank_zero_only on {fn.__qualname__}, which is a generator or a coroutine: its body runs after "
            "the call, where nothing is known of rank 0",
            f"decorate a plain function, or write `if phalanx.is_main():` where {fn.__name__} is used",
        )
    name = _ONLY + getattr(fn, "__qualname__", repr(fn))

    @functools.wraps(fn)
    def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if world.rank() != 0:
            return None
        with rank_zero_block.entered(name):
            return fn(*args, **kwargs)

    return on_rank_zero


@contextmanager
def rank_zero_first(per: Literal["world", "host"] = "world") -> Iterator[None]:
    """Run the body on rank 0 first, then on all other ranks at once; with per="host" so on each host.

        with phalanx.rank_zero_first():
            path = prepare_unless_present("data")

    What rank 0 has written to a shared file system is there when the others begin. They wait for rank 0 as
    long as it works, whatever the group's timeout. If the body raises on rank 0, the others raise
    PeerFailedError with its text and do not run theirs; if rank 0 dies, PeerLostError. In a world of one
    it does nothing.

    per="host" is for what is on a disk of the host: local rank 0 of each host is first there, and the other
    ranks of its host wait for it alone. Hosts are as the launcher has numbered them; in a world that was set
    up without a launcher's variables all ranks are taken to be on one.

    Collective: every rank, same order. Works with the default process group of any backend. Rank 0's turn
    may hold no other collective (MisuseError on the phalanx backend).
    """
    if per not in ("world", "host"):
        raise MisuseError(f"rank_zero_first(per={per!r})", f"{_CALL} or {_CALL_PER_HOST}", world.rank())
    call = _CALL if per == "world" else _CALL_PER_HOST
    _refuse_where_others_never_come(call)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    turn = _Turn.next(call)
    if turn.is_leader:
        with turn.taken():
            yield
    else:
        turn.wait_for_leader()
        yield


def _refuse_where_others_never_come(call: str) -> None:
    block = rank_zero_block.current()
    if block is not None and block.startswith(_ONLY):
        raise MisuseError(
            f"{call} inside {block}: only rank 0 is here, and the others would be left out",
            f"use {call} outside of it, on every rank",
            0,
        )
    if not dist.is_initialized() and world.world_size() > 1:
        raise MisuseError(
            f"{call} before the {world.world_size()} ranks have met: each would run its body at once",
            "call phalanx.init() before",
            world.rank(),
        )


@dataclass(frozen=True)
class _Outcome:
    """How rank 0's turn ended; `exception` is empty if it went well."""

    exception: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class _Company:
    """The ranks among which one, the leader, is first: those of the world or of one host.

    `leads` says whether it is this rank. `leader` is its rank if a host's ranks are consecutive; where they are
    not, the leader itself says so when it begins.
    """

    key: str
    leads: bool
    leader: int
    size: int

    @classmethod
    def of(cls, call: str) -> _Company:
        """Return the company that this rank is in."""
        place = Place.from_environment()
        launched = (place.rank, place.world_size) == (dist.get_rank(), dist.get_world_size())
        if call == _CALL or not launched:
            return cls("", dist.get_rank() == 0, 0, dist.get_world_size())
        leader = place.rank - place.local_rank
        return cls(f"/host-{place.node_rank}", place.local_rank == 0, leader, place.local_world_size)


class _Turn:
    """One use of `rank_zero_first`, as seen by one rank, in the store of the default group."""

    def __init__(self, store: dist.Store, number: int, company: _Company, call: str) -> None:
        self.rank, self._company, self._leader, self._call = dist.get_rank(), company, company.leader, call
        self._store, key = store, f"phalanx/rank_zero_first/{number}{company.key}"
        self._begun, self._ended, self._seen = f"{key}/begun", f"{key}/ended", f"{key}/seen"
        where = f"{call} at {call_site.here()}"
        self._long = slow.LongWait(_board(), where, key, 0, time.perf_counter(), lambda: [self._leader])

    @classmethod
    def next(cls, call: str) -> _Turn:
        """Return this rank's next turn; ranks number them alike since all take part in each."""
        group = cast(dist.ProcessGroup, dist.group.WORLD)
        number = _turns_taken[group] = _turns_taken.get(group, 0) + 1
        return cls(_get_default_store(), number, _Company.of(call), call)

    @property
    def is_leader(self) -> bool:
        """Whether this rank is first."""
        return self._company.leads

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Be the leader: say that the turn begins, run the body, say how it ended."""
        if self._company.size == 1:
            yield
            return
        self._store.set(self._begun, json.dumps([self.rank, asdict(_Process.this())]))
        try:
            name = f"rank {self.rank}'s turn in {self._call}"
            with rank_zero_block.entered(name), slow.noted(_board(), slow.Note(name)):
                yield
        except BaseException as error:
            self._tell(_Outcome(_sentence(error), traceback.format_exc()))
            self._stay_until_seen()
            raise
        self._tell(_Outcome())

    def wait_for_leader(self) -> None:
        """Be another rank: return when the leader's turn has ended well, or raise."""
        try:
            with slow.noted(_board(), self._long):
                outcome = self._read_outcome()
        except dist.DistError as error:
            detail = "the store cannot be reached any more"
            raise PeerLostError(self._leader, self.rank, self._call, detail) from error
        if outcome.exception:
            raise PeerFailedError(self._leader, self.rank, self._call, outcome.exception, outcome.traceback)

    def _read_outcome(self) -> _Outcome:
        self._await_begin()
        self._leader, process = json.loads(self._store.get(self._begun))
        holder = _Process(**process)
        self._await_key(self._ended, lambda: self._complain_when_gone(holder))
        outcome = _Outcome(**json.loads(self._store.get(self._ended)))
        # A later group may use the same store and count from 1 again, so the last reader clears up.
        if self._store.add(self._seen, 1) == self._company.size - 1:
            for key in (self._begun, self._ended, self._seen):
                self._store.delete_key(key)
        return outcome

    def _await_begin(self) -> None:
        limit: float = self._store.timeout.total_seconds()  # type: ignore[attr-defined]  # not in the stubs
        deadline = time.monotonic() + limit

        def complain_when_late() -> None:
            if time.monotonic() > deadline:
                report = self._long.report()
                raise CollectiveTimeoutError(self._call, [self._leader], self.rank, limit, report=report)

        self._await_key(self._begun, complain_when_late)

    def _await_key(self, key: str, complain: Callable[[], None]) -> None:
        pause = _LOOK_FIRST
        while not self._store.check([key]):
            complain()
            self._say_when_slow()
            time.sleep(pause)
            pause = min(pause * 1.5, _LOOK_LONGEST)

    def _say_when_slow(self) -> None:
        # Where the others cannot be asked, one of those that wait speaks for all.
        if _board() is not None or self.rank == self._leader + 1:
            self._long.look()

    def _complain_when_gone(self, holder: _Process) -> None:
        # Its last word may have come between the look into the store and this one.
        if holder.is_gone() and not self._store.check([self._ended]):
            detail = f"process {holder.pid} of this host has ended"
            raise PeerLostError(self._leader, self.rank, self._call, detail)

    def _tell(self, outcome: _Outcome) -> None:
        self._store.set(self._ended, json.dumps(asdict(outcome)))

    def _stay_until_seen(self) -> None:
        """Keep the store alive, which may end with this process, until the others know why, within reason."""
        deadline = time.monotonic() + _TO_TELL
        with suppress(dist.DistError):
            while self._store.check([self._ended]) and time.monotonic() < deadline:
                time.sleep(_LOOK_LONGEST / 10)


@dataclass(frozen=True)
class _Process:
    """A process, told from a later one with the same number.

    `kernel` names the running kernel and its table of processes: only within one does a pid mean anything.
    It is empty where the system does not tell; then nothing is known of any process.
    """

    pid: int
    started: str
    kernel: str

    @classmethod
    def this(cls) -> _Process:
        """Describe the calling process."""
        try:
            kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(os.getpid(), _stat(os.getpid())[1], kernel + os.readlink("/proc/self/ns/pid"))
        except OSError:
            return cls(os.getpid(), "", "")

    def is_gone(self) -> bool:
        """Say whether this process is known to have ended; False if that cannot be seen from here."""
        if not self.kernel or self.kernel != _Process.this().kernel:
            return False
        try:
            state, started = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX" or started != self.started


def _stat(pid: int) -> tuple[str, str]:
    """Return the state letter and the start time of a process, as Linux tells them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _board() -> Switchboard | None:
    """The links over which the ranks of the default group can be asked what they are doing, if it has any."""
    group = dist.group.WORLD
    return group.board if isinstance(group, PhalanxProcessGroup) else None


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
