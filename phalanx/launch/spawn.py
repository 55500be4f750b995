"""`spawn`: start ranks from a script or a notebook cell, as torch.multiprocessing.spawn does.

The ranks are started, watched and ended by the same supervisor as under `phalanx run`. The function
reaches them as multiprocessing would bring it, by name; where it has no importable name, because it
was defined in a notebook cell, at a prompt, or inside another function, it travels by value.
"""

from __future__ import annotations

import atexit
import io
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import uuid
from collections import ChainMap
from collections.abc import Callable, Sequence
from multiprocessing import context, popen_spawn_posix, resource_tracker
from multiprocessing import spawn as mp_spawn
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

from phalanx.errors import MisuseError, PhalanxError
from phalanx.launch import environment, machine, ports
from phalanx.launch.course import Course
from phalanx.launch.environment import Launcher, Place
from phalanx.launch.supervisor import Start, Supervisor
from phalanx.launch.verdict import Ending, first_failure, left_early

_GRACE = 5.0
_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from phalanx.launch.spawned import main; main()"


class SpawnError(PhalanxError):
    """A spawned rank failed, or the ranks did not end in time.

    Fields: `rank` (that failed first; None for a timeout), `pid`, `exit_code` (128 + signal for a
    death by signal), `exception` (its type and message, or None), `traceback` (its text, or "").
    """

    def __init__(self, what: str, first: Ending | None = None) -> None:
        record = first.record if first is not None else None
        self.rank = first.rank if first is not None else None
        self.pid = first.pid if first is not None else None
        self.exit_code = first.exit_code if first is not None else None
        self.exception = record.summary if record is not None else None
        self.traceback = record.traceback if record is not None else ""
        text = f"\nTraceback of rank {self.rank}:\n{self.traceback.rstrip()}" if self.traceback else ""
        super().__init__(what + text)


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 2,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
    timeout: float | None = None,
) -> SpawnedRanks | None:
    """Start `nprocs` processes on this host that call `fn(rank, *args)`, and wait for them.

    Each has the launcher's variables, so `phalanx.init()` joins them to one world, and its share of
    the cores. The first failure ends all: SpawnError carries that rank's traceback. So does passing
    `timeout` (seconds for the whole of it). With `join=False` returns at once an object whose `join`
    does the waiting; the calling thread must then outlive the ranks. Ranks end with this process,
    whatever ends it, so `daemon` changes nothing.
    """
    if not callable(fn):
        raise MisuseError(
            f"spawn: fn is {type(fn).__name__}, not a function", "phalanx.spawn(train, args=(...), nprocs=2)"
        )
    if not isinstance(nprocs, int) or nprocs < 1:
        raise MisuseError(f"spawn: nprocs={nprocs!r} starts no rank", "nprocs=2")
    if start_method != "spawn":
        raise MisuseError(
            f"spawn: start_method={start_method!r}: a forked rank would inherit locks that threads hold here",
            'start_method="spawn"',
        )
    ranks = SpawnedRanks(
        fn, tuple(args), nprocs, timeout, tied=join or threading.current_thread() is threading.main_thread()
    )
    if not join:
        return ranks
    ranks.join()
    return None


