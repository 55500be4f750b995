"""The command line of `phalanx run`, parsed and checked before anything is started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.errors import MisuseError
from phalanx.launch import drop_in, environment, machine, report, spellings
from phalanx.launch.cli import Parser
from phalanx.launch.environment import Launcher, Place


@dataclass(frozen=True)
class Options:
    """The command line of `phalanx run`, checked."""

    target: str
    args: Sequence[str]
    is_module: bool
    ranks: int  # on this host
    threads: int  # per rank
    grace: float
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = environment.LOOPBACK
    master_port: int = 0  # 0: any free one, on a single host
    log_dir: str | None = None
    report: str | None = None
    drop_in: tuple[str, ...] = ()  # what of torch is replaced
    resume: str = ""  # "auto" or an absolute path

    @property
    def world_size(self) -> int:
        """All ranks; every host starts the same number."""
        return self.num_nodes * self.ranks

    @property
    def reports(self) -> list[str]:
        """Where the report is written as JSON."""
        name = "report.json" if self.num_nodes == 1 else f"report-host-{self.node_rank}.json"
        beside_logs = [os.path.join(self.log_dir, name)] if self.log_dir is not None else []
        return beside_logs + ([self.report] if self.report is not None else [])

    def places(self, port: int, run_id: str) -> list[Place]:
        """The place of each rank of this host."""
        return [
            Place(
                rank=self.node_rank * self.ranks + local_rank,
                world_size=self.world_size,
                local_rank=local_rank,
                local_world_size=self.ranks,
                node_rank=self.node_rank,
                num_nodes=self.num_nodes,
                master_addr=self.master_addr,
                master_port=port,
                launcher=Launcher.PHALANX,
                run_id=run_id,
                resume=self.resume,
            )
            for local_rank in range(self.ranks)
        ]

    def header(self, host: str, cores: int) -> str:
        """The line that says what is being started."""
        ranks, threads = _count(self.ranks, "rank"), f"{_count(self.threads, 'thread')} per rank"
        if self.ranks * self.threads > cores:
            threads += f" (more than the {cores} cores)" if cores > 1 else " (on one core)"
        if self.num_nodes == 1:
            return f"phalanx: {ranks} on 1 host ({host}), {threads}\n"
        return (
            f"phalanx: {ranks} of {self.world_size} on {host} (host {self.node_rank} of {self.num_nodes}), "
            f"{threads}, meeting at {self.master_addr}:{self.master_port}\n"
        )


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; ends the process with one line and exit code 2 where it cannot be right."""
    parser = _parser()
    takes_value = ["-n", *(name for name, row in _OPTIONS.items() if "action" not in row)]
    try:
        words = spellings.in_ours(argv, takes_value)
    except ValueError as error:
        parser.error(str(error))
    try:
        return _checked(parser, parser.parse_args(words))
    except MisuseError as error:
        parser.error(str(error).replace("\n", ". "))


_OPTIONS: dict[str, dict[str, Any]] = {
    "--ranks": {
        "metavar": "N",
        "default": "auto",
        "help": "ranks on this host; auto (the default): one per CUDA device, or else per core",
    },
    "--threads": {
        "metavar": "K",
        "type": int,
        "help": "threads per rank (default: OMP_NUM_THREADS, or else cores / ranks, at least 1)",
    },
    "--grace": {
        "metavar": "S",
        "type": float,
        "default": 10.0,
        "help": "seconds between the signal that ends a rank and SIGKILL (default: %(default)g)",
    },
    "--nnodes": {
        "metavar": "N",
        "type": int,
        "default": 1,
        "help": "number of hosts; start the command on each",
    },
    "--node-rank": {"metavar": "I", "type": int, "default": 0, "help": "this host's number, 0 to nnodes - 1"},
    "--master-addr": {"metavar": "HOST", "help": "address of host 0, needed with several hosts"},
    "--master-port": {
        "metavar": "PORT",
        "type": int,
        "help": f"port of rank 0's store (default: free; {environment.DEFAULT_PORT} with several hosts)",
    },
    "--log-dir": {"metavar": "D", "help": "write each rank's output to D/rank-R.log, and D/report.json"},
    "--resume": {
        "metavar": "auto|PATH",
        "default": "",
        "help": "where phalanx.checkpoint.resume goes on from: the script's newest checkpoint, or PATH",
    },
    "--report": {"metavar": "FILE", "help": "write how the run ended to FILE, as JSON"},
    "--drop-in": {
        "metavar": "LIST",
        "default": "",
        "help": "put Phalanx in the place of torch's classes in an unchanged script: --drop-in for all, or "
        f"--drop-in=LIST for some of {','.join(environment.REPLACEABLE)}",
    },
}
_EXIT_CODES = (
    "exit codes: 0 if every rank ended well, else the code of the rank that failed first (128 + signal for "
    "a death by signal, 1 for an exception); 130, 143, 129 after SIGINT, SIGTERM, SIGHUP; 2 if nothing was "
    "started: a wrong command line, a port in use, a log or report that cannot be written, no loopback interface"
)


