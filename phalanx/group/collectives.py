"""What the collectives do, once their arguments have been checked: here and now, in the calling thread.

Each takes the encoded ticket of the call, and tensors as the user gave them. Transports want contiguous
memory, so whatever is not is copied in and out; gradients are not tracked.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import RankMismatchError
from phalanx.group import call_site, inline, ticket
from phalanx.group.group import Group
from phalanx.transport.protocol import Transport
from phalanx.transport.reductions import Reduction

Copies = list[tuple[Tensor, Tensor]]


def laid_out(tensor: Tensor, copies: Copies) -> Tensor:
    """The tensor without its graph if its memory is plain, else a plain copy, noted in `copies`."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return _unit_stride(tensor)
    plain = _unit_stride(tensor.resolve_conj().resolve_neg().contiguous())
    copies.append((plain, tensor))
    return plain


def _unit_stride(tensor: Tensor) -> Tensor:
    """A tensor of one element is contiguous whatever its strides; seen as bytes, they have to be 1."""
    if tensor.numel() == 1 and tensor.dim() and tensor.stride(-1) != 1:
        return tensor.as_strided(tensor.shape, (1,) * tensor.dim())
    return tensor


def _copy_back(copies: Copies) -> None:
    for plain, tensor in copies:
        tensor.copy_(plain)


