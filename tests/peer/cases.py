"""What a case is, how it ends, and which cases apply to the CPU."""

from __future__ import annotations

import dataclasses
import enum
import json
import pathlib
from collections.abc import Iterable

_HERE = pathlib.Path(__file__).parent


class What(enum.Enum):
    """Which of the tests, and so which part of Phalanx, is run."""

    DDP = "ddp"
    COLLECTIVES = "collectives"


class Target(enum.Enum):
    """Whose implementation is run."""

    PHALANX = "phalanx"
    TORCH = "torch"


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
    """Tell which part of Phalanx a case tests: one that wraps a model tests the wrapper."""
    return What.DDP if What.DDP in result.used else What.COLLECTIVES


def baseline_path(what: What) -> pathlib.Path:
    return _HERE / f"baseline_{what.value}.json"


def save_baseline(what: What, results: Iterable[Result]) -> None:
    """Keep the cases about `what` that pass with torch's own, with their seconds."""
    passed = {str(r.case): r.seconds for r in results if r.status is Status.PASS and about(r) is what}
    content = dict(sorted(passed.items()))
    baseline_path(what).write_text(json.dumps(content, indent=1) + "\n")


def applicable(what: What) -> dict[Case, float]:
    """Return the cases that pass with torch's own on the CPU, and the seconds they took."""
    content = json.loads(baseline_path(what).read_text())
    return {Case.parse(name): seconds for name, seconds in content.items()}
