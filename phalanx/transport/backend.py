"""Any c10d group as a transport: Gloo where ranks share no memory, NCCL for CUDA tensors.

Sums are left to the backend, so its algorithm decides the order of the additions; still all ranks receive
the same bits, because one rank finishes each element and the others copy it. What the backend would round
twice or does not know is arranged here: half precision travels and is added as float32 and rounded once, bool
is reduced as its logical meaning, complex numbers as pairs, AVG as a sum and one division. The rest (products
of complex numbers, bitwise operations) is gathered and combined in rank order.

Tickets are compared before the backend is called, since its calls have no way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from phalanx.errors import InternalError
from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import Reduction, combine, is_narrow, scale_into

_OPS = {
    Reduction.SUM: ReduceOp.SUM,
    Reduction.AVG: ReduceOp.SUM,
    Reduction.PREMUL_SUM: ReduceOp.SUM,
    Reduction.PRODUCT: ReduceOp.PRODUCT,
    Reduction.MIN: ReduceOp.MIN,
    Reduction.MAX: ReduceOp.MAX,
}
# Of zeros and ones in uint8, which wraps: an odd sum is an exclusive or.
_OPS_ON_BOOL = {
    Reduction.SUM: ReduceOp.MAX,
    Reduction.MAX: ReduceOp.MAX,
    Reduction.BOR: ReduceOp.MAX,
    Reduction.PRODUCT: ReduceOp.MIN,
    Reduction.MIN: ReduceOp.MIN,
    Reduction.BAND: ReduceOp.MIN,
    Reduction.BXOR: ReduceOp.SUM,
}
_DIRECT = {torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_LOOK_AFTER = timedelta(seconds=0.5)
_unclosed: list[Any] = []  # groups that are kept for good
_SUMS = {Reduction.SUM, Reduction.AVG, Reduction.PREMUL_SUM}


class Backend:
    """The transport over `group`, a c10d process group of the same ranks."""

    def __init__(self, group: Any, name: str = "gloo") -> None:
        self.name, self._group = name, group
        self._looks = name != "nccl"  # whose works end no wait early
        self._rank, self.size = group.rank(), group.size()
        self.unfinished = 0  # sums

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int, fence: Fence) -> None:
        """See Transport.reduce."""
        fence()
        total = self._combined(tensor.view(-1), reduction, root, fence)
        if root in (-1, self._rank):
            tensor.view(-1).copy_(total)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction, fence: Fence
    ) -> None:
        """See Transport.reduce_scatter."""
        fence()
        count = output.numel()
        total = self._combined(torch.cat([part.view(-1) for part in inputs]), reduction, -1, fence)
        output.view(-1).copy_(total[self._rank * count : (self._rank + 1) * count])

    def share(self, mine: torch.Tensor | None, outputs: Sequence[torch.Tensor | None], size: int, fence: Fence) -> None:
        """See Transport.share: all ranks give to all, or one rank broadcasts."""
        fence()
        if not size:
            return
        root = giver(mine, outputs, self._rank)
        if root < 0:
            parts = self._gathered(_bytes(mine), fence)  # type: ignore[arg-type]
            for part, out in zip(parts, outputs, strict=True):
                _bytes(out).copy_(part)  # type: ignore[arg-type]
            return
        options = dist.BroadcastOptions()
        options.rootRank = root
        tensor = mine if root == self._rank else outputs[root]
        self._finish(self._group.broadcast([_bytes(tensor)], options), fence)  # type: ignore[arg-type]

    def route(
        self,
        parts: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None],
        largest: int,
        fence: Fence,
    ) -> None:
        """See Transport.route."""
        fence()
        works = []
        mine, own = parts[self._rank], outputs[self._rank]
        if mine is not None and own is not None:
            own.view(-1).copy_(mine.view(-1))
        device = next((t.device for t in (*parts, *outputs) if t is not None), torch.device("cpu"))
        if device.type == "cuda":
            self._group._start_coalescing(device)
        for peer in range(self.size):
            part, out = parts[peer], outputs[peer]
            if peer != self._rank and part is not None and part.numel():
                works.append(self._group.send([_bytes(part)], peer, 0))
            if peer != self._rank and out is not None and out.numel():
                works.append(self._group.recv([_bytes(out)], peer, 0))
        if device.type == "cuda":
            works = [self._group._end_coalescing(device)]
        for work in works:
            if work is not None:
                self._wait(work, fence)  # messages can be waited for only once

    def close(self) -> None:
        """See Transport.close. A group with unfinished sums is kept: closing would wait for those of other ranks."""
        if self.unfinished:
            self.keep()
        else:
            self._group.shutdown()

    def keep(self) -> None:
        """Keep the group for good, instead of closing it."""
        _unclosed.append(self._group)

    def _combined(self, flat: torch.Tensor, reduction: Reduction, root: int, fence: Fence) -> torch.Tensor:
        """The combination of `flat` of all ranks, in memory of its own; only a root may read it."""
        if not flat.numel():
            return flat.clone()
        if flat.dtype is torch.bool:
            total = flat.to(torch.uint8)
            self._reduce_here(total, _OPS_ON_BOOL[reduction], root, fence)
            return (total & 1).to(torch.bool)
        wide = wide_dtype(flat.dtype)
        if reduction not in _OPS or (flat.dtype.is_complex and reduction not in _SUMS) or flat.dtype is torch.uint64:
            parts = [part.view(flat.dtype) for part in self._gathered(_bytes(flat), fence)]
            out = torch.empty_like(flat)
            combine(parts, out, reduction)
            return out
        total = flat.to(wide, copy=True)
        self._reduce_here(torch.view_as_real(total) if wide.is_complex else total, _OPS[reduction], root, fence)
        if reduction is not Reduction.AVG:
            return total.to(flat.dtype)
        if wide.is_floating_point or wide.is_complex:
            return total.div_(self.size).to(flat.dtype)
        return total.div_(self.size, rounding_mode="trunc").to(flat.dtype)

    def _reduce_here(self, total: torch.Tensor, op: Any, root: int, fence: Fence) -> None:
        if root < 0:
            options: Any = dist.AllreduceOptions()
            options.reduceOp = ReduceOp(op)
            self._finish(self._group.allreduce([total], options), fence)
        else:
            options = dist.ReduceOptions()
            options.reduceOp, options.rootRank = ReduceOp(op), root
            self._finish(self._group.reduce([total], options), fence)

    def _gathered(self, mine: torch.Tensor, fence: Fence) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        self._finish(self._group.allgather([parts], [mine]), fence)
        return parts

    def begin(self, total: torch.Tensor, op: Any = ReduceOp.SUM) -> Any:
        """Begin to reduce `total`, of a dtype of wide_dtype(), over all ranks, in place; finish() what is returned."""
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = ReduceOp(op), True
        self.unfinished += 1
        return self._group.allreduce([torch.view_as_real(total) if total.is_complex() else total], options)

    def finish(self, work: Any, fence: Fence) -> None:
        """Wait for what has been begun."""
        self._finish(work, fence)
        self.unfinished -= 1

    def _finish(self, work: Any, fence: Fence) -> None:
        while self._looks and not work.is_completed():
            try:
                work.wait(_LOOK_AFTER)
            except RuntimeError:  # it is not done, or has failed; a rank that is gone may be none that it waits for
                fence.look_for_lost(0.0)
        self._wait(work, fence)

    def _wait(self, work: Any, fence: Fence) -> None:
        try:
            work.wait()
        except RuntimeError:
            fence.look_for_lost()
            raise


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a backend adds up contributions of `dtype`: wide enough, and one that it knows."""
    if is_narrow(dtype):
        return torch.float32
    if dtype.is_complex:
        return dtype if dtype.itemsize >= 8 else torch.complex64
    return dtype if dtype in _DIRECT else _WIDER.get(dtype, torch.int64)


