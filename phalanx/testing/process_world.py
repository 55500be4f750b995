"""Ranks as real processes of one host: forked from a server that has torch loaded already.

A fork of the test's own process would inherit torch's threads and locks, and a new interpreter spends a
second on importing torch. So a forkserver imports torch once, has no threads, and forks each rank from that
state. The program of a rank is pickled by value where it has no importable name, so that lambdas and local
functions work. The rank reports over a pipe; the parent believes the end of the process, not the report: a
rank that has returned its value and then hangs at exit has hung.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import functools
import io
import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from phalanx.testing import pickling
from phalanx.testing.outcome import Ending, Outcome, failure_text
from phalanx.testing.settings import Settings

STACK_SIGNAL = signal.SIGRTMAX - 1
# The first optimizer that a process makes imports torch._dynamo, which takes as long as torch itself.
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "cloudpickle", __name__]
_FORKSERVER = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class _Task:
    """All that a rank's process is told."""

    rank: int
    settings: Settings
    port: int
    program: bytes
    stacks: str


@dataclass(frozen=True)
class _Report:
    """What a rank's process says of itself; `at` is of the clock that all processes of a host share."""

    ending: Ending
    at: float
    payload: bytes = b""
    text: str = ""


def warm_up(*modules: str) -> None:
    """Start the server that ranks are forked from, with torch and `modules` imported; once per process."""
    _FORKSERVER.set_forkserver_preload([*_PRELOAD, *modules])
    _start_server()


@functools.cache
def _start_server() -> None:
    process = _FORKSERVER.Process(target=_silent)
    process.start()
    process.join()
    process.close()


def run_processes(fn: Callable[..., Any], args: tuple[Any, ...], settings: Settings) -> list[Outcome]:
    """Run `fn(rank, *args)` on `settings.n` processes and return how each ended. No process is left."""
    program = pickling.dumps((fn, args))
    warm_up()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="phalanx-world-") as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        tasks = [
            _Task(rank, settings, store.port, program, os.path.join(folder, f"stacks-{rank}"))
            for rank in range(settings.n)
        ]
        with _started(tasks) as ranks:
            _watch(ranks, settings, started)
            outcomes = [rank.outcome for rank in ranks if rank.outcome is not None]
        del store
    return outcomes


# ---------------------------------------------------------------- the parent


class _Rank:
    """The parent's view of one rank's process."""

    def __init__(self, task: _Task) -> None:
        self.task = task
        self.channel, theirs = _FORKSERVER.Pipe(duplex=False)
        self.process = _FORKSERVER.Process(target=_rank_main, args=(theirs, task), name=f"rank {task.rank}")
        self.report: _Report | None = None
        self.outcome: Outcome | None = None
        try:
            self.process.start()
        finally:
            theirs.close()

    def sources(self) -> list[Any]:
        """What to wait on for news of this rank."""
        return [self.process.sentinel] if self.report else [self.process.sentinel, self.channel]

    def look(self, started: float) -> None:
        """Take in the rank's report and its end, if they have come."""
        exitcode = self.process.exitcode  # Asked first: what an ended rank has sent is in the pipe by then.
        if self.report is None and self.channel.poll():
            try:
                self.report = self.channel.recv()
            except (EOFError, OSError):
                # The pipe of a killed rank closes a moment before its exit status is known.
                self.process.join(0.05)
        if exitcode is not None:
            self.outcome = _outcome_of(self.task.rank, self.report, exitcode, started)

    def stop(self) -> None:
        """End the process and all that it has started in its process group."""
        pid = self.process.pid
        self.process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if pid is not None:
                os.killpg(pid, signal.SIGKILL)
        self.process.join(5)
        self.process.close()
        self.channel.close()


@contextlib.contextmanager
def _started(tasks: Sequence[_Task]) -> Iterator[list[_Rank]]:
    with contextlib.ExitStack() as ends:
        ranks = []
        for task in tasks:
            ranks.append(_Rank(task))
            ends.callback(ranks[-1].stop)
        yield ranks


def _watch(ranks: Sequence[_Rank], settings: Settings, started: float) -> None:
    """Wait until every rank has an outcome; give one to those that are still running at the limit."""
    limit, verdict = time.monotonic() + settings.timeout, Ending.HUNG
    while running := [rank for rank in ranks if rank.outcome is None]:
        sources = [source for rank in running for source in rank.sources()]
        if not wait(sources, timeout=max(0.0, limit - time.monotonic())):
            _give_up(running, verdict, time.monotonic() - started)
            return
        for rank in running:
            rank.look(started)
        failed = any(_has_failed(rank) for rank in ranks)
        if failed and verdict is Ending.HUNG and time.monotonic() + settings.grace < limit:
            limit, verdict = time.monotonic() + settings.grace, Ending.ENDED


def _has_failed(rank: _Rank) -> bool:
    if rank.outcome is not None:
        return not rank.outcome.ok
    return rank.report is not None and rank.report.ending is not Ending.RETURNED


