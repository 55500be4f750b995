"""`phalanx run`: one host's part of a run, from the command line's options to the exit code.

Exit codes: 0 if every rank ended well; the code of the rank that failed first (128 + signal for a
death by signal); 130, 143 or 129 if the launcher got SIGINT, SIGTERM or SIGHUP; 2 for a command line
that cannot be right.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from phalanx.launch import bootstrap, environment, machine, ports
from phalanx.launch.cli import USAGE_ERROR
from phalanx.launch.console import Console
from phalanx.launch.course import Course, Phase
from phalanx.launch.environment import Place
from phalanx.launch.options import Options, parse
from phalanx.launch.ports import PortInUseError
from phalanx.launch.report import Outcome
from phalanx.launch.supervisor import Start, Supervisor

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)  # schedulers warn of the end with them


@dataclass
class _Interrupts:
    """Signals to the launcher that have arrived and wait to be dealt with."""

    arrived: deque[int] = field(default_factory=deque)

    def catch(self, signum: int, _frame: FrameType | None) -> None:
        """The handler: only takes note."""
        self.arrived.append(signum)


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


def run(options: Options) -> int:
    """Run this host's ranks to their end; returns the exit code.

    Raises PortInUseError if rank 0 is here and the port that was asked for is taken.
    """
    host = socket.gethostname()
    held = ports.reserve(options.master_port) if options.node_rank == 0 else None
    port = options.master_port or (held.getsockname()[1] if held else environment.DEFAULT_PORT)
    run_id = uuid.uuid4().hex[:8] if options.num_nodes == 1 else f"{options.master_addr}:{port}"
    course, interrupts = Course(options.grace), _Interrupts()
    console = Console(lambda: not interrupts.arrived and course.phase is not Phase.KILLED)
    supervisor = Supervisor(course, console, owns_process=True)
    began, kills = time.monotonic(), machine.memory_kills()
    try:
        console.say(options.header(host))
        with _caught(interrupts, supervisor):
            places = options.places(port, run_id)
            logs = _logs(options.log_dir, places)
            supervisor.start([_start(options, place, supervisor, logs.get(place.rank)) for place in places])
            while supervisor.step():
                _deal_with(interrupts, supervisor)
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
            memory_kills=_more(kills, machine.memory_kills()),
            logs=logs,
        )
        if options.log_dir is not None:
            _write_report(outcome, options)
        console.say(outcome.text())
        return outcome.exit_code
    finally:
        supervisor.close()
        if held is not None:
            held.close()


def _start(options: Options, place: Place, supervisor: Supervisor, log: str | None) -> Start:
    channels = None
    if (options.ranks > 1 or log is not None) and supervisor.console is not None:
        prefix = f"[rank {place.rank}] " if options.ranks > 1 else ""
        channels = supervisor.console.open(prefix, interactive=place.local_rank == 0, log=log)
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
        env=environment.child_environment(place, options.threads),
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


def _write_report(outcome: Outcome, options: Options) -> None:
    name = "report.json" if options.num_nodes == 1 else f"report-host-{options.node_rank}.json"
    with open(os.path.join(options.log_dir or "", name), "w", encoding="utf-8") as file:
        json.dump(outcome.json(), file, indent=2)
        file.write("\n")


def _more(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before
