"""Events for torch's profiler, one for each collective: `phalanx:all_reduce`, with the shapes of its tensors.

torch marks events of communication as asynchronous, and programs that read profiles look for that mark. The
profiler sets it where an event ends in another thread than it began in, and only a thread of torch's own
pool shares the profiler's state; so that is where these end. Costs nothing while no profiler is on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from phalanx.group.ticket import Operation

is_on: Callable[[], bool] = torch.autograd._profiler_enabled

_NAMES = {
    Operation.ALL_REDUCE_SPARSE: "all_reduce",
    Operation.REDUCE_SCATTER: "reduce_scatter_tensor",
}


def name_of(operation: Operation) -> str:
    """What torch calls an operation in profiles."""
    return _NAMES.get(operation, operation.name.lower())


_open: list[Any] = []
_NOTHING = torch.zeros(())


@cache
def _elsewhere() -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that ends the last opened event on a thread of torch's pool; made when first needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)

        # Without annotations everything is a tensor to the compiler, which cannot read postponed ones.
        @torch.jit.ignore
        def leave(n):  # type: ignore[no-untyped-def]
            _open.pop().__exit__(None, None, None)
            return n

        @torch.jit.script
        def body(n):  # type: ignore[no-untyped-def]
            return leave(n)

        @torch.jit.script
        def fork(n):  # type: ignore[no-untyped-def]
            return torch.jit.wait(torch.jit.fork(body, n))

    return fork


@contextmanager
def event(name: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Record one event around the body."""
    record = torch._C._profiler._RecordFunctionFast(name, list(tensors))
    end = _elsewhere()
    record.__enter__()
    try:
        yield
    finally:
        _open.append(record)
        end(_NOTHING)
