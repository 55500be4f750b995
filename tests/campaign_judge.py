"""What is right after a fault: the kind of error on every rank, the rank named, and how long it took.

When a fault can be known, from the times at which ranks entered their calls (all on one clock):

    order, dtype, shape, missing call, leaked no_sync, rank 0 only
                      when the last rank has entered the call in which they differ; where a rank makes no call any
                      more, when it has ended
    exception, SIGKILL  when it strikes; on a rank that computes meanwhile, when it enters its next call
    SIGSTOP, slow rank, data stall
                      when the first of the others enters the call in which it waits: a report is due
                      SLOW_AFTER later, and an error when the timeout has passed
    bit flip          when the last rank enters the synchronisation that compares the bytes in question; that has
                      to be one of the UNTIL_CHECKED that follow
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from phalanx.testing import Ending, Outcome, run
from tests.campaign_program import SLOW_AFTER, TIMEOUT, UNTIL_CHECKED, Case, train

WITHIN = 2.0
"""Seconds in which every rank has its error, and a report has been made after SLOW_AFTER."""
HANGS_AFTER = 20.0

_USERS = ("metric", "gather", "rate", "wait")
_BEFORE = ("batch", "forward", "in forward", "backward", "in backward", "update", *_USERS)
PLACES = {
    "order": (
        "metric before forward", "metric before backward", "gather before metric", "rate before gather",
        "rate before metric", "wait before rate", "wait before metric", "gather before backward",
    ),
    "dtype": ("metric", "gather", "rate", "model", "buffers", "wrap"),
    "shape": ("metric", "gather", "rate", "model", "buffers", "wrap"),
    "missing call": (*_USERS, "backward", "step", "whole step"),
    "exception": (*_BEFORE, "wrap"),
    "SIGKILL": (*_BEFORE, "wrap", "any time", "any time", "any time"),
    "SIGSTOP": (*_BEFORE, "wrap", "any time", "any time", "any time"),
    "slow rank": ("in forward", "backward", "in backward", "update", *_USERS, "wrap"),
    "data stall": ("iterator", "loader", "worker"),
    "bit flip": ("forward", "backward", "update", *_USERS),
    "leaked no_sync": ("forward", "backward", "quiet", "some layers"),
    "rank 0 only": ("batch", "forward", "backward", "update", *_USERS, "after"),
}  # fmt: skip

_SAID = {
    "backward": "the gradient synchronisation", "metric": "all_reduce(2 x ", "gather": "all_gather(3 x ",
    "rate": "broadcast(1 x ", "wait": "barrier()", "end": "nothing any more: it has finished and left",
}  # fmt: skip
_SAID_OF_EXTRA = {"all_reduce": "all_reduce(7 x ", "barrier": "barrier()", "object": "all_gather(1 x int64)"}


def plan(pathology: str, ranks: int, count: int) -> Iterator[Case]:
    """`count` cases at random places, the same ones each time."""
    random = Random(f"{pathology} on {ranks}")
    for number in range(count):
        place = random.choice(PLACES[pathology])
        rank = 0 if pathology == "rank 0 only" else random.randrange(ranks)
        steps = UNTIL_CHECKED + 10 if pathology == "bit flip" else 40 if place == "any time" else 8
        lasts = pathology == "SIGSTOP" and number % 2 == 1
        yield Case(pathology, ranks, rank, random.randrange(7), place, random.randrange(1 << 30), steps, lasts)


@dataclass
class Verdict:
    """How a run is judged: `wrong` says what was not right, `seconds` is that of the slowest rank."""

    case: Case
    within: float
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    hung: bool = False

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note what is wrong unless it holds."""
        if not holds:
            self.wrong.append(otherwise)

    def timed(self, at: float, known: float, who: str) -> None:
        """Something has been said at `at` that could be known at `known`."""
        self.seconds = max(self.seconds, at - known)
        self.expect(at - known <= self.within, f"{who}: only after {at - known:.2f} s")


