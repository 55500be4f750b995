"""Ranks as threads of one process, each with its own torch.distributed.

torch.distributed keeps its state (the default group, names, stores) in one object,
`distributed_c10d._world`. While a threads world runs, a router stands in its place, which hands every
look at it on to the world of the rank that the looking thread works for: a rank's own thread, and every
thread that one starts. Any other thread sees the state that was there before. The registry of groups in
C++ is made per thread in the same time.

Autograd on the CPU runs in the thread that calls `backward`, so hooks see their rank's world too.

What threads share, ranks share: the default random generator above all. Build models and draw data inside
`seeded(seed)`, or from `generator(seed)`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import gc
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode  # type: ignore[attr-defined]  # not in the stubs
from torch.distributed import distributed_c10d as c10d

from phalanx.errors import MisuseError
from phalanx.group import endings, watchdog
from phalanx.testing.outcome import Ending, Outcome, failure_text
from phalanx.testing.settings import Settings

_one_at_a_time = threading.Lock()
_generator = threading.RLock()
_last_words = 1.0
"""Seconds that the threads of a hung world get to end in, once they are told to."""


class _Abandoned(SystemExit):
    """Raised in the thread of a rank that has hung, to end it without a word."""


def run_threads(fn: Callable[..., Any], args: tuple[Any, ...], settings: Settings) -> list[Outcome]:
    """Run `fn(rank, *args)` on `settings.n` threads and return how each ended."""
    if settings.env:
        raise MisuseError("phalanx.testing.run with env= over threads, which share one environment", 'over="processes"')
    if not _one_at_a_time.acquire(blocking=False):
        raise MisuseError(
            "phalanx.testing.run over threads while another such world runs in this process",
            "one world after the other",
        )
    try:
        with _router_installed() as router, _random_state_read_at_once():
            return _Run(fn, args, settings, router).outcomes()
    finally:
        _one_at_a_time.release()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator for this block, for one rank at a time, and put it back afterwards.

    Every rank that builds a model in `with seeded(0):` gets the same parameters. No collective inside: the
    other ranks wait at the door.
    """
    with _generator:
        before = torch.random.get_rng_state()
        torch.manual_seed(seed)
        try:
            yield
        finally:
            torch.random.set_rng_state(before)


def generator(seed: int) -> torch.Generator:
    """Return a CPU random generator of one's own, seeded with `seed`."""
    return torch.Generator().manual_seed(seed)


def in_threads() -> bool:
    """Say whether the calling thread works for a rank of a threads world."""
    return isinstance(c10d._world, _Router) and c10d._world.entered() is not None


class _RankWorld(c10d._World):
    """The state of torch.distributed for one rank; torch's own keeps half of it in module globals."""

    # Plain attributes in the place of properties.
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


class _Router:
    """Stands for `distributed_c10d._world`: each thread meets the world of the rank it works for."""

    def __init__(self, outer: Any) -> None:
        self.__dict__.update(_outer=outer, _local=threading.local())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._world(), name, value)

    def _world(self) -> Any:
        return getattr(self._local, "world", self._outer)

    def enter(self, world: _RankWorld) -> None:
        """Make this thread one of the rank whose world this is."""
        self._local.world = world

    def entered(self) -> _RankWorld | None:
        """Return the world of the rank that this thread works for, if it works for one."""
        return getattr(self._local, "world", None)


@contextlib.contextmanager
def _router_installed() -> Iterator[_Router]:
    outer, start = c10d._world, threading.Thread.start
    excepthook = sys.excepthook  # Each default group that is made puts another one on top, for good.
    router = _Router(outer)

    @functools.wraps(start)
    def start_in_world(thread: threading.Thread) -> None:
        world = router.entered()
        if world is not None and not thread.name.startswith(watchdog.THREAD):  # which must not hold the groups
            run = functools.partial(_run_in_world, router, world, thread.run)
            thread.run = run  # type: ignore[method-assign]
        start(thread)

    c10d._world = router  # type: ignore[assignment]  # answers to the same names
    threading.Thread.start = start_in_world  # type: ignore[method-assign, assignment]
    _set_thread_isolation_mode(True)
    try:
        yield router
    finally:
        _set_thread_isolation_mode(False)
        sys.excepthook = excepthook
        threading.Thread.start = start  # type: ignore[method-assign]
        c10d._world = outer


@contextlib.contextmanager
def _random_state_read_at_once() -> Iterator[None]:
    """Keep the garbage collector out of torch.get_rng_state() meanwhile.

    torch 2.13 makes a tensor there while it holds the lock of the generator, and the interpreter's. A collection that
    this sets off can let go of the latter for a moment. Another thread that takes it, and asks for the state as well,
    as each recomputation of activations does, then waits for the former for ever, with the interpreter's lock.
    """
    original, lock = torch.random.get_rng_state, threading.Lock()

    @functools.wraps(original)
    def get_rng_state() -> torch.Tensor:
        with lock:
            enabled = gc.isenabled()
            gc.disable()
            try:
                return original()
            finally:
                if enabled:
                    gc.enable()

    torch.get_rng_state = torch.random.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = torch.random.get_rng_state = original


def _run_in_world(router: _Router, world: _RankWorld, run: Callable[[], None]) -> None:
    """Be a thread that a rank has started: the groups made so far are known here by name, too."""
    router.enter(world)
    for group, name in list(world.pg_names.items()):
        c10d._register_process_group(name, group)
    try:
        run()
    finally:
        c10d._unregister_all_process_groups()


