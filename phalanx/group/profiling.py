"""Events for torch's profiler, one for each collective: `phalanx:all_reduce`, with the shapes of its tensors.

They begin and end in the calling thread. torch marks the events of its own backends as asynchronous by ending
them in a thread of its pool; doing that from Python crashed processes that had been forked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

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


def event(name: str, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Record one event around the body."""
    return torch._C._profiler._RecordFunctionFast(name, list(tensors))