def _parser() -> Parser:
    parser = Parser(
        prog="phalanx run",
        usage="%(prog)s [options] script.py [args ...]\n       %(prog)s [options] -m module [args ...]",
        description="Start a script on several ranks with torchrun's environment variables.",
        epilog=_EXIT_CODES,
        allow_abbrev=False,
    )
    for name, row in _OPTIONS.items():
        parser.add_argument(*(["-n"] if name == "--ranks" else []), name, **row)
    parser.add_argument("-m", dest="is_module", action="store_true", help="the target is a module, as for python -m")
    parser.add_argument("target", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _checked(parser: Parser, given: argparse.Namespace) -> Options:
    """Everything that can be wrong with the command line, found before anything is started."""
    if given.target is None:
        parser.error("no script given: phalanx run -n 2 script.py")
    if not given.is_module and not os.path.exists(given.target):
        parser.error(f"script not found: {given.target}")
    if not given.is_module and os.path.isdir(given.target):
        main = os.path.join(given.target, "__main__.py")
        if not os.path.exists(main):
            parser.error(f"{given.target} is a folder, and there is no {main}")
    if given.grace < 0:
        parser.error(f"--grace {given.grace:g}: seconds cannot be negative")
    if given.drop_in and (obstacle := drop_in.obstacle()):
        parser.error(obstacle)
    ranks = _ranks(parser, given.ranks)
    _check_hosts(parser, given)
    if given.log_dir is not None:
        try:
            os.makedirs(given.log_dir, exist_ok=True)
        except OSError as error:
            parser.error(f"--log-dir {given.log_dir}: {error.strerror}")
    if given.report is not None:
        if not os.path.isdir(os.path.dirname(given.report) or os.curdir):
            parser.error(f"--report {given.report}: there is no such folder")
        try:
            report.check(given.report)
        except OSError as error:
            parser.error(f"--report {given.report}: {error.strerror}")
    if given.threads is not None and given.threads < 1:
        parser.error(f"--threads {given.threads}: at least 1")
    threads = given.threads or environment.requested_threads() or max(1, machine.cores() // ranks)
    several = given.nnodes > 1
    return Options(
        target=given.target,
        args=given.args,
        is_module=given.is_module,
        ranks=ranks,
        threads=threads,
        grace=given.grace,
        num_nodes=given.nnodes,
        node_rank=given.node_rank,
        master_addr=given.master_addr or environment.LOOPBACK,
        master_port=given.master_port or (environment.DEFAULT_PORT if several else 0),
        log_dir=given.log_dir,
        report=given.report,
        resume=os.path.abspath(given.resume) if given.resume not in ("", "auto") else given.resume,
        drop_in=environment.drop_in(given.drop_in),
    )


def _ranks(parser: Parser, text: str) -> int:
    if text == "auto":
        return environment.visible_cuda_devices(machine.cuda_devices()) or machine.cores()
    try:
        ranks = int(text)
    except ValueError:
        parser.error(f"-n {text}: a number of ranks or auto")
    if ranks < 1:
        parser.error(f"-n {text}: at least 1 rank")
    return ranks


def _check_hosts(parser: Parser, given: argparse.Namespace) -> None:
    if given.nnodes < 1:
        parser.error(f"--nnodes {given.nnodes}: at least 1 host")
    if not 0 <= given.node_rank < given.nnodes:
        parser.error(f"--node-rank {given.node_rank}: must be 0 to {given.nnodes - 1} with --nnodes {given.nnodes}")
    if given.nnodes > 1 and not given.master_addr:
        parser.error(f"--nnodes {given.nnodes} needs --master-addr, the address of host 0")
    if given.master_port is not None and not 0 < given.master_port < 65536:
        parser.error(f"--master-port {given.master_port}: ports are 1 to 65535")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
