"""Small all-reduces travel inside the tickets: one exchange, no shared memory.

Every rank adds the contributions itself, in rank order, so all get the same bits. With numpy, whose calls cost
a fraction of torch's at this size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from phalanx.group import ticket
from phalanx.group.dtypes import CODES
from phalanx.group.group import Group
from phalanx.group.ticket import Operation
from phalanx.transport.reductions import Reduction

TAG = (1 << 64) - 1
"""The tag of these tickets: a rank that follows has nothing to post."""

_LARGEST_BYTES = 2048
_FUNCTIONS: dict[Reduction, Callable[..., Any]] = {
    Reduction.SUM: np.add,
    Reduction.PRODUCT: np.multiply,
    Reduction.MIN: np.minimum,
    Reduction.MAX: np.maximum,
}
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.uint8: np.dtype(np.uint8),
}


def suits(dtype: torch.dtype, count: int, reduction: Reduction) -> bool:
    """Whether an all-reduce goes inline: decided by what all ranks agree on, and by nothing else."""
    return reduction in _FUNCTIONS and dtype in _NUMPY and 0 < count * dtype.itemsize <= _LARGEST_BYTES


def reduce(core: Group, tensor: torch.Tensor, reduction: Reduction) -> bool:
    """All-reduce a tensor inline if it suits and lies plainly in this process's memory; else return False."""
    count, dtype = tensor.numel(), tensor.dtype
    if not suits(dtype, count, reduction) or tensor.layout is not torch.strided or not tensor.is_cpu:
        return False
    if not tensor.is_contiguous() or tensor.is_neg():
        return False
    # By address, not by tensor.numpy(): that would make the user's storage refuse to be resized for ever.
    size = count * dtype.itemsize
    mine = np.frombuffer((ctypes.c_char * size).from_address(tensor.data_ptr()), _NUMPY[dtype])
    wire = ticket.plain(Operation.ALL_REDUCE, reduction, CODES[dtype], count, -1, TAG) + mine.tobytes()
    with core.lock:
        got = core.tickets(wire)
        parts = [np.frombuffer(each, mine.dtype, count, ticket.HEAD_BYTES) for each in got if not ticket.follows(each)]
    if len(parts) > 1:
        function = _FUNCTIONS[reduction]
        function(parts[0], parts[1], out=mine)
        for part in parts[2:]:
            function(mine, part, out=mine)
    return True