class Run:
    """One case, run on real processes, and what its ranks saw."""

    def __init__(self, case: Case) -> None:
        self.case = case
        before = set(os.listdir("/dev/shm"))
        with tempfile.TemporaryDirectory(prefix="campaign-") as name:
            folder = Path(name)
            self.outcomes: list[Outcome] = run(
                case.ranks, train, case, name, over="processes", raises=False, timeout=HANGS_AFTER,
                group_timeout=TIMEOUT if case.lasts else 2 * HANGS_AFTER, env={"PHALANX_SLOW_AFTER": str(SLOW_AFTER)},
            )  # fmt: skip
            self.seen = {rank: _read(folder / f"seen-{rank}") for rank in range(case.ranks)}
            self.fault = _read(folder / "fault")
            self.said = {name: _text(folder / name) for name in ("flipped", "extra")}
        self.residue = set(os.listdir("/dev/shm")) - before
        self.others = [rank for rank in range(case.ranks) if rank != case.rank]

    def last_call(self, rank: int, until: float = float("inf")) -> tuple[float, str, int]:
        """The last call that a rank has entered, with the time and the step."""
        at, call, step = [each for each in self.seen[rank]["entered"] if each[0] <= until][-1]
        return at, call, step


def judge(run: Run, within: float = WITHIN) -> Verdict:
    """Say what is wrong about a run; `within` is in seconds."""
    case, verdict = run.case, Verdict(run.case, within)
    hung = [o.rank for o in run.outcomes if o.ending is Ending.HUNG]
    verdict.hung = bool(hung)
    killed = {case.rank} if case.pathology == "SIGKILL" else set()
    blind = [rank for rank in range(case.ranks) if run.seen[rank] is None and rank not in killed]
    if hung or blind:
        texts = "\n".join(o.text for o in run.outcomes if o.rank in {*hung, *blind})
        verdict.wrong.append(f"ranks {hung} hang, ranks {blind} have seen nothing\n{texts}")
        return verdict
    verdict.expect(not run.residue, f"left in /dev/shm: {run.residue}")
    _FAMILIES[case.pathology](run, verdict)
    for outcome in run.outcomes:
        saw = run.seen[outcome.rank]
        code = -9 if outcome.rank in killed else int(bool(saw["kind"]))
        verdict.expect(outcome.exitcode == code, f"rank {outcome.rank}: exit code {outcome.exitcode}, not {code}")
    if verdict.wrong:
        verdict.wrong += [f"  rank {rank}: {saw['kind']} {saw['text'][:1500]}" for rank, saw in run.seen.items() if saw]
    return verdict


# ---------------------------------------------------------------- the ranks disagree


def _mismatch(run: Run, verdict: Verdict) -> None:
    """Every rank that is in a call has a RankMismatchError with what each rank is in."""
    case = run.case
    if case.place == "wrap":
        _model_mismatch(run, verdict)
        return
    if run.said["extra"] == "only":
        _in_a_block_of_rank_0(run, verdict)
        return
    calls = {rank: run.last_call(rank)[1] for rank in run.seen}
    gone = [rank for rank, call in calls.items() if call == "end"]
    verdict.expect(gone in ([], [case.rank], run.others), f"ranks {gone} have ended well")
    known = max(run.last_call(rank)[0] for rank in run.seen)
    for rank in set(calls) - set(gone):
        saw = run.seen[rank]
        verdict.timed(saw["at"], known, f"rank {rank}")
        verdict.expect(saw["kind"] == "RankMismatchError", f"rank {rank}: {saw['kind']}, not RankMismatchError")
        told = {int(each): text for each, text in saw["fields"].get("calls", {}).items()}
        listed = {rank, *gone[:1]} if gone else set(calls)
        verdict.expect(listed <= set(told), f"rank {rank}: tells of {sorted(told)}, not {sorted(listed)}")
        for other, text in told.items():
            expected = _said_of(run, other, calls[other])
            verdict.expect(text.startswith(expected), f"rank {rank}: says that rank {other} is in {text!r}")
        here = told.get(rank, "")
        verdict.expect("campaign_program.py:" in here, f"rank {rank}: no place in {here!r}")
        if not gone and case.ranks > 2:
            odd = {other for other, text in told.items() if text == told.get(case.rank)}
            verdict.expect(odd == {case.rank}, f"rank {rank}: {sorted(odd)} are in the call of rank {case.rank}")


