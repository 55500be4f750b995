"""The collectives that combine: all_reduce, reduce and reduce_scatter, in all their forms."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceCoalescedOptions
from torch.distributed import AllreduceOptions, ReduceOptions, ReduceScatterOptions, Work

from phalanx.group import arguments, inline, profiling
from phalanx.group.adapter import Adapter, Nccl
from phalanx.group.arguments import ArgumentError, code
from phalanx.group.dtypes import CODES
from phalanx.group.overloads import REDUCTIONS, options, reduction_of
from phalanx.group.ticket import Operation, plain
from phalanx.group.works import DoneWork
from phalanx.transport.reductions import Reduction, check

_ALL_REDUCE = int(Operation.ALL_REDUCE)
_PREMUL_SUM = Reduction.PREMUL_SUM
_UNSET = AllreduceOptions().timeout


class Reducing(Adapter):
    """A process group with the collectives that combine."""

    def allreduce(  # type: ignore[override]  # takes both overloads of the stubs
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        """Combine a tensor of all ranks, in place."""
        if (
            type(opts) is AllreduceOptions
            and len(tensors) == 1
            and not (self._worker.pending or self._coalesced is not None or self._parts.closed or self.board.closed)
            and not opts.asyncOp
            and opts.timeout == _UNSET
            and not profiling.is_on()
        ):
            # The fast path: one plain CPU tensor, at once. What it does not know falls through. Every call
            # into torch counts here: after a system call each costs several times what it does in a loop.
            tensor, reduction = tensors[0], REDUCTIONS.get(hash(opts.reduceOp), _PREMUL_SUM)
            done = inline.reduce(self.core, tensor, reduction)
            if not done and (
                (tensor.dtype, reduction) in self._checked
                and tensor.layout is torch.strided
                and tensor.is_cpu
                and not tensor.requires_grad
                and tensor.is_contiguous()
                and not (tensor.is_neg() or tensor.is_conj())
                and not inline.suits(tensor.dtype, tensor.numel(), reduction)
            ):
                wire = plain(_ALL_REDUCE, reduction, CODES[tensor.dtype], tensor.numel(), -1)
                with self.core.collective(wire) as fence:
                    self.transport.reduce(tensor, reduction, -1, fence)
                done = True
            if done:
                self._count += 1
                work = DoneWork()
                work.tensors = tensors
                return work
        return self._all_reduce(tensors, options(AllreduceOptions, opts, timeout, reduceOp=op))

    def _all_reduce(self, tensors: Any, opts: AllreduceOptions) -> Work:
        tensor = arguments.single(tensors, "all_reduce")
        if tensor.layout is not torch.strided:
            return self._all_reduce_sparse(tensor, opts)
        reduction, factor = self._reduction(opts.reduceOp, tensor)
        wire = plain(_ALL_REDUCE, reduction, code(tensor, "all_reduce"), tensor.numel(), -1)
        nccl = ("allreduce", [tensor], opts)
        return self._launch(opts, [tensor], tensor, wire, nccl, self.collectives.reduce, tensor, reduction, -1, factor)

    def _all_reduce_sparse(self, tensor: Tensor, opts: AllreduceOptions) -> Work:
        reduction, _ = reduction_of(opts.reduceOp)
        if tensor.layout is not torch.sparse_coo or reduction is not Reduction.SUM:
            raise ArgumentError(
                "unsupported layout or reduction operation (all_reduce of sparse tensors only works "
                f"with ReduceOp.SUM and the COO layout), got {tensor.layout} and {reduction.name}"
            )
        tag = 1 + tensor.sparse_dim()
        wire = plain(Operation.ALL_REDUCE_SPARSE, reduction, code(tensor, "all_reduce"), tensor.shape.numel(), -1, tag)
        nccl = ("allreduce", [tensor], opts)
        return self._launch(opts, [tensor], tensor, wire, nccl, self.collectives.reduce_sparse, tensor)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Combine several tensors of all ranks, in place, as one."""
        opts = options(AllreduceCoalescedOptions, opts)
        arguments.non_empty(tensors, "allreduce_coalesced")
        arguments.one_type(tensors, "allreduce_coalesced")
        reduction, factor = self._reduction(opts.reduceOp, tensors[0])
        count = sum(tensor.numel() for tensor in tensors)
        wire = plain(_ALL_REDUCE, reduction, code(tensors[0], "all_reduce"), count, -1, len(tensors))
        nccl = ("allreduce_coalesced", tensors, opts)
        return self._launch(
            opts, tensors, tensors[0], wire, nccl, self.collectives.reduce_many, tensors, reduction, factor
        )

    def reduce(  # type: ignore[override]
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        """Combine a tensor of all ranks into that of the root."""
        opts = options(ReduceOptions, opts, timeout, reduceOp=op, rootRank=root)
        tensor = arguments.dense(arguments.single(tensors, "reduce"), "reduce")
        root = arguments.root_rank(opts.rootRank, self.core.size, "reduce")
        reduction, factor = self._reduction(opts.reduceOp, tensor)
        wire = plain(Operation.REDUCE, reduction, code(tensor, "reduce"), tensor.numel(), root)
        nccl = ("reduce", [tensor], opts)
        return self._launch(
            opts, [tensor], tensor, wire, nccl, self.collectives.reduce, tensor, reduction, root, factor
        )

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        """Combine the r-th input of all ranks into the output of rank r. Sizes may differ by rank."""
        opts = options(ReduceScatterOptions, opts, timeout, reduceOp=op)
        output = arguments.dense(arguments.single(outputs, "reduce_scatter"), "reduce_scatter")
        parts = arguments.per_rank(inputs, self.core.size, "reduce_scatter", "input")
        nccl = ("reduce_scatter", [output], [list(parts)], opts)
        tag = arguments.uneven(parts, output, self.core.rank, "reduce_scatter")
        if tag:
            reduction, factor = self._reduction(opts.reduceOp, output)
            count = sum(part.numel() for part in parts)
            wire = plain(_ALL_REDUCE, reduction, code(output, "reduce_scatter"), count, -1, tag)
            body = self.collectives.reduce_scatter_uneven
            return self._launch(opts, [output], output, wire, nccl, body, output, parts, reduction, factor)
        arguments.alike(parts, output, "reduce_scatter")
        return self._reduce_scatter([(output, parts)], opts, nccl)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """As reduce_scatter, with the inputs in one tensor."""
        opts = options(ReduceScatterOptions, opts)
        nccl = ("_reduce_scatter_base", output, input, opts)
        return self._reduce_scatter([self._scattered(output, input)], opts, nccl)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # names of arguments

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several reduce_scatter_single as one call."""
        opts = options(ReduceScatterOptions, opts)
        arguments.same_lengths(outputs, inputs, "reduce_scatter_tensor_coalesced")
        arguments.one_type(outputs, "reduce_scatter_tensor_coalesced")
        nccl = ("reduce_scatter_tensor_coalesced", list(outputs), list(inputs), opts)
        return self._reduce_scatter([self._scattered(*pair) for pair in zip(outputs, inputs, strict=True)], opts, nccl)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _scattered(self, output: Tensor, whole: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        arguments.stacked(whole, output, self.core.size, "reduce_scatter_tensor", ("input", "output"))
        return output, whole.detach().reshape(self.core.size, output.numel()).unbind(0)

    def _reduce_scatter(self, calls: Sequence[tuple[Tensor, Sequence[Tensor]]], opts: Any, nccl: Nccl) -> Work:
        outputs = [output for output, _ in calls]
        reduction, factor = self._reduction(opts.reduceOp, outputs[0])
        wire = plain(
            Operation.REDUCE_SCATTER, reduction, code(outputs[0], "reduce_scatter"),
            sum(output.numel() for output in outputs), -1, len(calls) - 1,
        )  # fmt: skip
        return self._launch(
            opts, outputs, outputs[0], wire, nccl, self.collectives.reduce_scatter, calls, reduction, factor
        )

    def _reduction(self, op: Any, tensor: Tensor) -> tuple[Reduction, Any]:
        reduction, factor = reduction_of(op)
        if (tensor.dtype, reduction) not in self._checked:
            check(tensor.dtype, reduction)
            if tensor.dtype in CODES:
                self._checked.add((tensor.dtype, reduction))
        return reduction, factor
