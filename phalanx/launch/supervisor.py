"""Start one host's ranks, watch them, end them together: the first failure wins, no orphans.

Every rank leads a session of its own. So a Ctrl-C at the terminal reaches the launcher only, which
passes it on once; a rank's children can be signalled as its process group; and a debugger in a rank
can still read from the terminal. The thread that calls `start` must outlive the ranks, because the
kernel kills them when it ends.

`phalanx run` and `phalanx.spawn` share this file. What to do when is decided by `course.py`, who failed
first by `verdict.py`; here are the processes, signals and clocks.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phalanx.launch import bootstrap
from phalanx.launch.console import Channel, Console
from phalanx.launch.course import Course, Phase
from phalanx.launch.guardian import Guardian
from phalanx.launch.report import innermost_call
from phalanx.launch.verdict import Ending, Record

_LOOK_EVERY = 0.25  # for what has no descriptor to wait on: records of ranks that hang on their way out
_LOOK_EVERY_WITHOUT_PIDFD = 0.05
_STACKS_WITHIN = 0.1
_LEFT_OVER_SECONDS = 1.0  # how long the children of an ended rank have between SIGTERM and SIGKILL
_LEFT_OVER_LOOK = 0.02


@dataclass(frozen=True)
class Start:
    """How to start one rank. `channels` are its two streams, or None to inherit the launcher's."""

    rank: int
    argv: Sequence[str]
    env: dict[str, str]
    channels: tuple[Channel, Channel] | None = None
    pass_fds: Sequence[int] = ()
    reads_input: bool = True


@dataclass
class _Process:
    """A rank that has been started."""

    rank: int
    popen: subprocess.Popen[bytes]
    pidfd: int | None
    ended: float | None = None
    stopped: float | None = None
    record: Record | None = None
    doing: str = ""
    peak_memory: int | None = None
    group_left: bool = True  # there may be processes in its group, itself included

    @property
    def pid(self) -> int:
        return self.popen.pid