def _said_of(run: Run, rank: int, call: str) -> str | tuple[str, ...]:
    """How errors have to describe the call that a rank is in."""
    case = run.case
    if call == "extra":
        return _SAID_OF_EXTRA[run.said["extra"]]
    if call == "forward":
        return (
            ("the copying of a model's buffers", "DistributedDataParallel(...)")
            if case.place == "model"
            else "the copying of a model's buffers"
        )
    if case.pathology == "shape" and rank == case.rank and call == case.place:
        return {"metric": "all_reduce(4 x ", "gather": "all_gather(6 x ", "rate": "broadcast(2 x "}[call]
    return _SAID[call]


def _model_mismatch(run: Run, verdict: Verdict) -> None:
    """Every rank has the name of the first parameter that differs, and both ranks' of which it does."""
    known = max(run.last_call(rank)[0] for rank in run.seen)
    for rank, saw in run.seen.items():
        verdict.timed(saw["at"], known, f"rank {rank}")
        verdict.expect(saw["kind"] == "MisuseError", f"rank {rank}: {saw['kind']}, not MisuseError")
        named = "'head.weight'" in saw["text"] and f"rank {run.case.rank} has head.weight" in saw["text"]
        verdict.expect(named, f"rank {rank}: does not name rank {run.case.rank} and head.weight")


def _in_a_block_of_rank_0(run: Run, verdict: Verdict) -> None:
    """Rank 0 has a MisuseError at once, the others are told."""
    mine = run.seen[0]
    verdict.timed(mine["at"], run.last_call(0)[0], "rank 0")
    verdict.expect(mine["kind"] == "MisuseError", f"rank 0: {mine['kind']}, not MisuseError")
    _told_by_peer(run, verdict, "PeerFailedError", mine["at"])


# ---------------------------------------------------------------- a rank is no more


def _failed(run: Run, verdict: Verdict) -> None:
    verdict.expect(run.seen[run.case.rank]["kind"] == "ValueError", "the fault has not struck")
    if run.fault is not None:
        _told_by_peer(run, verdict, "PeerFailedError", run.fault[0])


def _killed(run: Run, verdict: Verdict) -> None:
    verdict.expect(run.fault is not None, "the fault has not struck")
    if run.fault is not None:
        _told_by_peer(run, verdict, "PeerLostError", run.fault[0])


def _told_by_peer(run: Run, verdict: Verdict, kind: str, at: float) -> None:
    for rank in run.others:
        saw = run.seen[rank]
        verdict.timed(saw["at"], max(at, run.last_call(rank)[0]), f"rank {rank}")
        verdict.expect(saw["kind"] == kind, f"rank {rank}: {saw['kind']}, not {kind}")
        verdict.expect(saw["fields"].get("peer") == run.case.rank, f"rank {rank}: names {saw['fields'].get('peer')}")
        if run.case.pathology == "exception":
            verdict.expect(f"fault of rank {run.case.rank}" in saw["text"], f"rank {rank}: without the exception")


# ---------------------------------------------------------------- a rank is late


