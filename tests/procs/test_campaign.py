"""The fault campaign: twelve pathologies at random places of a training run, on real processes of their own.

What a run does and where faults strike is in tests/campaign_program.py; what is right afterwards, and when it can
be known, in tests/campaign_judge.py. `pytest -m full tests/procs/test_campaign.py -s` prints the table.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from phalanx.testing import warm_up
from tests.campaign_judge import PLACES, Run, Verdict, judge, plan, table
from tests.procs.launching import MARK, Launch, gone, launch

__all__ = ["launch"]  # the fixture

WHOLE = 20
"""Places for each pathology and number of ranks."""
RIGHT = 0.99

LAUNCHED = """
import logging, phalanx, torch
from tests.campaign_program import Case, train
logging.basicConfig()
torch.set_num_threads(1)
phalanx.init(slow_after=1.0)
train(rank, Case({pathology!r}, 2, {rank}, 3, {place!r}, 7, {steps}), ".")
"""
LATE = ("SIGSTOP", "slow rank", "data stall")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Have the server that ranks are forked from import what they run."""
    warm_up("pytest", "hypothesis", "tests.campaign_program")


@pytest.mark.parametrize("pathology", PLACES)
def test_a_fault_is_named_on_every_rank(pathology: str) -> None:
    ranks = 4 if list(PLACES).index(pathology) % 2 else 2
    for case in plan(pathology, ranks, 1):
        verdict = judge(Run(case), within=10.0)  # whether it is fast is measured where nothing else runs
        assert not verdict.wrong, f"{case}\n" + "\n".join(verdict.wrong)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_whole_campaign(ranks: int) -> None:
    verdicts: list[Verdict] = []
    for pathology in PLACES:
        for case in plan(pathology, ranks, WHOLE):
            verdicts.append(judge(Run(case)))
            print(end="x" if verdicts[-1].wrong else ".", flush=True)
            if verdicts[-1].wrong:
                print(f"\n{case}\n  " + "\n  ".join(verdicts[-1].wrong))
    print("\n" + table(verdicts))
    assert not [verdict.case for verdict in verdicts if verdict.hung]
    assert sum(not verdict.wrong for verdict in verdicts) >= RIGHT * len(verdicts)


@pytest.mark.full
@pytest.mark.parametrize("pathology", PLACES)
def test_the_launcher_names_the_rank_and_leaves_nothing(launch: Launch, pathology: str) -> None:
    rank = 0 if pathology == "rank 0 only" else 1
    before = set(os.listdir("/dev/shm"))
    steps = 80 if pathology == "bit flip" else 8
    code = LAUNCHED.format(pathology=pathology, rank=rank, place=PLACES[pathology][0], steps=steps)
    done = launch.run(MARK + code, "-n", "2", "--report", "report.json")
    if pathology in LATE:
        assert done.returncode == 0, done.stderr
        assert f"phalanx: rank {rank} is late: rank {1 - rank} has waited" in done.stderr
    else:
        report = json.loads((launch.folder / "report.json").read_text())
        assert done.returncode == report["exit_code"] == (128 + signal.SIGKILL if pathology == "SIGKILL" else 1)
        if pathology in ("SIGKILL", "exception"):
            assert report["first_failure"] == rank, done.stderr
        for error in {"RankMismatchError", "ReplicaDriftError"} & {_ERRORS.get(pathology)}:
            assert [error in each["exception"] for each in report["ranks"]] == [True, True], done.stderr
    assert gone(launch.pids("pid-*", 2), 1)
    assert set(os.listdir("/dev/shm")) <= before


_ERRORS = {"bit flip": "ReplicaDriftError"} | dict.fromkeys(
    ("order", "dtype", "shape", "missing call", "leaked no_sync"), "RankMismatchError"
)
