"""`phalanx doctor`: ask a running job from outside what each of its ranks is doing, and say why it may be stuck.

Nothing is sent to the ranks but a question, which a thread of theirs answers. Of a rank that cannot answer,
because it is stopped or because C code holds Python's global lock, the kernel's facts are shown.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence

from phalanx.launch import jobs
from phalanx.launch.cli import USAGE_ERROR, Parser
from phalanx.launch.jobs import World
from phalanx.status.answer import Condition
from phalanx.status.asking import ask
from phalanx.status.report import Report

NOT_ALL_ANSWER, NO_JOB = 1, 3
_EXIT_CODES = (
    "exit codes: 0 if every rank has answered; 1 if some rank did not (it is stopped, busy, gone, or on a host "
    "that cannot be reached); 2 for a wrong command line, or where several jobs run and none is named; 3 if no "
    "such job runs on this host"
)


def main(argv: Sequence[str]) -> int:
    """The subcommand: find the job, ask, print; returns the exit code."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has seen enough (head) is no error
    given = _parser().parse_args(argv)
    found = _wanted(given.job)
    if not found:
        what = "no job of yours runs on this host" if given.job is None else f"no rank of {given.job} runs on this host"
        print(f"phalanx doctor: {what}", file=sys.stderr)
        return NO_JOB
    if len(found) > 1:
        rows = [f"  {_described(world)}" for world in found]
        print("\n".join(["phalanx doctor: several jobs run; name one by the pid of a rank:", *rows]), file=sys.stderr)
        return USAGE_ERROR
    run, peers = found[0].run_and_peers()
    report = Report(ask(peers, given.seconds))
    if given.json:
        print(json.dumps({"run": run, "size": found[0].size, **report.json()}, indent=2))
    else:
        print(report.text(all_stacks=given.stacks))
    unknown = found[0].size - len(report.statuses)
    if unknown and not given.json:
        print(f"{unknown} more ranks are on other hosts; no rank of this host could say where")
    answered = [each for each in report.statuses if each.condition is Condition.ANSWERS]
    return 0 if len(answered) == found[0].size else NOT_ALL_ANSWER


def _wanted(job: str | None) -> list[World]:
    """One world for each job that is meant."""
    if job is None:
        return jobs.jobs(jobs.worlds(own_only=True))
    found = jobs.worlds(own_only=False)
    by_pid = jobs.of_process(found, int(job)) if job.isdigit() else []
    return jobs.jobs(by_pid or jobs.of_run(found, job))


def _described(world: World) -> str:
    run = world.run_and_peers()[0]
    seats = ", ".join(f"rank {seat.rank} pid {seat.pid}" for seat in world.seats[:4])
    return f"{world.size} ranks{f', run {run}' if run else ''}: {seats}{', ...' if len(world.seats) > 4 else ''}"


def _parser() -> Parser:
    parser = Parser(
        prog="phalanx doctor",
        description="Say what every rank of a running job is doing, who is late, and the usual causes.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    parser.add_argument(
        "job", nargs="?", metavar="PID|RUN",
        help="a rank's process, the launcher's, or the run that the launcher names; by default the only job",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--stacks", action="store_true", help="show the stack of every rank, not only of late ones")
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="how long to wait for answers (default: %(default)g)"
    )
    return parser