def _late(run: Run, verdict: Verdict) -> None:
    """One rank has reported who is late and why; nobody has failed unless the timeout has passed."""
    case = run.case
    verdict.expect(run.fault is not None, "the fault has not struck")
    struck = run.fault[0] if run.fault is not None else 0.0
    reports = sorted((at, rank, text) for rank, saw in run.seen.items() for at, text in saw["reports"] if at > struck)
    verdict.expect(bool(reports), "no report")
    if run.fault is None or not reports:
        return
    at, reporter, text = reports[0]
    waiting = min(run.last_call(rank, at)[0] for rank in run.others)
    verdict.timed(at, max(waiting, struck) + SLOW_AFTER, "the report")
    headline = text.partition("\n")[0]
    verdict.expect(f"rank {case.rank} is late: rank {reporter} has waited" in headline, f"says {headline!r}")
    verdict.expect(_why(case) in text, f"does not say {_why(case)!r}:\n{text}")
    verdict.expect(len({rank for _, rank, _ in reports}) == 1, f"reported by {[rank for _, rank, _ in reports]}")
    for rank in range(case.ranks):
        saw, late = run.seen[rank], rank == case.rank
        kind = ("PeerFailedError" if late else "CollectiveTimeoutError") if case.lasts else ""
        verdict.expect(saw["kind"] == kind, f"rank {rank}: {saw['kind'] or 'no error'}, not {kind or 'none'}")
        if kind == saw["kind"] == "CollectiveTimeoutError":
            verdict.timed(saw["at"], run.last_call(rank)[0] + TIMEOUT, f"rank {rank}")
            fields = saw["fields"]
            verdict.expect(fields["missing"] == [case.rank], f"rank {rank}: misses {fields['missing']}")
            verdict.expect(_why(case) in fields["report"], f"rank {rank}: no report in its error")


def _why(case: Case) -> str:
    if case.pathology == "SIGSTOP":
        return "is stopped by a signal (SIGSTOP"
    if case.pathology == "data stall":
        return f"rank {case.rank} waits for its next batch"
    return "in hold\n"


# ---------------------------------------------------------------- the replicas differ


def _drifted(run: Run, verdict: Verdict) -> None:
    """Every rank has the name of the parameter and of the rank."""
    case = run.case
    known = max(run.last_call(rank)[0] for rank in run.seen)
    for rank, saw in run.seen.items():
        verdict.expect(saw["kind"] == "ReplicaDriftError", f"rank {rank}: {saw['kind']}, not ReplicaDriftError")
        if saw["kind"] != "ReplicaDriftError":
            continue
        verdict.timed(saw["at"], known, f"rank {rank}")
        steps = run.last_call(rank)[2] - case.step
        verdict.expect(steps <= UNTIL_CHECKED, f"rank {rank}: after {steps} steps")
        fields = saw["fields"]
        verdict.expect(fields["parameter"] == run.said["flipped"], f"rank {rank}: names {fields['parameter']}")
        verdict.expect([case.rank] in fields["groups"], f"rank {rank}: groups {fields['groups']}")
        verdict.expect(case.ranks == 2 or fields["odd"] == [case.rank], f"rank {rank}: names {fields['odd']}")


_FAMILIES = {
    "order": _mismatch, "dtype": _mismatch, "shape": _mismatch, "missing call": _mismatch,
    "leaked no_sync": _mismatch, "rank 0 only": _mismatch, "exception": _failed, "SIGKILL": _killed,
    "SIGSTOP": _late, "slow rank": _late, "data stall": _late, "bit flip": _drifted,
}  # fmt: skip


def table(verdicts: Sequence[Verdict]) -> str:
    """Pathology and ranks: how many are right, and how long the slowest rank took."""
    rows: dict[tuple[str, int], list[Verdict]] = {}
    for verdict in verdicts:
        rows.setdefault((verdict.case.pathology, verdict.case.ranks), []).append(verdict)
    lines = [f"{'pathology':<16}{'ranks':>6}{'right':>10}{'median s':>10}{'worst s':>9}"]
    for (pathology, ranks), group in rows.items():
        seconds = sorted(each.seconds for each in group)
        right = f"{sum(not each.wrong for each in group)} / {len(group)}"
        lines.append(f"{pathology:<16}{ranks:>6}{right:>10}{seconds[len(group) // 2]:>10.3f}{seconds[-1]:>9.3f}")
    return "\n".join(lines)


def _read(file: Path) -> Any:
    return json.loads(text) if (text := _text(file)) else None


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
