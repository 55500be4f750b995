"""What a case is, how it ends, and which cases apply to the CPU."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
import re
from collections.abc import Iterable

_HERE = pathlib.Path(__file__).parent
_FAMILIES = {
    "comm hooks": re.compile(r"hook|localSGD|averag"),
    "join": re.compile(r"uneven|join"),
}


class What(enum.Enum):
    """Which of the tests, and so which part of Phalanx, is run."""

    DDP = "ddp"
    SYNC_BATCHNORM = "sync_batchnorm"
    COLLECTIVES = "collectives"


# What torch's own cannot pass here, and so has no baseline; the seconds are those with Phalanx. Written for NCCL and
# MPI, of what gloo has not: parts of different sizes, stacked outputs, messages to oneself. And one that torch skips
# on every Linux machine, and rightly so.
_BEYOND_TORCH = {
    What.DDP: {"test_DistributedDataParallel@2": 5.0},
    What.SYNC_BATCHNORM: {},
    What.COLLECTIVES: {
        "test_all_gather_into_stack_tensor_cuda@2": 0.4,
        "test_all_gather_v_cuda@2": 0.4,
        "test_all_to_all@2": 0.4,
        "test_all_to_all_complex@2": 0.4,
        "test_all_to_all_cuda@2": 0.4,
        "test_all_to_all_cuda_complex@2": 0.4,
        "test_all_to_all_full_group@2": 0.4,
        "test_all_to_all_full_group_cuda@2": 0.4,
        "test_all_to_all_group@4": 0.7,
        "test_all_to_all_group_cuda@4": 0.7,
        "test_batch_isend_irecv_nccl@2": 0.4,
        "test_batch_isend_irecv_self_nccl@2": 0.3,
        "test_reduce_scatter_tensor_cuda@2": 0.5,
    },
}


class Target(enum.Enum):
    """Whose implementation is run."""

    PHALANX = "phalanx"
    TORCH = "torch"
    DROP_IN = "drop_in"  # class and process group of Phalanx together, whatever the tests are about


class Status(enum.Enum):
    """How a case ended, over all its ranks."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"
    TIMEOUT = "timeout"


@dataclasses.dataclass(frozen=True, order=True)
class Case:
    """One test at one world size."""

    test: str
    world: int

    def __str__(self) -> str:
        return f"{self.test}@{self.world}"

    @classmethod
    def parse(cls, text: str) -> Case:
        test, _, world = text.partition("@")
        return cls(test, int(world))


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a case: `used` says what of torch's it built, and so what was replaced."""

    case: Case
    status: Status
    reason: str
    seconds: float
    used: frozenset[What]

    def to_json(self) -> str:
        return json.dumps(
            {
                "case": str(self.case),
                "status": self.status.value,
                "reason": self.reason,
                "seconds": self.seconds,
                "used": sorted(what.value for what in self.used),
            }
        )

    @classmethod
    def from_json(cls, line: str) -> Result:
        row = json.loads(line)
        return cls(
            Case.parse(row["case"]),
            Status(row["status"]),
            row["reason"],
            row["seconds"],
            frozenset(What(name) for name in row["used"]),
        )


def about(result: Result) -> What:
    """Tell which part of Phalanx a case tests: of what it uses, that which uses the others."""
    if What.SYNC_BATCHNORM in result.used:
        return What.SYNC_BATCHNORM
    return What.DDP if What.DDP in result.used else What.COLLECTIVES


def baseline_path(what: What) -> pathlib.Path:
    return _HERE / f"baseline_{what.value}.json"


def save_baseline(what: What, results: Iterable[Result]) -> None:
    """Keep the cases about `what` that pass with torch's own, with their seconds."""
    passed = {str(r.case): r.seconds for r in results if r.status is Status.PASS and about(r) is what}
    content = dict(sorted(passed.items()))
    baseline_path(what).write_text(json.dumps(content, indent=1) + "\n")


def applicable(what: What) -> dict[Case, float]:
    """Return the cases that pass with torch's own on the CPU, or are beyond it, and the seconds they took."""
    content = json.loads(baseline_path(what).read_text())
    content |= _BEYOND_TORCH[what]
    return {Case.parse(name): seconds for name, seconds in content.items()}


def is_beyond_torch(what: What, case: Case) -> bool:
    return str(case) in _BEYOND_TORCH[what]


def family(what: What, case: Case) -> str:
    """Return the heading under which a case is counted."""
    if what is What.DDP:
        for name, pattern in _FAMILIES.items():
            if pattern.search(case.test):
                return name
    return {What.DDP: "DDP", What.SYNC_BATCHNORM: "SyncBatchNorm", What.COLLECTIVES: "collectives"}[what]
