"""The c10d adapter: `torch.distributed.init_process_group("phalanx")` and every collective through it.

Each method checks its arguments, writes the ticket of the call and hands both to the collectives of the
group: at once in the calling thread, or for an asynchronous call to the group's worker. A collective that
is called while asynchronous ones are pending waits for them, so that ranks agree about the order. CUDA
tensors go through NCCL after the exchange of tickets.

Methods have the names that torch.distributed calls, the older ones included; the overloads that take single
tensors and an op are understood too. The collectives that combine are in reducing.py, what is no collective
in adapter.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.distributed import BarrierOptions, BroadcastOptions, GatherOptions, ScatterOptions, Work

from phalanx.errors import CollectiveTimeoutError
from phalanx.group import arguments, autoload
from phalanx.group.adapter import Nccl, beside, made_by
from phalanx.group.arguments import ArgumentError, code
from phalanx.group.collectives import Copies
from phalanx.group.overloads import options
from phalanx.group.reducing import Reducing
from phalanx.group.ticket import Operation, plain
from phalanx.group.works import Gathered


class PhalanxProcessGroup(Reducing):
    """A process group of torch.distributed whose collectives are agreed on before data moves."""

    # -- copies --------------------------------------------------------------------------------------

    def broadcast(  # type: ignore[override]  # takes both overloads of the stubs
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: Any = None
    ) -> Work:
        """Copy a tensor of the root to all ranks."""
        opts = options(BroadcastOptions, opts, timeout, rootRank=root)
        tensor = arguments.dense(arguments.single(tensors, "broadcast"), "broadcast")
        root = arguments.root_rank(opts.rootRank, self.core.size, "broadcast")
        wire = plain(Operation.BROADCAST, 0, code(tensor, "broadcast"), tensor.numel(), root)
        nccl = ("broadcast", [tensor], opts)
        return self._launch(opts, [tensor], tensor, wire, nccl, self.collectives.broadcast, tensor, root)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Copy every rank's tensor into a list of tensors on all ranks. Sizes may differ by rank."""
        opts = options(AllgatherOptions, opts)
        tensor = arguments.dense(arguments.single(inputs, "all_gather"), "all_gather")
        wanted = arguments.per_rank(outputs, self.core.size, "all_gather", "output")
        nccl = ("allgather", [list(wanted)], [tensor], opts)
        tag = arguments.uneven(wanted, tensor, self.core.rank, "all_gather")
        if tag:
            longest = max(each.numel() for each in wanted)
            wire = plain(Operation.ALL_GATHER, 0, code(tensor, "all_gather"), longest, -1, tag)
            body = self.collectives.all_gather_uneven
            return self._launch(opts, Gathered(wanted), tensor, wire, nccl, body, wanted, tensor)
        arguments.alike(wanted, tensor, "all_gather")
        return self._all_gather([(wanted, tensor)], Gathered(wanted), opts, nccl)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """As allgather, with the outputs in one tensor."""
        opts = options(AllgatherOptions, opts)
        nccl = ("_allgather_base", output, input, opts)
        return self._stacked([(output, input)], opts, nccl)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several all_gather_single as one call."""
        opts = options(AllgatherOptions, opts)
        arguments.same_lengths(outputs, inputs, "allgather_into_tensor_coalesced")
        nccl = ("allgather_into_tensor_coalesced", list(outputs), list(inputs), opts)
        return self._stacked(list(zip(outputs, inputs, strict=True)), opts, nccl)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]  # names of arguments

    def _stacked(self, pairs: Sequence[tuple[Tensor, Tensor]], opts: Any, nccl: Nccl) -> Work:
        calls, copies = [], []
        for whole, part in pairs:
            arguments.stacked(whole, part, self.core.size, "all_gather_into_tensor", ("output", "input"))
            plain_whole = whole.detach()
            if not plain_whole.is_contiguous():
                plain_whole = torch.empty(whole.shape, dtype=whole.dtype, device=whole.device)
                copies.append((plain_whole, whole.detach()))
            calls.append((plain_whole.view(self.core.size, part.numel()).unbind(0), part))
        return self._all_gather(calls, [whole for whole, _ in pairs], opts, nccl, copies)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Copy several tensors of every rank; `outputs` has a list of them for each rank."""
        opts = options(AllgatherOptions, opts)
        arguments.non_empty(inputs, "allgather_coalesced")
        if len(outputs) != self.core.size:
            raise ArgumentError("allgather_coalesced: output lists should be equal to world size")
        calls = []
        for place, tensor in enumerate(inputs):
            if any(len(row) != len(inputs) for row in outputs):
                raise ArgumentError("allgather_coalesced: invalid output size: one tensor for each input tensor")
            arguments.alike([row[place] for row in outputs], tensor, "allgather_coalesced")
            calls.append(([row[place] for row in outputs], tensor))
        nccl = ("allgather_coalesced", outputs, inputs, opts)
        return self._all_gather(calls, [tensor for row in outputs for tensor in row], opts, nccl)

    def _all_gather(
        self,
        calls: Sequence[tuple[Sequence[Tensor], Tensor]],
        result: Sequence[Tensor],
        opts: Any,
        nccl: Nccl,
        copies: Copies | None = None,
    ) -> Work:
        first = calls[0][1]
        count = sum(tensor.numel() for _, tensor in calls)
        wire = plain(Operation.ALL_GATHER, 0, code(first, "all_gather"), count, -1, len(calls) - 1)
        return self._launch(opts, result, first, wire, nccl, self.collectives.all_gather, calls, copies)

    def gather(  # type: ignore[override]
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        """Copy every rank's tensor into a list of tensors on the root."""
        opts = options(GatherOptions, opts, timeout, rootRank=root)
        tensor = arguments.dense(arguments.single(inputs, "gather"), "gather")
        root = arguments.root_rank(opts.rootRank, self.core.size, "gather")
        wanted: Sequence[Tensor] = []
        if root == self.core.rank:
            wanted = arguments.per_rank(outputs, self.core.size, "gather", "output")
            arguments.alike(wanted, tensor, "gather")
        else:
            arguments.none_here(outputs, "gather", "output")
        wire = plain(Operation.GATHER, 0, code(tensor, "gather"), tensor.numel(), root)
        nccl = ("gather", [list(wanted)] if wanted else [], [tensor], opts)
        return self._launch(opts, wanted, tensor, wire, nccl, self.collectives.gather, wanted, tensor, root)

    def scatter(  # type: ignore[override]
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: Any = None,
    ) -> Work:
        """Copy the r-th tensor of a list on the root into the tensor of rank r."""
        opts = options(ScatterOptions, opts, timeout, rootRank=root)
        tensor = arguments.dense(arguments.single(outputs, "scatter"), "scatter")
        root = arguments.root_rank(opts.rootRank, self.core.size, "scatter")
        parts: Sequence[Tensor] = []
        if root == self.core.rank:
            parts = arguments.per_rank(inputs, self.core.size, "scatter", "input")
            arguments.alike(parts, tensor, "scatter")
        else:
            arguments.none_here(inputs, "scatter", "input")
        wire = plain(Operation.SCATTER, 0, code(tensor, "scatter"), tensor.numel(), root)
        nccl = ("scatter", [tensor], [list(parts)] if parts else [], opts)
        return self._launch(opts, [tensor], tensor, wire, nccl, self.collectives.scatter, tensor, parts, root)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Work:
        """Copy the j-th input of rank i into the i-th output of rank j."""
        opts = options(AllToAllOptions, opts)
        for tensors, which in ((inputs, "input"), (outputs, "output")):
            if len(tensors) != self.core.size:
                raise ArgumentError(
                    f"all_to_all: {which} tensor list size should be {self.core.size}, got {len(tensors)}"
                )
        arguments.one_type([*inputs, *outputs], "all_to_all")
        nccl = ("alltoall", list(outputs), list(inputs), opts)
        return self._all_to_all(inputs, outputs, outputs, opts, nccl)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """As alltoall, with inputs and outputs in one tensor each."""
        opts = options(AllToAllOptions, opts)
        arguments.one_type([output, input], "all_to_all_single")
        size, call = self.core.size, "all_to_all_single"
        given = arguments.splits(input_split_sizes, input, size, call)
        wanted = arguments.splits(output_split_sizes, output, size, call)
        plain_output, copies = output.detach(), []
        if not plain_output.is_contiguous():
            plain_output = torch.empty(output.shape, dtype=output.dtype, device=output.device)
            copies.append((plain_output, output.detach()))
        inputs = input.detach().reshape(-1).split(given)
        outputs = plain_output.view(-1).split(wanted)
        nccl = ("alltoall_base", output, input, output_split_sizes, input_split_sizes, opts)
        return self._all_to_all(inputs, outputs, [output], opts, nccl, copies)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _all_to_all(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        result: Sequence[Tensor],
        opts: Any,
        nccl: Nccl,
        copies: Copies | None = None,
    ) -> Work:
        head = plain(Operation.ALL_TO_ALL, 0, code(inputs[0], "all_to_all"), 0, -1)
        return self._launch(opts, result, inputs[0], head, nccl, self.collectives.all_to_all, inputs, outputs, copies)

    # -- barriers -----------------------------------------------------------------------

    def barrier(self, opts: Any = None, *, timeout: timedelta | None = None) -> Work:  # type: ignore[override]
        """Return when every rank has come."""
        opts = options(BarrierOptions, opts, timeout)
        wire = plain(Operation.BARRIER, 0, 0, 0, -1)
        device = opts.device
        if device is not None and device.type == "cuda":
            return self._accelerated([], wire, ("barrier", opts))
        return self._launch(opts, [], None, wire, (), self.collectives.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As barrier; after `timeout` names the first rank that has not come, all with `wait_all_ranks`."""
        if timeout == timedelta(0):
            missing = [rank for rank in range(self.core.size) if rank != self.core.rank]
            text = f"Rank {self.core.rank} timed out in monitoredBarrier after 0 ms"
            raise CollectiveTimeoutError("monitored_barrier", missing, self.core.rank, 0.0, text)
        opts = options(BarrierOptions, timeout)
        opts.asyncOp = False
        wire = plain(Operation.MONITORED_BARRIER, 0, 0, 0, -1)
        try:
            self._launch(opts, [], None, wire, (), self.collectives.monitored_barrier)
        except CollectiveTimeoutError as late:
            missing = late.missing if wait_all_ranks else late.missing[:1]
            names = f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            text = f"{names} failed to pass monitoredBarrier in {round(late.seconds * 1000)} ms"
            if self.core.rank:  # As torch has it there: code matches on that.
                text = (
                    f"Rank {self.core.rank} successfully reached monitoredBarrier, but received errors while waiting "
                    f"for send/recv from rank 0: {text}"
                )
            raise CollectiveTimeoutError(late.call, missing, late.rank, late.seconds, text, late.report) from None


def create(backend_options: Any, group_options: Any = None) -> PhalanxProcessGroup:
    """Make the process group of one rank; torch.distributed calls it when a group is made. Collective.

    `group_options` is the `pg_options` of init_process_group or new_group: the name of a transport, or None
    for the transport of the world, or the best there is.
    """
    return made_by(PhalanxProcessGroup, backend_options, group_options)


def for_process_group(group: dist.ProcessGroup, purpose: str) -> PhalanxProcessGroup:
    """Return `group` if it is of Phalanx, else one of the same ranks beside it, made once. Collective.

    `purpose` is who asks, for the texts of errors.
    """
    return group if isinstance(group, PhalanxProcessGroup) else beside(PhalanxProcessGroup, group, purpose)


autoload.register()
