"""Random uneven work against what one process would compute; threads in every run, all of it under `-m full`."""

from __future__ import annotations

import gc

import pytest

from phalanx.testing import run
from tests.uneven_case import Case, make_case
from tests.uneven_program import work
from tests.uneven_truth import Record, difference, truth

CHUNK = 20
"""Cases in one world, so that processes need not start for each."""


def check(seeds: range, ranks: int, over: str) -> None:
    """Run the cases of these seeds on so many ranks and compare every record of every rank."""
    cases = [make_case(seed, ranks) for seed in seeds]
    gc.collect()  # each model of a case holds shared memory until it is collected
    records = run(ranks, work, cases, over=over, timeout=60)
    for number, case in enumerate(cases):
        for rank, expected in enumerate(truth(case)):
            compare(case, rank, records[rank][number], expected)


def compare(case: Case, rank: int, actual: Record, expected: Record) -> None:
    """Raise AssertionError, with the case, for the first thing that differs by more than the case allows."""
    told = f"rank {rank} of {case}"
    assert len(actual.gradients) == len(expected.gradients), told
    for step, (got, true) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        _close(got, true, case, f"gradients of step {step}, {told}")
    assert actual.answers == expected.answers, told
    left = {name: actual.left[name] for name in expected.left}
    _close(left, expected.left, case, f"gradients left on leaving join(), {told}")
    _close(actual.parameters, expected.parameters, case, f"parameters, {told}")
    _close(actual.buffers, expected.buffers, case, f"buffers, {told}")


def _close(got: dict, true: dict, case: Case, told: str) -> None:
    error = difference(got, true)
    assert error <= case.tolerance, f"{error:.3g} in the {told}"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_random_uneven_work_equals_one_process(ranks: int) -> None:
    for start in range(0, 40, CHUNK):
        check(range(start, start + CHUNK), ranks, "threads")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_2500_random_cases_over_threads(ranks: int) -> None:
    for start in range(0, 2500, CHUNK):
        check(range(start, start + CHUNK), ranks, "threads")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_125_random_cases_over_processes(ranks: int) -> None:
    for start in range(10_000, 10_125, 25):
        check(range(start, start + 25), ranks, "processes")
