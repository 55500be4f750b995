"""Run torch's tests on Phalanx, or on torch for the baseline; one line a case, then totals."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator

from tests.peer import exceptions
from tests.peer.cases import Case, Result, Status, Target, What, about, applicable, family, save_baseline

_ROOT = pathlib.Path(__file__).parents[2]
# Worlds tried when measuring: what skips itself at two ranks is tried again at four.
_WORLDS = (2, 4)


class Worker:
    """A `worker.py` process for one world size, started anew should it die."""

    def __init__(self, what: What, target: Target, world: int, logs: pathlib.Path | None) -> None:
        self._command = [sys.executable, "-m", "tests.peer.worker", "--what", what.value, "--target", target.value]
        self._environment = {
            **os.environ,
            "BACKEND": "gloo",
            "WORLD_SIZE": str(world),
            "INIT_METHOD": "file://",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self._folder = tempfile.TemporaryDirectory(prefix="peer-")
        self._logs = logs
        self._process: subprocess.Popen[str] | None = None
        self.tests: list[str] = []

    def start(self) -> subprocess.Popen[str]:
        """Return the process, which has told by then which tests there are."""
        if self._process is not None:
            return self._process
        process = subprocess.Popen(
            self._command, cwd=_ROOT, env=self._environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        hello = process.stdout.readline()
        if not hello:
            raise RuntimeError(f"the worker ended while starting, exit code {process.wait()}")
        self.tests = json.loads(hello)["tests"]
        self._process = process
        return process

    def run(self, case: Case, limit: float) -> Result:
        """Run one case; `limit` is in seconds."""
        process = self.start()
        folder = tempfile.mkdtemp(dir=self._folder.name, prefix=f"{case.test}-")
        request = {"case": str(case), "limit": limit, "folder": folder}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        self._keep_logs(case, pathlib.Path(folder))
        if not answer:
            self._process = None
            reason = f"the worker ended, exit code {process.wait()}"
            return Result(case, Status.FAIL, reason, 0.0, frozenset())
        return Result.from_json(answer)

    def _keep_logs(self, case: Case, folder: pathlib.Path) -> None:
        if self._logs is None:
            return
        self._logs.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("rank*.log"):
            log.rename(self._logs / f"{case}.{log.name}")

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._process = None
        self._folder.cleanup()


def run_cases(
    what: What, target: Target, cases: Iterable[Case], *, limit: float, jobs: int = 1, logs: pathlib.Path | None = None
) -> Iterator[Result]:
    """Run `cases`, `jobs` at a time, and yield their results as they end."""
    todo: queue.Queue[Case] = queue.Queue()
    for case in sorted(cases, key=lambda c: c.world):
        todo.put(case)
    done: queue.Queue[Result | BaseException | None] = queue.Queue()

    def work() -> None:
        workers: dict[int, Worker] = {}
        try:
            with contextlib.suppress(queue.Empty):
                while True:
                    case = todo.get_nowait()
                    if case.world not in workers:
                        workers[case.world] = Worker(what, target, case.world, logs)
                    done.put(workers[case.world].run(case, limit))
        except BaseException as error:
            done.put(error)
        finally:
            for worker in workers.values():
                worker.close()
            done.put(None)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    running = len(threads)
    while running:
        item = done.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            running -= 1
        else:
            yield item
    for thread in threads:
        thread.join()


def _all_tests() -> list[str]:
    worker = Worker(What.COLLECTIVES, Target.TORCH, _WORLDS[0], logs=None)
    worker.start()
    worker.close()
    return worker.tests


def _measure(limit: float, jobs: int, logs: pathlib.Path | None) -> Iterator[Result]:
    """Run every test there is with torch's own, at the smallest world in which it does not skip."""
    tests = _all_tests()
    for world in _WORLDS:
        skipped = []
        cases = [Case(test, world) for test in tests]
        for result in run_cases(What.COLLECTIVES, Target.TORCH, cases, limit=limit, jobs=jobs, logs=logs):
            if result.status is Status.SKIP:
                skipped.append(result.case.test)
            yield result
        tests = skipped


def _surprise(what: What, target: Target, result: Result) -> str:
    """Say what is not as the list of exceptions has it, if anything."""
    if target is Target.TORCH:
        return ""
    listed = str(result.case) in exceptions.EXPECTED[what]
    if listed and result.status is Status.PASS:
        return "listed in exceptions.py, but passes"
    if not listed and result.status is not Status.PASS:
        return "unexpected"
    return ""


def _by_family(args: argparse.Namespace, results: Iterable[Result]) -> dict[str, collections.Counter[Status]]:
    """Count how the cases of each family ended."""
    counts: dict[str, collections.Counter[Status]] = collections.defaultdict(collections.Counter)
    for result in results:
        what = about(result) if args.measure else args.what
        counts[family(what, result.case)][result.status] += 1
    return counts


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.peer.run", description=__doc__)
    parser.add_argument("--what", type=What, choices=list(What), default=What.DDP)
    parser.add_argument("--target", type=Target, choices=list(Target), default=Target.PHALANX)
    parser.add_argument("--match", default="", help="only cases whose name has this regex in it")
    parser.add_argument("--world", type=int, help="run all at this world size instead")
    parser.add_argument("--jobs", type=int, default=1, help="cases at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one case")
    parser.add_argument("--out", type=pathlib.Path, help="write one line of JSON per case")
    parser.add_argument("--logs", type=pathlib.Path, help="keep the output of each rank here")
    parser.add_argument(
        "--measure", action="store_true", help="run every test with torch's own and write the baselines"
    )
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    if args.measure:
        args.target = Target.TORCH
        results = _measure(args.limit, args.jobs, args.logs)
    else:
        cases = list(applicable(args.what))
        if args.world:
            cases = sorted({Case(case.test, args.world) for case in cases})
        cases = [case for case in cases if re.search(args.match, str(case))]
        results = run_cases(args.what, args.target, cases, limit=args.limit, jobs=args.jobs, logs=args.logs)
    everything, surprises = [], 0
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(args.out.open("w", buffering=1)) if args.out else None
        for result in results:
            surprise = _surprise(args.what, args.target, result)
            surprises += bool(surprise)
            everything.append(result)
            print(
                f"{result.status.value:8}{result.seconds:6.1f} s  {result.case}  "
                f"{result.reason[:160]}{f'  [{surprise}]' if surprise else ''}",
                flush=True,
            )
            if out:
                out.write(result.to_json() + "\n")
    counts = collections.Counter(result.status.value for result in everything)
    for name, ends in _by_family(args, everything).items():
        print(f"{name}: {ends[Status.PASS]} of {ends.total()} pass")
    print(
        f"{len(everything)} cases: "
        + ", ".join(f"{n} {s}" for s, n in counts.most_common())
        + f"; {surprises} not as expected"
    )
    if args.measure:
        for what in What:
            save_baseline(what, everything)
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
