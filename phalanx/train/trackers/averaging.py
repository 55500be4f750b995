"""The mean of metrics over ranks that need not have measured the same things. Pure.

Each rank reports its step and, for every key, a value and the number of items behind it. A key's mean is
taken over the ranks that gave it, weighted by items. Ranks need not agree on keys beforehand, which is what
goes wrong with one all-reduce per key: different keys, or another order of them, never match.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.errors import MisuseError, RankMismatchError

STEP = "step"
_CALL = "tracker.log"


@dataclass(frozen=True)
class Report:
    """What one rank has measured: `values[key]` is a value and its number of items.

    `wrong` and `instead` say why this rank has nothing to report after all.
    """

    step: int
    values: Mapping[str, tuple[float, float]]
    wrong: str = ""
    instead: str = ""

    def record(self) -> dict[str, Any]:
        """As JSON can hold it; `Report(**record)` reads it back."""
        return asdict(self)


def report(values: Mapping[str, Any], step: int, n: float | Mapping[str, float] = 1.0) -> Report:
    """Check and describe what this rank logs; what is wrong with it is in the report, for all ranks to see."""
    measured: dict[str, tuple[float, float]] = {}
    try:
        step = operator.index(step)
    except TypeError:
        return Report(0, {}, f"step={step!r} is not an integer", "tracker.log({...}, step=17)")
    for key, value in values.items():
        if not isinstance(key, str) or not key or key == STEP or not key.isprintable():
            return Report(step, {}, f"{key!r} cannot be a key", f"a printable text other than {STEP!r}")
        number = _number(value)
        if number is None:
            return Report(step, {}, f"{key} is {_shown(value)}, not one number", f"{key}=loss.item(), or its mean")
        items = _number(n.get(key, 1.0) if isinstance(n, Mapping) else n)
        if items is None or not 0 <= items < math.inf:
            return Report(step, {}, f"n={n!r} is no number of items", "n=len(batch)")
        measured[key] = (number, items)
    return Report(step, measured)


def mean(reports: Sequence[Report | None], rank: int = 0) -> dict[str, float]:
    """Return each key's mean over the ranks that gave it; None stands for a rank that takes no part.

    `rank` is who asks, for the texts of errors.

    The sums run in rank order, so that every rank gets the same bits. A rank with n = 0 contributes nothing,
    whatever its value; the mean of no items at all is NaN. Keys come in the order in which ranks gave them,
    rank 0's first. Raises MisuseError if a rank's values cannot be logged and RankMismatchError if the steps
    differ.
    """
    given = {peer: report for peer, report in enumerate(reports) if report is not None}
    for peer, each in given.items():
        if each.wrong:
            told_by = peer if peer != rank else None
            raise MisuseError(f"{_CALL}(...) on rank {peer}: {each.wrong}", each.instead, rank, told_by)
    if len({each.step for each in given.values()}) > 1:
        calls = {peer: f"{_CALL}(..., step={each.step})" for peer, each in given.items()}
        raise RankMismatchError(calls, rank, "All ranks must log the same step.")
    sums: dict[str, list[float]] = {}
    for each in given.values():
        for key, (value, items) in each.values.items():
            total = sums.setdefault(key, [0.0, 0.0])
            if items:
                total[0] += value * items
                total[1] += items
    return {key: total / items if items else math.nan for key, (total, items) in sums.items()}


def _number(value: Any) -> float | None:
    """A number, a tensor or an array of one element as a float; None for anything else."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
