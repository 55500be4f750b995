"""Torch's own tests of DistributedDataParallel and of the collectives pass on Phalanx.

By default what takes up to a second each with torch's own; the rest with `-m peer_full`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator

import pytest

from tests.peer import exceptions
from tests.peer.cases import Case, Result, Status, Target, What, applicable
from tests.peer.run import Worker

_QUICK_SECONDS = 1.0  # A case is quick if it took no longer with torch's own.
_QUICK_BUDGET = 180.0  # Seconds for all quick cases together.
_LIMIT = 40.0  # Seconds for one case; three are enough for nearly all.
_LIMIT_LISTED = 20.0  # Seconds for one that is expected not to pass.


@functools.cache
def _place(what: What, target: Target, world: int) -> tuple[What, Target, int]:
    """Return the parameter of `worker`; pytest goes on with a worker while this is the same object."""
    return what, target, world


@pytest.fixture(scope="module")
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    """Return the worker for one part of Phalanx and one world size; pytest has one at a time."""
    what, target, world = request.param
    worker = Worker(what, target, world, logs=None)
    worker.start()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def spent() -> list[float]:
    """Collect the seconds that the quick cases took."""
    return []


def _cases(quick: bool) -> list[pytest.param]:
    """Return the quick cases, or all others; those expected not to pass are not quick."""
    found = []
    for what in What:
        for case, seconds in sorted(applicable(what).items(), key=lambda item: item[0].world):
            is_quick = seconds <= _QUICK_SECONDS and str(case) not in exceptions.EXPECTED[what]
            if is_quick is quick:
                place = _place(what, Target.PHALANX, case.world)
                found.append(pytest.param(place, what, case, id=f"{what.value}-{case}"))
    return found


@pytest.mark.parametrize(("worker", "what", "case"), _cases(quick=True), indirect=["worker"])
def test_torch_case(worker: Worker, spent: list[float], what: What, case: Case) -> None:
    if sum(spent) > _QUICK_BUDGET:
        pytest.fail(f"the {_QUICK_BUDGET:.0f} s for all quick cases together are used up")
    began = time.monotonic()
    result = worker.run(case, _LIMIT)
    spent.append(time.monotonic() - began)
    assert result.status is Status.PASS, result.reason
    assert what in result.used, "it passed without ever building what is under test"


@pytest.mark.peer_full
@pytest.mark.parametrize(("worker", "what", "case"), _cases(quick=False), indirect=["worker"])
def test_torch_case_that_is_slow_or_listed(worker: Worker, what: What, case: Case) -> None:
    if str(case) in exceptions.EXPECTED[what]:
        result = worker.run(case, _LIMIT_LISTED)
        assert result.status is not Status.PASS, "it passes: take it off the list"
    else:
        result = worker.run(case, _LIMIT)
        assert result.status is Status.PASS, result.reason
        assert what in result.used, "it passed without ever building what is under test"


@pytest.mark.parametrize("what", list(What))
def test_each_exception_is_a_case_with_a_reason(what: What) -> None:
    for name, reason in exceptions.EXPECTED[what].items():
        assert Case.parse(name) in applicable(what)
        assert len(reason) > 20, name


def test_at_least_95_percent_of_the_collectives_pass() -> None:
    cases, listed = applicable(What.COLLECTIVES), exceptions.EXPECTED[What.COLLECTIVES]
    assert len(cases) > 150
    assert len(listed) <= 0.05 * len(cases)


_WITH_TORCH = _place(What.COLLECTIVES, Target.TORCH, 2)


@pytest.mark.parametrize(("worker", "test", "limit", "expected"), [
    # It wants tensors on the device of its rank, and here they stay on the CPU.
    (_WITH_TORCH, "test_ddp_device", _LIMIT, Status.FAIL),
    (_WITH_TORCH, "test_ddp_has_finalized", _LIMIT, Status.SKIP),
    (_WITH_TORCH, "test_all_reduce_sum", 0.0, Status.TIMEOUT),
    (_WITH_TORCH, "test_all_reduce_sum", _LIMIT, Status.PASS),
], indirect=["worker"])
def test_a_case_can_end_in_each_way(worker: Worker, test: str, limit: float,
                                    expected: Status) -> None:
    result: Result = worker.run(Case(test, 2), limit)
    assert result.status is expected, result.reason
