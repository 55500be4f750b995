"""A warm process for one world size: it imports torch's tests once and forks the ranks of a case.

stdin has one request a line, `{"case": ..., "limit": seconds, "folder": ...}`; stdout one line of
JSON for the list of tests, then one `Result` a request. In the case's folder each rank leaves
`rank<R>.log`. Each rank leads its own session, so that whatever it started ends with it; it is
not reaped before that, so its process id cannot have been given to somebody else.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import logging
import multiprocessing
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
import traceback
import unittest
from typing import Any

import torch
from torch.testing._internal import common_distributed

from tests.peer import suite, targets
from tests.peer.cases import Case, Result, Status, Target, What

# Seconds that the other ranks have to end by themselves once one has failed.
_GRACE = 3.0
_PR_SET_PDEATHSIG = 1  # From linux/prctl.h: get a signal when the parent dies.
_SKIP_CODES = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
_LIFTED = re.compile(r"\b(MPI|NCCL|torchvision)\b", re.IGNORECASE)
_SKIP_REASON = re.compile(r"for following reason: (.*)")
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Timeout|Interrupt)\b.*", re.MULTILINE)


class Rank:
    """One forked rank of a case."""

    def __init__(self, cls: type, case: Case, rank: int, folder: pathlib.Path) -> None:
        self.rank = rank
        self.log = folder / f"rank{rank}.log"
        self.code: int | None = None  # exit status, negative for a signal; None while it runs
        self.pid = os.fork()
        if self.pid == 0:
            _become_rank(cls, case, rank, folder, self.log)

    def poll(self) -> int | None:
        """Return the exit code if the rank has ended; do not reap it."""
        if self.code is None:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            info = os.waitid(os.P_PID, self.pid, flags)
            if info is not None:
                self.code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        return self.code

    def dump_stacks(self) -> None:
        os.kill(self.pid, signal.SIGUSR1)

    def end(self) -> None:
        """Kill the rank and all it started, then reap it."""
        for kill in (os.killpg, os.kill):
            try:
                kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os.waitpid(self.pid, 0)

    def why(self) -> str:
        """Say in one line how this rank ended."""
        assert self.code is not None
        text = self.log.read_text(errors="replace")
        if self.code in _SKIP_CODES:
            reasons = _SKIP_REASON.findall(text)
            return reasons[-1] if reasons else _SKIP_CODES[self.code]
        errors = _ERROR.findall(text)
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return f"rank {self.rank}: {errors[-1] if errors else how}"


def _become_rank(cls: type, case: Case, rank: int, folder: pathlib.Path, log: pathlib.Path) -> None:
    """Run one rank in the process just forked, and end it."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _redirect(log)
        faulthandler.register(signal.SIGUSR1)
        _, pipe = multiprocessing.Pipe()
        os.chdir(folder / "tmp")
        cls._run(rank, case.test, str(folder / "init_dir" / "group"), pipe)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: pathlib.Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _prepare(folder: pathlib.Path) -> None:
    """Lay out the folder as torch's `initialize_temp_directories` does, and announce it."""
    for name in ("barrier", "test_dir", "init_dir", "tmp"):
        (folder / name).mkdir()
    os.environ["TEMP_DIR"] = str(folder)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")
    suite.set_init_method(f"file://{folder}/init_dir/global")


def _wait(ranks: list[Rank], limit: float) -> tuple[list[Rank], bool]:
    """Wait for all ranks, but not beyond the limit, nor long after one has failed.

    Returns the failed ranks in the order in which they failed, and whether the limit struck.
    """
    failed: list[Rank] = []
    end = time.monotonic() + limit
    while True:
        running = [r for r in ranks if r.poll() is None]
        new = [r for r in ranks if r.code not in (None, 0) and r not in failed]
        if new and not failed:
            end = min(end, time.monotonic() + _GRACE)
        failed += new
        if not running:
            return failed, False
        if time.monotonic() > end:
            for rank in running:
                rank.dump_stacks()
            time.sleep(0.3)
            return failed, not failed
        time.sleep(0.01)


def _skip_reason(test: Any) -> str:
    """Return why a test is marked to be skipped, if it is.

    A mark that leaves a test to another backend does not count: what gloo can do all the same
    applies, and what it cannot fails with it and so does not enter the baseline. Nor does one for want of
    torchvision, which suite.py stands in for.
    """
    reason = getattr(test, "__unittest_skip_why__", "")
    return "" if _LIFTED.search(reason) else reason


def run_case(cls: type, case: Case, limit: float, folder: pathlib.Path) -> Result:
    """Run all ranks of one case; all of them must end well for it to pass."""
    skip = _skip_reason(getattr(cls, case.test))
    if skip:
        return Result(case, Status.SKIP, skip, 0.0, frozenset())
    _prepare(folder)
    began = time.monotonic()
    ranks: list[Rank] = []
    try:
        for rank in range(case.world):
            ranks.append(Rank(cls, case, rank, folder))
        failed, late = _wait(ranks, limit)
    finally:
        for rank in ranks:
            rank.end()
    if late:
        status, reason = Status.TIMEOUT, f"no end after {limit:.0f} s"
    elif not failed:
        status, reason = Status.PASS, ""
    else:
        skipped = len(failed) == case.world and {r.code for r in failed} <= _SKIP_CODES.keys()
        status, reason = Status.SKIP if skipped else Status.FAIL, failed[0].why()
    used = frozenset(what for what in What if targets.mark_of(folder, what).exists())
    return Result(case, status, reason, round(time.monotonic() - began, 2), used)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", type=What, required=True)
    parser.add_argument("--target", type=Target, required=True)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what is printed while importing must not look like an answer
    torch.set_num_threads(1)
    logging.getLogger(common_distributed.__name__).addHandler(logging.StreamHandler())
    cls = suite.load(args.what, args.target)
    names = unittest.TestLoader().getTestCaseNames(cls)
    answers.write(json.dumps({"tests": list(names)}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        result = run_case(cls, Case.parse(request["case"]), request["limit"], pathlib.Path(request["folder"]))
        answers.write(result.to_json() + "\n")


if __name__ == "__main__":
    main()