def _outcome_of(rank: int, report: _Report | None, exitcode: int, started: float) -> Outcome:
    now = time.monotonic() - started
    if exitcode < 0:
        name = signal.Signals(-exitcode).name if -exitcode < signal.SIGRTMIN else f"signal {-exitcode}"
        after = "" if report is None else f" after it {report.ending.value}\n{report.text}"
        return Outcome(rank, Ending.KILLED, now, text=f"killed by {name}{after}", exitcode=exitcode)
    if report is None:
        return Outcome(rank, Ending.EXITED, now, text=f"exit code {exitcode}", exitcode=exitcode)
    ending, text, loaded = report.ending, report.text, None
    try:
        loaded = pickle.loads(report.payload) if report.payload else None
    except Exception:
        if ending is Ending.RETURNED:
            ending, text = Ending.RAISED, f"Its result cannot be read here:\n{traceback.format_exc()}"
    at = report.at - started
    if ending is Ending.RETURNED:
        if exitcode:
            text = f"returned, then exit code {exitcode}"
            return Outcome(rank, Ending.EXITED, at, text=text, exitcode=exitcode)
        return Outcome(rank, ending, at, value=loaded, exitcode=exitcode)
    return Outcome(rank, ending, at, error=loaded, text=text, exitcode=exitcode)


def _give_up(running: Sequence[_Rank], verdict: Ending, at: float) -> None:
    """Give the ranks that are still running their outcome, with the stacks of all their threads."""
    for rank in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid or 0, STACK_SIGNAL)
    until = time.monotonic() + 1.0
    for rank in running:
        text = _stacks(rank, until)
        if rank.report is not None and rank.report.ending is Ending.RAISED:
            text = f"{rank.report.text}\nThen its process did not end:\n{text}"
        elif rank.report is not None:
            text = f"It {rank.report.ending.value}, then its process did not end:\n{text}"
        rank.outcome = Outcome(rank.task.rank, verdict, at, text=text)


def _stacks(rank: _Rank, until: float) -> str:
    """Read what the rank's fault handler wrote, waiting until it writes no more."""
    file, before = Path(rank.task.stacks), ""
    while True:
        text = file.read_text(errors="replace") if file.exists() else ""
        if text and text == before:
            return _of_the_program(text)
        if time.monotonic() > until:
            return text or f"No stack: process {rank.process.pid} is {_state(rank.process.pid or 0)}."
        before = text
        time.sleep(0.02)


def _of_the_program(stacks: str) -> str:
    """Leave out the frames below the rank's program: they are the same in every rank."""
    lines = stacks.splitlines()
    ours = [i for i, line in enumerate(lines) if line.endswith("in _run_program")]
    if not ours:
        return stacks
    rest = next((i for i in range(ours[-1], len(lines)) if not lines[i].startswith("  ")), len(lines))
    return "\n".join(lines[: ours[-1]] + lines[rest:])


def _state(pid: int) -> str:
    names = {"T": "stopped by a signal", "Z": "a zombie", "D": "in an uninterruptible wait"}
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return names.get(letter, f"in state {letter}")


# ---------------------------------------------------------------- the rank


def _silent() -> None:
    """Do nothing, in a process of its own."""


def _rank_main(channel: Connection, task: _Task) -> None:
    """Run one rank, as an interpreter runs a script: exception hook and exit functions included."""
    _die_with_the_test()
    os.setpgid(0, 0)
    stacks = open(task.stacks, "w")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    os.environ.update(_launch_variables(task))
    torch.set_num_threads(1)
    code = _run_program(channel, task)
    channel.close()
    # A process forked by multiprocessing leaves these out; what a library does at exit belongs to the test.
    atexit._run_exitfuncs()
    faulthandler.unregister(STACK_SIGNAL)
    stacks.close()
    sys.exit(code)


def _die_with_the_test() -> None:
    """Have the kernel kill this process when the test's process ends, in whatever way.

    PR_SET_PDEATHSIG does not serve: the parent is the forkserver, which lives as long as any of its children.
    But the test's process alone holds the other end of a pipe, and its closing can raise a signal.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    pipe = parent.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:
        os._exit(1)  # It had ended before.


def _run_program(channel: Connection, task: _Task) -> int | str | None:
    """Run the program, report, and return the exit code."""
    try:
        fn, args = pickle.loads(task.program)
        if task.settings.backend is not None:
            _join_world(task)
        value = fn(task.rank, *args)
        at = time.monotonic()
        if dist.is_initialized():
            dist.destroy_process_group()
        channel.send(_Report(Ending.RETURNED, at, pickling.dumps(value)))
    except SystemExit as leaving:
        channel.send(_Report(Ending.EXITED, time.monotonic(), text=f"exit code {leaving.code!r}"))
        return leaving.code
    except BaseException as error:
        channel.send(_failure(error))
        with contextlib.redirect_stderr(io.StringIO()):  # The report has the traceback already.
            sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _failure(error: BaseException) -> _Report:
    at, text = time.monotonic(), failure_text(error)
    try:
        return _Report(Ending.RAISED, at, pickling.dumps(error), text)
    except Exception:  # An exception may hold anything; its text says what is needed.
        return _Report(Ending.RAISED, at, text=text)


def _join_world(task: _Task) -> None:
    settings = task.settings
    store = dist.TCPStore("127.0.0.1", task.port, is_master=False, timeout=settings.patience)
    dist.init_process_group(
        settings.backend, store=store, rank=task.rank, world_size=settings.n, timeout=settings.patience
    )


def _launch_variables(task: _Task) -> dict[str, str]:
    """Return what a launcher sets, so that programs that read it see the same world."""
    rank, size = str(task.rank), str(task.settings.n)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(task.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **task.settings.env,
    }
