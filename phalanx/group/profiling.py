"""Events for torch's profiler, one for each collective: `phalanx:all_reduce`, with the shapes of its tensors.

They begin and end in the calling thread. torch marks the events of its own backends as asynchronous by ending
them in a thread of its pool; doing that from Python crashed processes that had been forked. A trace gets
the same events, also while torch's profiler is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from phalanx.group import tracing
from phalanx.group.ticket import Operation

is_on: Callable[[], bool] = torch.autograd._profiler_enabled

_NAMES = {
    Operation.ALL_REDUCE_SPARSE: "all_reduce",
    Operation.REDUCE_SCATTER: "reduce_scatter_tensor",
}


def name_of(operation: Operation) -> str:
    """What torch calls an operation in profiles."""
    return _NAMES.get(operation, operation.name.lower())


def event(name: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Record one event around the body."""
    if (recorder := tracing.recorder) is not None:
        return _traced(recorder, name, tensors)
    return torch._C._profiler._RecordFunctionFast(name, list(tensors))


def listen(recorder: tracing.Recorder | None) -> None:
    """Tell `recorder` of everything from now on, or nobody but torch's profiler."""
    global is_on
    tracing.recorder = recorder
    is_on = torch.autograd._profiler_enabled if recorder is None else _always


def _always() -> bool:
    return True


@contextmanager
def _traced(recorder: tracing.Recorder, name: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    with recorder.call(name, tensors), torch._C._profiler._RecordFunctionFast(name, list(tensors)):
        yield
