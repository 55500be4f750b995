"""The options of a collective, from any of the ways in which torch.distributed lets one give them.

`pg.allreduce([t], AllreduceOptions())`, `pg.allreduce([t], ReduceOp.SUM)` and `pg.allreduce(t)` are one call.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import ReduceOp

from phalanx.errors import MisuseError
from phalanx.transport.reductions import Reduction

_Options = TypeVar("_Options")


def options(kind: type[_Options], given: Any, timeout: timedelta | None = None, **fields: Any) -> _Options:
    """Return `given` if it is a `kind`; else a new one with the given timeout, op and root."""
    if isinstance(given, kind):
        return given
    made = kind()
    if isinstance(given, timedelta):
        timeout = given
    elif isinstance(given, int):
        fields["rootRank"] = given
    elif given is not None:
        fields["reduceOp"] = given
    if timeout is not None:
        fields["timeout"] = timeout
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value if name != "reduceOp" else _as_reduce_op(value))
    return made


def _as_reduce_op(value: Any) -> Any:
    return value if isinstance(value, ReduceOp) else ReduceOp(value)


# A ReduceOp's hash is the number of its kind; as a key of a dict it costs seven microseconds.
REDUCTIONS: dict[int, Reduction] = {
    hash(getattr(ReduceOp, reduction.name)): reduction for reduction in Reduction if reduction
}


def reduction_of(op: Any) -> tuple[Reduction, Any]:
    """Return the reduction and its factor (None but for PREMUL_SUM)."""
    found = REDUCTIONS.get(hash(op))
    if found is None:
        raise MisuseError(f"reduction with {op}", "one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR")
    return found, op.factor if found is Reduction.PREMUL_SUM else None
