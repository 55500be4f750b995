"""Torch's own tests of DistributedDataParallel, SyncBatchNorm and the collectives pass on Phalanx.

By default what takes up to a second each with torch's own, and of some only a few; the rest with `-m peer_full`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import pytest

from tests.peer import exceptions
from tests.peer.cases import Case, Result, Status, Target, What, applicable, family, is_beyond_torch
from tests.peer.run import Worker

_QUICK_SECONDS = 1.0  # A case is quick if it took no longer with torch's own.
_QUICK_BUDGET = 400.0  # Seconds for all quick cases together.
_LIMIT = 40.0  # Seconds for one case; three are enough for nearly all.
_LIMIT_LISTED = 20.0  # Seconds for one that is expected not to pass.


@pytest.fixture(scope="class")
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    """Return the worker for what the class is about; there is one at a time."""
    cls: type[_Torch] = request.cls
    worker = Worker(cls.what, cls.target, cls.world, logs=None)
    worker.start()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def spent() -> list[float]:
    """Collect the seconds that the quick cases took."""
    return []


class _Torch:
    """What of torch's tests a class of tests runs, and on whose implementation."""

    what: ClassVar[What]
    world: ClassVar[int] = 2
    target: ClassVar[Target] = Target.PHALANX
    quick_seconds: ClassVar[float] = _QUICK_SECONDS

    @classmethod
    def cases(cls, quick: bool) -> list[Case]:
        """Return the quick cases, or all others."""
        return [
            case
            for case, seconds in applicable(cls.what).items()
            if case.world == cls.world and cls._is_quick(case, seconds) is quick
        ]

    @classmethod
    def _is_quick(cls, case: Case, seconds: float) -> bool:
        """Those expected not to pass, or beyond torch's own, are not quick."""
        if str(case) in exceptions.EXPECTED[cls.what] or is_beyond_torch(cls.what, case):
            return False
        return seconds <= cls.quick_seconds


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in {"quick", "slow"} & set(metafunc.fixturenames):
        cases = metafunc.cls.cases(quick=name == "quick")
        metafunc.parametrize(name, cases, ids=[case.test for case in cases])


class _OnPhalanx(_Torch):
    def test_quick(self, worker: Worker, spent: list[float], quick: Case) -> None:
        if sum(spent) > _QUICK_BUDGET:
            pytest.fail(f"the {_QUICK_BUDGET:.0f} s for all quick cases together are used up")
        began = time.monotonic()
        result = worker.run(quick, _LIMIT)
        spent.append(time.monotonic() - began)
        self.check(result)

    @pytest.mark.peer_full
    def test_slow_or_listed(self, worker: Worker, slow: Case) -> None:
        if str(slow) in exceptions.EXPECTED[self.what]:
            result = worker.run(slow, _LIMIT_LISTED)
            assert result.status is not Status.PASS, "it passes: take it off the list"
        else:
            self.check(worker.run(slow, _LIMIT))

    def check(self, result: Result) -> None:
        assert result.status is Status.PASS, result.reason
        assert self.what in result.used, "it passed without ever building what is under test"


class TestDdp(_OnPhalanx):
    what = What.DDP


class TestDdpAsDropIn(_OnPhalanx):
    what = What.DDP
    target = Target.DROP_IN
    quick_seconds = 0.3


class TestSyncBatchNorm(_OnPhalanx):
    what = What.SYNC_BATCHNORM
    quick_seconds = 0.7


class TestSyncBatchNormAsDropIn(_OnPhalanx):
    what = What.SYNC_BATCHNORM
    target = Target.DROP_IN
    quick_seconds = 0.36


class TestCollectives(_OnPhalanx):
    what = What.COLLECTIVES


class TestCollectivesOfFourRanks(_OnPhalanx):
    what = What.COLLECTIVES
    world = 4


class TestHarness(_Torch):
    what = What.COLLECTIVES
    target = Target.TORCH

    @pytest.mark.parametrize(("test", "limit", "expected"), [
        # It wants tensors on the device of its rank, and here they stay on the CPU.
        ("test_ddp_device", _LIMIT, Status.FAIL),
        ("test_ddp_has_finalized", _LIMIT, Status.SKIP),
        ("test_all_reduce_sum", 0.0, Status.TIMEOUT),
        ("test_all_reduce_sum", _LIMIT, Status.PASS),
    ])  # fmt: skip
    def test_a_case_can_end_in_each_way(self, worker: Worker, test: str, limit: float, expected: Status) -> None:
        result = worker.run(Case(test, self.world), limit)
        assert result.status is expected, result.reason

    def test_each_test_is_a_case_or_does_not_apply(self, worker: Worker) -> None:
        cases = {case.test for what in What for case in applicable(what)}
        assert not cases & exceptions.NOT_APPLICABLE.keys()
        assert cases | exceptions.NOT_APPLICABLE.keys() == set(worker.tests)


def test_every_applicable_case_is_run() -> None:
    run = {
        (cls.what, case)
        for cls in _OnPhalanx.__subclasses__() for quick in (True, False) for case in cls.cases(quick)
    }  # fmt: skip
    assert run == {(what, case) for what in What for case in applicable(what)}


@pytest.mark.parametrize("what", list(What))
def test_each_exception_is_a_case_with_a_reason(what: What) -> None:
    for name, reason in exceptions.EXPECTED[what].items():
        assert Case.parse(name) in applicable(what)
        assert len(reason) > 20, name


def test_at_least_97_percent_of_the_cases_pass() -> None:
    cases = Counter(family(what, case) for what in What for case in applicable(what))
    listed = Counter(family(what, Case.parse(name)) for what in What for name in exceptions.EXPECTED[what])
    assert cases.total() > 270
    assert listed.total() <= 0.03 * cases.total()
    assert listed.keys() == {"DDP"}