def giver(mine: torch.Tensor | None, outputs: Sequence[torch.Tensor | None], rank: int) -> int:
    """Which rank gives in a `share`; -1 if all do."""
    wanted = [peer for peer, out in enumerate(outputs) if out is not None]
    if mine is not None and len(wanted) == len(outputs) > 1:
        return -1
    if mine is not None and wanted in ([], [rank]):
        return rank
    if mine is None and len(wanted) == 1:
        return wanted[0]
    raise InternalError(f"share where rank {rank} gives {mine is not None} and wants {wanted}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class BackendGradients:
    """Gradients of one reducer in this rank's own memory, reduced through a group's transport.

    The counterpart of SharedGradients; what a rank has given is intact until the last fence.
    """

    def __init__(
        self, group: Any, layout: Sequence[tuple[torch.dtype, int]], device: torch.device | str = "cpu"
    ) -> None:
        self._rank = group.core.rank
        self._transport = group.transport_for(torch.device(device))
        self._layout, self._device = layout, device
        self.renew()

    def renew(self) -> None:
        """See Gradients.renew."""
        self.own: list[torch.Tensor] = [
            torch.zeros(count, dtype=dtype, device=self._device) for dtype, count in self._layout
        ]

    def reduce(
        self,
        spans: Sequence[tuple[int, int, int]],
        scales: Sequence[float],
        fence: Fence,
        takes: bool = True,
    ) -> None:
        """Replace `spans` (region, start, stop) of every rank by sum(scale[r] x region of r).

        A rank of scale 0 is not read. Equal scales scale the sum, so that it is rounded once.
        """
        scale, even = scales[self._rank], len(set(scales)) == 1
        totals = []
        for region, start, stop in spans:
            given = self.own[region][start:stop]
            total = given.to(wide_dtype(given.dtype), copy=True)
            if not scale:
                total.zero_()
            elif not even:
                total.mul_(scale)
            self._transport.reduce(total, Reduction.SUM, -1, fence)
            totals.append(total)
        fence()
        for (region, start, stop), total in zip(spans, totals, strict=True) if takes else ():
            scale_into(total, scale if even else 1.0, self.own[region][start:stop])
