"""`phalanx run`: one host's part of a run, from the command line's options to the exit code.

Exit codes: 0 if every rank ended well; the code of the rank that failed first (128 + signal for a
death by signal); 130, 143 or 129 if the launcher got SIGINT, SIGTERM or SIGHUP; 2 if nothing was
started, because the command line cannot be right or this host lacks something.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from phalanx.launch import bootstrap, drop_in, environment, machine, ports, report
from phalanx.launch.cli import USAGE_ERROR
from phalanx.launch.console import Console
from phalanx.launch.course import Course, Phase
from phalanx.launch.environment import Place
from phalanx.launch.memory import MemoryKills
from phalanx.launch.options import Options, parse
from phalanx.launch.ports import PortInUseError
from phalanx.launch.report import Outcome
from phalanx.launch.supervisor import Start, Supervisor

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAY_ENDED_AFTER = 10.0  # a rank has ended well and the others go on: usual, but it may be what they wait for
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # schedulers warn of the end with them


@dataclass
class _Interrupts:
    """Signals to the launcher that have arrived and wait to be dealt with."""

    arrived: deque[int] = field(default_factory=deque)

    def catch(self, signum: int, _frame: FrameType | None) -> None:
        """The handler: only takes note."""
        self.arrived.append(signum)


class StartError(Exception):
    """This host lacks something without which no rank can be started."""


def main(argv: Sequence[str]) -> int:
    """The subcommand: parse, run, and return the exit code."""
    options = parse(argv)
    try:
        return run(options)
    except PortInUseError as error:
        print(
            f"phalanx run: error: {error.strerror}: leave --master-port out or choose another",
            file=sys.stderr,
        )
        return USAGE_ERROR
    except StartError as error:
        print(f"phalanx run: error: {error}", file=sys.stderr)
        return USAGE_ERROR


def run(options: Options) -> int:
    """Run this host's ranks to their end; returns the exit code.

    Raises PortInUseError if rank 0 is here and the port that was asked for is taken, and StartError if
    the ranks cannot be started for another reason.
    """
    _check_host(options)
    host = socket.gethostname()
    held = ports.reserve(options.master_port) if options.node_rank == 0 else None
    port = options.master_port or (held.getsockname()[1] if held else environment.DEFAULT_PORT)
    run_id = uuid.uuid4().hex[:8] if options.num_nodes == 1 else f"{options.master_addr}:{port}"
    course, interrupts = Course(options.grace), _Interrupts()
    console = Console(lambda: not interrupts.arrived and course.phase is not Phase.KILLED)
    supervisor = _supervisor(course, console)
    began, kills = time.monotonic(), MemoryKills.now()
    try:
        console.say(options.header(host, machine.cores()))
        with _caught(interrupts, supervisor):
            places = options.places(port, run_id)
            logs = _logs(options.log_dir, places)
            _start_all(options, places, supervisor, logs)
            said: set[int] = set()
            while supervisor.step():
                _deal_with(interrupts, supervisor)
                _say_who_ended(supervisor, said)
            _deal_with(interrupts, supervisor)
            supervisor.finish()
        outcome = Outcome(
            run_id=run_id,
            host=host,
            world_size=options.world_size,
            command=[options.target, *options.args],
            seconds=time.monotonic() - began,
            endings=supervisor.endings(),
            interrupted_by=course.interrupted_by,
            memory_kills=MemoryKills.now().since(kills),
            logs=logs,
        )
        for path in options.reports:
            _write_report(outcome, path, console)
        console.say(outcome.text())
        return outcome.exit_code
    finally:
        supervisor.close()
        if held is not None:
            held.close()


def _check_host(options: Options) -> None:
    """Find out what would only fail in the ranks, later and less clearly."""
    for fd in (0, 1, 2):  # what is opened next would take the number of a closed stream, and its output
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    alone = options.num_nodes == 1 and options.ranks > 1 and options.master_addr == environment.LOOPBACK
    if alone and not ports.loopback_works():
        raise StartError(f"{ports.LOOPBACK_IS_DOWN}. Instead: {ports.BRING_LOOPBACK_UP}")


def _supervisor(course: Course, console: Console) -> Supervisor:
    try:
        return Supervisor(course, console, owns_process=True)
    except OSError as error:
        raise StartError(f"no folder for the run's own files: {error}") from None


def _start_all(options: Options, places: Sequence[Place], supervisor: Supervisor, logs: Mapping[int, str]) -> None:
    try:
        supervisor.start([_start(options, place, supervisor, logs.get(place.rank)) for place in places])
    except OSError as error:
        advice = ". Instead: raise the limit of open files (`ulimit -n`)" if error.errno == errno.EMFILE else ""
        raise StartError(f"cannot start {options.ranks} ranks: {error}{advice}") from None


def _start(options: Options, place: Place, supervisor: Supervisor, log: str | None) -> Start:
    channels = None
    if (options.ranks > 1 or log is not None) and supervisor.console is not None:
        prefix = f"[rank {place.rank}] " if options.ranks > 1 else ""
        channels = supervisor.console.open(place.rank, prefix, interactive=place.local_rank == 0, log=log)
    mode = "module" if options.is_module else "script"
    argv = [
        sys.executable,
        "-u",
        bootstrap.__file__,
        supervisor.run_dir,
        str(place.rank),
        str(os.getpid()),
        mode,
    ]
    return Start(
        rank=place.rank,
        argv=[*argv, options.target, *options.args],
        env={
            **environment.child_environment(place, options.threads),
            **drop_in.variables(options.drop_in, supervisor.run_dir),
        },
        channels=channels,
        reads_input=place.local_rank == 0,
    )


@contextmanager
def _caught(interrupts: _Interrupts, supervisor: Supervisor) -> Iterator[None]:
    """Take note of signals, and wake the supervisor for them. What was ignored stays ignored (nohup)."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.setblocking(False)
        supervisor.wake_on(ours, lambda: ours.recv(4096))
        before = {}
        for signum in (*_STOPPING, *_PASSED_ON, signal.SIGTSTP, signal.SIGWINCH):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, interrupts.catch)
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for signum, handler in before.items():
                signal.signal(signum, handler)