class _Run:
    """One run of a threads world."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], settings: Settings, router: _Router) -> None:
        self._fn, self._args, self._settings, self._router = fn, args, settings, router
        self._store = dist.HashStore()
        self._ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._worlds = [_RankWorld() for _ in range(settings.n)]
        self._threads = [
            threading.Thread(target=self._rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(settings.n)
        ]
        self._started = time.monotonic()

    def outcomes(self) -> list[Outcome]:
        """Run all ranks and return how each ended, in order of rank."""
        for thread in self._threads:
            thread.start()
        outcomes: dict[int, Outcome] = {}
        try:
            self._collect(outcomes)
        except BaseException:
            self._give_up(outcomes, Ending.ENDED)
            raise
        for rank, outcome in outcomes.items():
            if outcome.ending not in (Ending.HUNG, Ending.ENDED):
                self._threads[rank].join()
        return [outcomes[rank] for rank in sorted(outcomes)]

    def _collect(self, outcomes: dict[int, Outcome]) -> None:
        """Wait until every rank has an outcome; give one to those that are still running at the limit."""
        limit, verdict = self._started + self._settings.timeout, Ending.HUNG
        while len(outcomes) < self._settings.n:
            try:
                outcome = self._ended.get(timeout=max(0.0, limit - time.monotonic()))
            except queue.Empty:
                self._give_up(outcomes, verdict)
                return
            outcomes[outcome.rank] = outcome
            if not outcome.ok and verdict is Ending.HUNG:
                sooner = time.monotonic() + self._settings.grace
                if sooner < limit:
                    limit, verdict = sooner, Ending.ENDED

    def _rank_main(self, rank: int) -> None:
        """Run one rank; its outcome is handed over only when its group is closed."""
        self._router.enter(self._worlds[rank])
        outcome = self._run_program(rank)
        if not outcome.ok:
            try:
                self._leave()
            except Exception:
                note = f"Then its process group did not close:\n{traceback.format_exc()}"
                outcome = dataclasses.replace(outcome, text=outcome.text + note)
            gc.collect()  # A group that only garbage holds keeps its connections open, and its peers waiting.
        self._ended.put(outcome)

    def _run_program(self, rank: int) -> Outcome:
        settings = self._settings
        try:
            if settings.backend is not None:
                dist.init_process_group(
                    settings.backend,
                    store=self._store,
                    rank=rank,
                    world_size=settings.n,
                    timeout=settings.patience,
                )
            value = self._fn(rank, *self._args)
            at = self._clock()
            self._leave()
            return Outcome(rank, Ending.RETURNED, at, value=value)
        except SystemExit as leaving:
            return Outcome(rank, Ending.EXITED, self._clock(), text=f"exit code {leaving.code!r}")
        except BaseException as error:
            at, text = self._clock(), failure_text(error)
            _announce(error, rank)
            traceback.clear_frames(error.__traceback__)
            return Outcome(rank, Ending.RAISED, at, error=error, text=text)

    def _leave(self) -> None:
        """Close this rank's groups; when the world is over, `dist` is somebody else's."""
        world: object = c10d._world
        if world is self._router and dist.is_initialized():
            dist.destroy_process_group()

    def _clock(self) -> float:
        return time.monotonic() - self._started

    def _give_up(self, outcomes: dict[int, Outcome], verdict: Ending) -> None:
        """Take the stacks of the ranks that are still running, then end their threads as far as one can."""
        running = [rank for rank in range(self._settings.n) if rank not in outcomes]
        at, stacks = self._clock(), self._stacks(running)
        worlds = [self._worlds[rank] for rank in running]
        closers = [threading.Thread(target=_close_groups, args=(world,), daemon=True) for world in worlds]
        for closer in closers:
            closer.start()
        for rank in running:
            _raise_in(self._threads[rank], _Abandoned)
        until = time.monotonic() + _last_words
        for thread in [*closers, *(self._threads[rank] for rank in running)]:
            thread.join(max(0.0, until - time.monotonic()))
        for rank in running:
            text = stacks[rank]
            if self._threads[rank].is_alive():
                text += "Its thread could not be ended and is left behind.\n"
            outcomes[rank] = Outcome(rank, verdict, at, text=text)

    def _stacks(self, running: Sequence[int]) -> dict[int, str]:
        frames, texts = sys._current_frames(), {}
        for rank in running:
            frame = frames.get(self._threads[rank].ident or 0)
            lines = _of_the_program(traceback.extract_stack(frame)) if frame else ["It has just ended.\n"]
            texts[rank] = f"Stack of the thread of rank {rank} (most recent call last):\n" + "".join(lines)
        return texts


def _of_the_program(stack: traceback.StackSummary) -> list[str]:
    """Leave out the frames below the rank's program: they are the same in every rank."""
    ours = [i for i, frame in enumerate(stack) if frame.name == "_run_program"]
    return traceback.StackSummary.from_list(stack[ours[0] + 1 if ours else 0 :]).format()


def _announce(error: BaseException, rank: int) -> None:
    """Do what the interpreter's last exception hook does for a process: tell the rank's peers."""
    for board in list(endings.BOARDS):
        if board.rank == rank:
            board.fail(error)


def _close_groups(world: _RankWorld) -> None:
    """Shut the groups of a hung rank, which wakes it where the group's transport can be woken."""
    for group in list(world.pg_names):
        with contextlib.suppress(Exception):
            group.shutdown()


def _raise_in(thread: threading.Thread, exception: type[BaseException]) -> None:
    """Raise an exception in another thread, at its next step in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(exception))
