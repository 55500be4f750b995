"""Sparse gradients (embeddings with sparse=True): exchanged as rows, never made dense."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.group import ticket
from phalanx.group.dtypes import CODES
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.group.ticket import Operation
from phalanx.transport.reductions import Reduction


def reduce(
    group: PhalanxProcessGroup, parameter: torch.nn.Parameter, scales: Sequence[float], takes: bool = True
) -> None:
    """Replace the gradient of `parameter` by the scaled sum over ranks. Every rank, same order.

    A rank without a gradient contributes nothing. If some rank's gradient is dense, the result is dense.
    """
    core, gradient = group.core, parameter.grad
    mine = gradient.detach().coalesce() if gradient is not None and gradient.is_sparse else None
    dense = gradient is not None and not gradient.is_sparse
    said = [-1 if dense else 0 if mine is None else mine._nnz()]
    wires = core.exchange(said[0].to_bytes(8, "little", signed=True), "the synchronisation of a sparse gradient")
    heard = [int.from_bytes(wire, "little", signed=True) for wire in wires]
    if -1 in heard:
        whole = torch.zeros_like(parameter) if gradient is None else gradient.detach().to_dense()
        whole = whole.clone(memory_format=torch.contiguous_format).mul_(scales[core.rank])
        wire = ticket.plain(Operation.ALL_REDUCE, Reduction.SUM, CODES[whole.dtype], whole.numel(), -1)
        with core.collective(wire) as fence:
            group.transport.reduce(whole, Reduction.SUM, -1, fence)
        if takes:
            parameter.grad = whole
        return
    rows = max(heard)
    width = parameter.shape[1:].numel()
    indices = torch.zeros(rows, dtype=torch.int64, device=parameter.device)
    values = torch.zeros(rows, width, dtype=parameter.dtype, device=parameter.device)
    if mine is not None:
        indices[: mine._nnz()] = mine.indices()[0]
        values[: mine._nnz()] = mine.values().reshape(-1, width) * scales[core.rank]
    all_indices, all_values = _gather(group, indices), _gather(group, values)
    total = torch.sparse_coo_tensor(
        torch.cat([part[:count] for part, count in zip(all_indices, heard, strict=True)])[None],
        torch.cat([part[:count] for part, count in zip(all_values, heard, strict=True)]).reshape(
            -1, *parameter.shape[1:]
        ),
        parameter.shape,
        check_invariants=False,
    ).coalesce()
    if takes:
        parameter.grad = total


def _gather(group: PhalanxProcessGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    outputs = [torch.empty_like(tensor) for _ in range(group.core.size)]
    wire = ticket.plain(Operation.ALL_GATHER, 0, CODES[tensor.dtype], tensor.numel(), -1)
    with group.core.collective(wire) as fence:
        group.transport.share(tensor, outputs, tensor.numel() * tensor.element_size(), fence)
    return outputs