class SpawnedRanks:
    """The ranks of one `spawn(..., join=False)`."""

    def __init__(
        self, fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, timeout: float | None, tied: bool
    ) -> None:
        self._timeout = timeout
        self._began = time.monotonic()
        if nprocs > 1 and not ports.loopback_works():
            raise MisuseError(f"spawn: {ports.LOOPBACK_IS_DOWN}", ports.BRING_LOOPBACK_UP)
        self._port = ports.reserve()
        self._supervisor = Supervisor(Course(_GRACE))
        self._closed = False
        self._owner = os.getpid()
        try:
            self._start(fn, args, nprocs, tied)
        except BaseException:
            self._close()
            raise
        atexit.register(self._close)

    def pids(self) -> list[int]:
        """The process id of each rank."""
        return self._supervisor.pids

    def join(self, timeout: float | None = None) -> bool:
        """Wait for all ranks, at most `timeout` seconds; True once all have ended well.

        Raises SpawnError if one failed; then all have ended. Ctrl-C is passed on to the ranks and
        raised again once they have ended; a second one kills them.
        """
        if self._closed:
            return True
        until = None if timeout is None else time.monotonic() + timeout
        interrupt = None
        while True:
            try:
                if not self._step(until):
                    break
            except KeyboardInterrupt as error:
                interrupt = error
                self._supervisor.send(self._supervisor.course.interrupted(signal.SIGINT, time.monotonic()))
            if interrupt is None and until is not None and time.monotonic() >= until and self._supervisor.running:
                return False
        self._supervisor.finish()
        endings = self._supervisor.endings()
        self._close()
        if interrupt is not None:
            raise interrupt
        self._raise_for(endings)
        return True

    def _step(self, until: float | None) -> bool:
        now = time.monotonic()
        course = self._supervisor.course
        longest = 0.25
        if until is not None:
            longest = min(longest, max(0.0, until - now))
        if self._timeout is not None:
            left = self._began + self._timeout - now
            if left <= 0:
                self._supervisor.send(course.expired(now))
            else:
                longest = min(longest, left)
        return self._supervisor.step(longest)

    def _raise_for(self, endings: Sequence[Ending]) -> None:
        first = first_failure(endings)
        if first is not None:
            early = left_early(endings)
            others = [
                f"rank {ending.rank} {'left early: ' if ending in early else ''}{ending.describe()}"
                for ending in endings
                if ending is not first
            ]
            raise SpawnError("; ".join([f"spawn: rank {first.rank} failed first: {first.describe()}", *others]), first)
        stopped = [ending for ending in endings if ending.stopped is not None]
        if stopped:
            where = [f"rank {ending.rank}" + (f" in {ending.doing}" if ending.doing else "") for ending in stopped]
            raise SpawnError(f"spawn: still running after timeout={self._timeout:g} s: " + ", ".join(where))

    def _start(self, fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, tied: bool) -> None:
        handles = _Handles()
        try:
            self._supervisor.start(self._described(fn, args, nprocs, tied, handles))
        finally:
            handles.close()

    def _described(
        self, fn: Callable[..., Any], args: tuple[Any, ...], nprocs: int, tied: bool, handles: _Handles
    ) -> list[Start]:
        payload = os.path.join(self._supervisor.run_dir, "payload")
        with open(payload, "wb") as file:
            file.write(_pickled(fn, args, handles))
        tracker = resource_tracker.getfd()
        threads = environment.requested_threads() or max(1, machine.cores() // nprocs)
        run_id = uuid.uuid4().hex[:8]
        starts = []
        for rank in range(nprocs):
            place = Place(
                rank=rank,
                world_size=nprocs,
                local_rank=rank,
                local_world_size=nprocs,
                master_addr=environment.LOOPBACK,
                master_port=self._port.getsockname()[1],
                launcher=Launcher.PHALANX,
                run_id=run_id,
            )
            described = json.dumps([self._supervisor.run_dir, rank, os.getpid() if tied else None, payload, tracker])
            argv = [
                os.fsdecode(mp_spawn.get_executable()),
                "-u",
                "-c",
                _CHILD,
                json.dumps(_search_path()),
                described,
            ]
            env = environment.child_environment(place, threads)
            passed = [fd for fd in (tracker, *handles.fds) if fd is not None]
            starts.append(Start(rank, argv, env, None, passed, reads_input=rank == 0))
        return starts

    def _close(self) -> None:
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self._close)
        self._supervisor.close()
        self._port.close()


class _Handles:
    """Stands in for multiprocessing's process object while arguments are pickled: collects descriptors."""

    method = "spawn"
    DupFd = popen_spawn_posix._DupFd

    def __init__(self) -> None:
        self.fds: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """A descriptor of its own for each reference, as the child closes each; the number stays."""
        self.fds.append(os.dup(fd))
        return self.fds[-1]

    def close(self) -> None:
        """Close our side, once the ranks have theirs."""
        while self.fds:
            os.close(self.fds.pop())


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """cloudpickle, with what multiprocessing and torch know about pickling for a child."""

    dispatch_table = ChainMap(
        {},
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]  # not in the stubs
        cloudpickle.Pickler.dispatch_table,
    )


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], handles: _Handles) -> bytes:
    """Two pickles: what a child needs to find the caller's modules again, and the call."""
    preparation = mp_spawn.get_preparation_data(multiprocessing.current_process().name)
    if not os.path.exists(preparation.get("init_main_from_path", "")):
        preparation.pop("init_main_from_path", None)  # a program read from standard input is called <stdin>
    importable = "init_main_from_name" in preparation or "init_main_from_path" in preparation
    context.set_spawning_popen(handles)  # type: ignore[arg-type]  # has what they use of it
    try:
        head = bytes(ForkingPickler.dumps(preparation))
        if importable:
            try:
                return head + bytes(ForkingPickler.dumps((fn, args)))
            except (pickle.PicklingError, AttributeError):
                handles.close()  # a lambda or an inner function: it goes by value
        body = io.BytesIO()
        _ByValue(body, protocol=pickle.HIGHEST_PROTOCOL).dump((fn, args))
        return head + body.getvalue()
    finally:
        context.set_spawning_popen(None)


def _search_path() -> list[str]:
    """sys.path for a child that may run elsewhere: the empty entry means the current directory."""
    return [path or os.getcwd() for path in sys.path]