def _deal_with(interrupts: _Interrupts, supervisor: Supervisor) -> None:
    while interrupts.arrived:
        signum = interrupts.arrived.popleft()
        if signum in _STOPPING:
            supervisor.send(supervisor.course.interrupted(signum, time.monotonic()))
        elif signum in _PASSED_ON:
            supervisor.pass_on(signum)
        elif signum == signal.SIGWINCH and supervisor.console is not None:
            supervisor.console.resize()
        elif signum == signal.SIGTSTP:
            # The ranks are in sessions of their own, so the terminal's Ctrl-Z has not reached them.
            supervisor.pass_on(signal.SIGSTOP, children=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            supervisor.pass_on(signal.SIGCONT, children=True)


def _logs(log_dir: str | None, places: Sequence[Place]) -> dict[int, str]:
    if log_dir is None:
        return {}
    return {place.rank: os.path.join(log_dir, f"rank-{place.rank}.log") for place in places}


def _write_report(outcome: Outcome, path: str, console: Console) -> None:
    try:
        report.write(outcome.json(), path)
    except OSError as error:
        console.say(f"phalanx: the report {path} could not be written: {error.strerror}\n")


def _say_who_ended(supervisor: Supervisor, said: set[int]) -> None:
    """Say once of each rank that it has ended well, where others still run long after."""
    ended = set(supervisor.ended_well_before(time.monotonic() - _SAY_ENDED_AFTER)) - said
    if ended and supervisor.console is not None and supervisor.course.phase is Phase.RUNNING:
        said |= ended
        who, still = (", ".join(map(str, sorted(ranks))) for ranks in (ended, supervisor.running))
        supervisor.console.say(f"phalanx: ended with exit code 0: rank {who}; still running: rank {still}\n")
