"""Small all-reduces travel inside the tickets: one exchange, no shared memory.

Every rank adds the contributions itself, in rank order, so all get the same bits. With numpy, whose calls cost
a fraction of torch's at this size.
"""

from __future__ import annotations

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
_DTYPES = {torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8}
_CODES = {torch.empty(0, dtype=dtype).numpy().dtype: CODES[dtype] for dtype in _DTYPES}


def suits(dtype: torch.dtype, count: int, reduction: Reduction) -> bool:
    """Whether an all-reduce goes inline: decided by what all ranks agree on, and by nothing else."""
    return reduction in _FUNCTIONS and dtype in _DTYPES and 0 < count * dtype.itemsize <= _LARGEST_BYTES


def reduce(core: Group, tensor: torch.Tensor, reduction: Reduction) -> bool:
    """All-reduce a tensor inline if it suits and lies plainly in this process's memory; else return False."""
    try:
        array = tensor.numpy()
    except (RuntimeError, TypeError):  # on a device, with a graph, sparse, conjugated, a dtype numpy has not
        return False
    code = _CODES.get(array.dtype)
    function = _FUNCTIONS.get(reduction)
    if code is None or function is None or not 0 < array.nbytes <= _LARGEST_BYTES:
        return False
    if not array.flags.c_contiguous:
        return False
    mine = array.reshape(-1)
    wire = ticket.plain(Operation.ALL_REDUCE, reduction, code, mine.size, -1, TAG) + mine.tobytes()
    with core.lock:
        got = core.tickets(wire)
        parts = [
            np.frombuffer(each, mine.dtype, mine.size, ticket.HEAD_BYTES) for each in got if not ticket.follows(each)
        ]
    if len(parts) > 1:
        function(parts[0], parts[1], out=mine)
        for part in parts[2:]:
            function(mine, part, out=mine)
    return True
