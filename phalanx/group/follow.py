"""Following: a rank that has nothing to contribute takes part in whatever the other ranks do.

The rank sends a FOLLOW ticket, learns from the others' tickets which call they are in, and makes the same
moves with a contribution that changes nothing: zeros for a sum, minus infinity for a maximum, zeros where
parts are gathered. Ranks in a call see the FOLLOW tickets and pass one more fence, so that there is time to
post. Collectives of Phalanx's own (gradients, buffers) are handed to those who registered for their tag.

While it waits for one group, a following rank also serves its other groups, in order of arrival.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from phalanx.errors import InternalError
from phalanx.group import dtypes, inline, ticket
from phalanx.group.group import Following, Group, Rest
from phalanx.group.slow import wait_longer
from phalanx.group.ticket import Operation, State, Ticket
from phalanx.transport.protocol import Transport
from phalanx.transport.reductions import Reduction

_TORCH_TYPES = {code: dtype for dtype, code in dtypes.CODES.items()}
_POLL_SECONDS = 0.02
_NO_DATA = {Operation.FOLLOW, Operation.BARRIER, Operation.EXCHANGE}


class Follower:
    """Follows the collectives of `core`, and of the other groups that share its links."""

    def __init__(self, core: Group) -> None:
        self.core = core

    def follow(self, make_ticket: Callable[[], Ticket]) -> list[Ticket]:
        """Take part in the next collective of `core`; return the tickets of all ranks.

        `make_ticket` is called when the ticket is sent. If every rank follows, nothing moves. Raises what
        a collective raises.
        """
        core = self.core
        with core.lock:
            wire = make_ticket().encode()
            core.begin_following(wire)
            if core.size == 1:
                return [ticket.decode(wire)]
            began, deadline = core.since, time.monotonic() + min(core.timeout, core.board.slow_after)
            while not core.has_arrived():
                self._serve_others()
                core.board.wait_for_news(core.links, _POLL_SECONDS, core)
                if time.monotonic() > deadline:
                    deadline = wait_longer(core, began)
            got = core.finish_following(wire)
            rest = None if core.throws_when_joined else self._take_part(core, got)
        if rest is not None:
            rest()
        return [ticket.decode(each) for each in got]

    def _serve_others(self) -> None:
        for other in list(self.core.board.groups):
            if other is not self.core and other.has_begun():
                with other.lock:
                    wire = Ticket(Operation.FOLLOW, state=State.JOINED).encode()
                    other.begin_following(wire)
                    rest = self._take_part(other, other.finish_following(wire))
                if rest is not None:
                    rest()

    def _take_part(self, core: Group, got: Sequence[bytes]) -> Rest:
        active = [wire for wire in got if not ticket.follows(wire)]
        if not active:
            return None
        call = ticket.decode(active[0])
        if call.operation in _NO_DATA or call.tag == inline.TAG:
            return None
        if call.operation is Operation.MONITORED_BARRIER:
            core.fence()
            return None
        handler = core.handlers.get((call.operation, call.tag))
        if handler is not None:
            return handler(list(got), Following(core))  # its first fence is that which gives time to post
        transport = core.transport
        if transport is None or call.dtype not in _TORCH_TYPES:
            raise InternalError(f"cannot follow {ticket.describe(active[0], dtypes.NAMES, {})}")
        _contribute_nothing(core, transport, call)
        return None


def _contribute_nothing(core: Group, transport: Transport, call: Ticket) -> None:
    dtype = _TORCH_TYPES[call.dtype]
    size = call.count * dtype.itemsize
    fence = Following(core)
    nothing = torch.zeros(call.count, dtype=dtype)
    unwanted: list[torch.Tensor | None] = [None] * core.size
    of_root = [nothing if place == call.root else None for place in range(core.size)]
    if call.operation in (Operation.ALL_REDUCE, Operation.REDUCE):
        reduction = Reduction(call.reduction)
        fill_neutral(nothing, reduction)
        transport.reduce(nothing, reduction, call.root, fence)
    elif call.operation is Operation.REDUCE_SCATTER:
        reduction = Reduction(call.reduction)
        fill_neutral(nothing, reduction)
        transport.reduce_scatter(nothing.clone(), [nothing] * core.size, reduction, fence)
    elif call.operation is Operation.ALL_GATHER:
        transport.share(nothing, [torch.empty_like(nothing) for _ in range(core.size)], size, fence)
    elif call.operation is Operation.GATHER:
        transport.route(of_root, unwanted, size, fence)
    elif call.operation is Operation.BROADCAST:
        transport.share(None, of_root, size, fence)
    elif call.operation is Operation.SCATTER:
        transport.route(unwanted, of_root, size, fence)  # taken and dropped: over a wire its sender waits for that
    else:
        raise InternalError(f"cannot follow {call.operation.name}")


def fill_neutral(tensor: torch.Tensor, reduction: Reduction) -> None:
    """Fill with the value that changes nothing in this reduction."""
    dtype = tensor.dtype
    if reduction is Reduction.PRODUCT:
        tensor.fill_(1)
    elif reduction is Reduction.BAND:
        tensor.fill_(True) if dtype is torch.bool else tensor.fill_(0).bitwise_not_()
    elif reduction in (Reduction.MIN, Reduction.MAX):
        low = reduction is Reduction.MAX
        if dtype is torch.bool:
            tensor.fill_(not low)
        elif dtype.is_floating_point:
            tensor.fill_(float("-inf") if low else float("inf"))
        else:
            limits = torch.iinfo(dtype)
            tensor.fill_(limits.min if low else limits.max)
    else:
        tensor.zero_()