@dataclass
class Supervisor:
    """The ranks of one host, from start to end.

    `run_dir` is private to the run and removed by `close`. With a `console` it also moves the ranks'
    output. `owns_process` says that this process does nothing else: then orphans of the ranks become
    its children. If it is killed, a guardian ends the ranks' children.
    """

    course: Course
    console: Console | None = None
    owns_process: bool = False
    run_dir: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="phalanx-"))
    _processes: list[_Process] = field(default_factory=list)
    _guardian: Guardian | None = None
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _look_again: float = 0.0

    def start(self, starts: Sequence[Start]) -> None:
        """Start all ranks; if one cannot be started, end the others and raise OSError."""
        if self.owns_process:
            bootstrap.adopt_orphans()
        self._guardian = Guardian(self.run_dir)
        try:
            for each in starts:
                self._start(each)
        except BaseException:
            self._signal(signal.SIGKILL)
            raise
        finally:
            if self.console is not None:
                self.console.started()
        if self.console is not None:
            for channel in self.console.channels:
                self._selector.register(channel.fd, selectors.EVENT_READ, channel)

    def wake_on(self, waking: socket.socket, empty: Callable[[], object]) -> None:
        """Let `step` also wake when `waking` can be read, and call `empty` then."""
        self._selector.register(waking, selectors.EVENT_READ, empty)

    @property
    def pids(self) -> list[int]:
        """The process ids in the order of `start`."""
        return [process.pid for process in self._processes]

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [process.rank for process in self._processes if process.ended is None]

    def ended_well_before(self, moment: float) -> list[int]:
        """The ranks that had ended with exit code 0 by then."""
        return [
            process.rank
            for process in self._processes
            if process.ended is not None and process.ended <= moment and process.popen.returncode == 0
        ]

    def step(self, longest: float = _LOOK_EVERY) -> bool:
        """Wait for something to happen, at most `longest` seconds, and deal with it.

        False once every rank has ended.
        """
        quiet = True
        for key, _ in self._selector.select(self._patience(longest)):
            if not isinstance(key.data, Channel):
                quiet = False
                if key.data is not None:
                    key.data()
            elif self.console is not None and not self.console.read(key.data):
                self._selector.unregister(key.fd)
        if self.console is not None:
            self.console.preview()
        if not quiet or time.monotonic() >= self._look_again:
            self.look()
        return bool(self.running)

    def look(self) -> None:
        """Notice ranks that have ended or failed, and let the course run on. Never waits."""
        self._look_again = time.monotonic() + _LOOK_EVERY_WITHOUT_PIDFD
        for process in self._processes:
            if process.ended is None:
                self._look_at(process)
        self.send(self.course.tick(time.monotonic()))

    def send(self, signum: int | None) -> None:
        """Carry out what the course asks for."""
        if signum is None:
            return
        if self.course.phase is Phase.ENDING and self.course.interrupted_by is None:
            self._ask_where()
        self._signal(signum)

    def pass_on(self, signum: int, children: bool = False) -> None:
        """Send a signal that is not meant to end the run to the ranks, or to their whole groups."""
        for process in self._processes:
            if process.ended is None:
                (os.killpg if children else os.kill)(process.pid, signum)

    def finish(self) -> None:
        """Every rank has ended: end what they left behind, and show the last of their output."""
        deadline = time.monotonic() + _LEFT_OVER_SECONDS
        while self._left_over() and time.monotonic() < deadline:
            time.sleep(_LEFT_OVER_LOOK)
        for process in self._left_over():
            _kill_group(process.pid, signal.SIGKILL)
        if self.console is not None:
            self.console.drain(_LEFT_OVER_SECONDS)

    def endings(self) -> list[Ending]:
        """How each rank ended; only once all have."""
        return [
            Ending(
                rank=process.rank,
                pid=process.pid,
                returncode=process.popen.returncode,
                ended=process.ended or 0.0,
                stopped=process.stopped,
                record=process.record,
                doing=process.doing,
                finished=_time_in(bootstrap.done_path(self.run_dir, process.rank)),
                peak_memory=process.peak_memory,
                last_output=self.console.last_lines(process.rank) if self.console is not None else (),
            )
            for process in self._processes
        ]

    def close(self) -> None:
        """Give everything back. Ranks that still run are killed."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.popen.wait()
            if process.pidfd is not None:
                os.close(process.pidfd)
                process.pidfd = None
        if self._guardian is not None:
            self._guardian.dismiss()
            self._guardian = None
        self._selector.close()
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def _start(self, start: Start) -> None:
        out, err = start.channels or (None, None)
        popen = subprocess.Popen(
            start.argv,
            env={**start.env, bootstrap.RUN_DIR: self.run_dir},
            stdin=None if start.reads_input else subprocess.DEVNULL,
            stdout=None if out is None else out.ends[0],
            stderr=None if err is None else err.ends[0],
            pass_fds=start.pass_fds,
            start_new_session=True,
        )
        process = _Process(start.rank, popen, _pidfd(popen.pid))
        self._processes.append(process)
        if self._guardian is not None:
            self._guardian.began(popen.pid)
        if process.pidfd is not None:
            self._selector.register(process.pidfd, selectors.EVENT_READ, None)

    def _patience(self, longest: float) -> float:
        now = time.monotonic()
        times = [self.course.deadline, self.console.preview_due() if self.console is not None else None]
        waits = [longest, *(max(0.0, due - now) for due in times if due is not None)]
        if any(process.pidfd is None for process in self._processes):
            waits.append(_LOOK_EVERY_WITHOUT_PIDFD)
        return min(waits)

    def _look_at(self, process: _Process) -> None:
        """Notice that a rank has ended, or has recorded an error and is on its way out."""
        now = time.monotonic()
        if ended := _has_ended(process.pid):
            # Not reaped yet, so that its number still means its group: now is the time to signal that.
            process.ended = now
            _kill_group(process.pid, signal.SIGKILL if self.course.phase is Phase.KILLED else signal.SIGTERM)
            process.peak_memory = _reap(process.popen)
            if process.pidfd is not None:
                self._selector.unregister(process.pidfd)
            self._leave_word(process)
        if process.record is None:
            process.record = Record.read(bootstrap.record_path(self.run_dir, process.rank))
        failed = process.record is not None or (ended and process.popen.returncode != 0)
        if failed and process.stopped is None:
            self.course.failed(now)

    def _signal(self, signum: int) -> None:
        """Send a signal to every rank that still runs; SIGKILL goes to its children too."""
        for process in self._processes:
            if process.popen.returncode is not None or process.ended is not None:
                continue
            process.stopped = process.stopped or time.monotonic()
            if signum == signal.SIGKILL:
                _kill_group(process.pid, signum)
            else:
                os.kill(process.pid, signum)  # not Popen.send_signal, which would reap it
                os.kill(process.pid, signal.SIGCONT)  # one that has been stopped could not act on it

    def _leave_word(self, process: _Process) -> None:
        """Tell ranks that still wait for this one, having never met it, that it has ended."""
        if self.running:
            with contextlib.suppress(OSError), open(bootstrap.gone_path(self.run_dir, process.rank), "w") as file:
                file.write(str(process.popen.returncode))

    def _ask_where(self) -> None:
        """Let every rank that still runs write its Python stacks, to say in the report where it was."""
        asked = []
        for process in self._processes:
            path = bootstrap.stack_path(self.run_dir, process.rank)
            if process.ended is None and bootstrap.STACK_SIGNAL is not None and os.path.exists(path):
                os.kill(process.pid, bootstrap.STACK_SIGNAL)
                asked.append((process, path))
        deadline = time.monotonic() + _STACKS_WITHIN
        while asked and time.monotonic() < deadline:
            time.sleep(_STACKS_WITHIN / 10)
            for process, path in list(asked):
                with open(path, encoding="utf-8", errors="replace") as file:
                    process.doing = innermost_call(file.read())
                if process.doing:
                    asked.remove((process, path))

    def _left_over(self) -> list[_Process]:
        """The ranks whose process groups still have members."""
        if self.owns_process:
            _reap_orphans()
        for process in self._processes:
            if process.group_left and not _kill_group(process.pid, 0):
                process.group_left = False
                if self._guardian is not None:
                    self._guardian.ended(process.pid)
        return [process for process in self._processes if process.group_left]


def _pidfd(pid: int) -> int | None:
    """A descriptor that can be read once the process has ended; None where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _kill_group(group: int, signum: int) -> bool:
    """Signal a process group; False if it has no members."""
    try:
        os.killpg(group, signum)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # members there are, but of another user
    return True


def _has_ended(pid: int) -> bool:
    """Whether a child has ended, without reaping it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # somebody else in this process has reaped it


def _reap(popen: subprocess.Popen[bytes]) -> int | None:
    """Reap a child that has ended; return the most memory that it had in use, in bytes, if that is known."""
    try:
        _, status, usage = os.wait4(popen.pid, 0)
    except ChildProcessError:
        popen.wait()  # somebody else in this process has reaped it
        return None
    popen.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _time_in(path: str) -> float | None:
    try:
        with open(path, encoding="utf-8") as file:
            return float(file.read())
    except (FileNotFoundError, ValueError):
        return None


def _reap_orphans() -> None:
    """Reap children of ended ranks, which the kernel has made ours."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