class Collectives:
    """The collectives of one group over one transport."""

    def __init__(self, core: Group, transport: Transport) -> None:
        self.core, self.transport = core, transport
        self.rank, self.size = core.rank, core.size

    def barrier(self, wire: bytes) -> None:
        """Return when every rank has come."""
        with self.core.lock:
            self.core.tickets(wire)

    def monitored_barrier(self, wire: bytes) -> None:
        """As barrier, and no rank passes that others have given up waiting for."""
        with self.core.lock:
            self.core.tickets(wire)
            self.core.fence()

    def reduce(self, wire: bytes, tensor: Tensor, reduction: Reduction, root: int, factor: Any = None) -> None:
        """Combine `tensor` of all ranks into that of `root` (-1: of all)."""
        copies: Copies = []
        flat = laid_out(tensor, copies)
        if factor is not None:
            flat = flat * factor
            copies = [(flat, tensor.detach())]
        elif root not in (-1, self.rank):
            copies = []
        # What goes inline is decided by what all ranks agree on, never by how a tensor lies in memory here.
        if not (root == -1 and inline.reduce(self.core, flat, reduction)):
            with self.core.collective(wire) as fence:
                self.transport.reduce(flat, reduction, root, fence)
        if root in (-1, self.rank):
            _copy_back(copies)

    def reduce_many(self, wire: bytes, tensors: Sequence[Tensor], reduction: Reduction, factor: Any = None) -> None:
        """Combine several tensors of one dtype, as one."""
        whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        if factor is not None:
            whole = whole * factor
        with self.core.collective(wire) as fence:
            self.transport.reduce(whole, reduction, -1, fence)
        for tensor, part in zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    def broadcast(self, wire: bytes, tensor: Tensor, root: int) -> None:
        """Copy `tensor` of `root` to all ranks."""
        copies: Copies = []
        flat = laid_out(tensor, copies)
        outputs: list[Tensor | None] = [None] * self.size
        mine = flat if root == self.rank else None
        if mine is None:
            outputs[root] = flat
        with self.core.collective(wire) as fence:
            self.transport.share(mine, outputs, flat.numel() * flat.element_size(), fence)
        if mine is None:
            _copy_back(copies)

    def all_gather(
        self, wire: bytes, calls: Sequence[tuple[Sequence[Tensor], Tensor]], copies: Copies | None = None
    ) -> None:
        """Copy every rank's tensor into the outputs of all ranks; for each of `calls`, which go as one."""
        copies = [] if copies is None else copies
        if len(calls) == 1:
            given, mine = calls[0]
            flat = laid_out(mine, [])
            outputs = [laid_out(output, copies) for output in given]
        else:
            flat = torch.cat([mine.detach().reshape(-1) for _, mine in calls])
            outputs = [torch.empty_like(flat) for _ in range(self.size)]
            sizes = [mine.numel() for _, mine in calls]
            for place, output in enumerate(outputs):
                for part, (given, _) in zip(output.split(sizes), calls, strict=True):
                    copies.insert(0, (part.view(given[place].shape), given[place].detach()))
        with self.core.collective(wire) as fence:
            self.transport.share(flat, outputs, flat.numel() * flat.element_size(), fence)
        _copy_back(copies)

    def all_gather_uneven(self, wire: bytes, outputs: Sequence[Tensor], mine: Tensor) -> None:
        """As all_gather, where the ranks' tensors differ in size: padded to the largest."""
        with self.core.collective(wire) as fence:
            most = max(output.numel() for output in outputs)
            rows = self._share_padded(mine.detach().reshape(-1), most, fence)
        for output, row in zip(outputs, rows, strict=True):
            output.detach().copy_(row[: output.numel()].view(output.shape))

    def gather(self, wire: bytes, outputs: Sequence[Tensor], mine: Tensor, root: int) -> None:
        """Copy every rank's tensor into the outputs of `root`."""
        copies: Copies = []
        flat = laid_out(mine, [])
        parts: list[Tensor | None] = [None] * self.size
        parts[root] = flat
        wanted: list[Tensor | None] = [None] * self.size
        if root == self.rank:
            wanted = [laid_out(output, copies) for output in outputs]
        with self.core.collective(wire) as fence:
            self.transport.route(parts, wanted, flat.numel() * flat.element_size(), fence)
        _copy_back(copies)

    def scatter(self, wire: bytes, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        """Copy `inputs[r]` of `root` into `output` of rank r."""
        copies: Copies = []
        flat = laid_out(output, copies)
        parts: list[Tensor | None] = [None] * self.size
        outputs: list[Tensor | None] = [None] * self.size
        outputs[root] = flat
        if root == self.rank:
            parts = [laid_out(part, []) for part in inputs]
        with self.core.collective(wire) as fence:
            self.transport.route(parts, outputs, flat.numel() * flat.element_size(), fence)
        _copy_back(copies)

    def reduce_scatter(
        self,
        wire: bytes,
        calls: Sequence[tuple[Tensor, Sequence[Tensor]]],
        reduction: Reduction,
        factor: Any = None,
    ) -> None:
        """Combine `inputs[r]` of all ranks into the output of rank r; for each of `calls`, as one."""
        copies: Copies = []
        if len(calls) == 1:
            output, parts = laid_out(calls[0][0], copies), [laid_out(part, []) for part in calls[0][1]]
        else:
            output = torch.cat([output.detach().reshape(-1) for output, _ in calls])
            parts = [
                torch.cat([inputs[place].detach().reshape(-1) for _, inputs in calls]) for place in range(self.size)
            ]
            pieces = output.split([each.numel() for each, _ in calls])
            copies = [(piece.view(each.shape), each.detach()) for piece, (each, _) in zip(pieces, calls, strict=True)]
        if factor is not None:
            parts = [part * factor for part in parts]
        with self.core.collective(wire) as fence:
            self.transport.reduce_scatter(output, parts, reduction, fence)
        _copy_back(copies)

    def reduce_scatter_uneven(
        self, wire: bytes, output: Tensor, parts: Sequence[Tensor], reduction: Reduction, factor: Any = None
    ) -> None:
        """As reduce_scatter, where the parts differ in size: all are combined, and each rank takes its own."""
        whole = torch.cat([part.detach().reshape(-1) for part in parts])
        if factor is not None:
            whole = whole * factor
        with self.core.collective(wire) as fence:
            self.transport.reduce(whole, reduction, -1, fence)
        start = sum(part.numel() for part in parts[: self.rank])
        output.detach().copy_(whole[start : start + output.numel()].view(output.shape))

    def all_to_all(
        self, head: bytes, inputs: Sequence[Tensor], outputs: Sequence[Tensor], copies: Copies | None = None
    ) -> None:
        """Copy `inputs[j]` of rank i into `outputs[i]` of rank j; sizes are compared first."""
        copies = [] if copies is None else copies
        given = [laid_out(part, []) for part in inputs]
        wanted = [laid_out(part, copies) for part in outputs]
        sizes = struct.Struct(f"<{2 * self.size}Q")
        mine = sizes.pack(*(part.numel() for part in given), *(part.numel() for part in wanted))
        with self.core.collective(head + mine) as fence:
            table = [sizes.unpack(ticket.extra(wire)) for wire in fence()]
            self._compare(table)
            largest = max(max(row[: self.size]) for row in table) * given[0].element_size()
            self.transport.route(given, wanted, largest, fence)
        _copy_back(copies)

    def _compare(self, table: Sequence[Sequence[int]]) -> None:
        n = self.size
        if all(table[i][j] == table[j][n + i] for i in range(n) for j in range(n)):
            return
        calls = {
            rank: f"all_to_all(sends {list(row[:n])}, expects {list(row[n:])} elements, by rank)"
            for rank, row in enumerate(table)
        }
        calls[self.rank] += f" at {call_site.here()}"
        raise RankMismatchError(
            calls, self.rank, "What rank i sends to rank j must be what rank j expects from rank i."
        )

    def reduce_sparse(self, wire: bytes, tensor: Tensor) -> None:
        """Add sparse tensors of all ranks: every rank gets all indices and values, and adds them itself."""
        mine = tensor.detach().coalesce()
        indices, values = mine.indices().contiguous(), mine.values().contiguous()
        with self.core.collective(wire + struct.pack("<Q", indices.shape[1])) as fence:
            counts = [struct.unpack("<Q", ticket.extra(other))[0] for other in fence()]
            most = max(counts)
            all_indices = self._share_padded(indices.t(), most, fence)
            all_values = self._share_padded(values, most, fence)
        rows = torch.cat([part[:count] for part, count in zip(all_indices, counts, strict=True)])
        total = torch.cat([part[:count] for part, count in zip(all_values, counts, strict=True)])
        result = torch.sparse_coo_tensor(rows.t(), total, mine.shape, check_invariants=False).coalesce()
        with torch.no_grad():
            tensor.copy_(result)  # not of a detached alias: indices and values are replaced, not written to

    def _share_padded(self, rows: Tensor, most: int, fence: object) -> list[Tensor]:
        shape = (most, *rows.shape[1:])
        mine = rows.new_zeros(shape)
        mine[: rows.shape[0]] = rows
        outputs = [torch.empty_like(mine) for _ in range(self.size)]
        self.transport.share(mine, outputs, mine.numel() * mine.element_size(), fence)  # type: ignore[arg-type]
        return outputs
