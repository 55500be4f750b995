"""The ring: every rank talks to its two neighbours only, over any send and recv.

All-reduce runs in two rounds of N-1 steps. In the first, each part of the data travels once round the ring
and is added up on its way, so that rank r ends with the finished part r; in the second the finished parts
travel round. Every rank sends 2N-2 messages of 1/N of the data, whatever N is: no transport moves fewer bytes
(P. Patarasuk and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009).

Part r is added up in the order r+1, r+2, ..., r: not the order of ranks, but fixed, and all ranks get the
same bits. Half precision travels as float32 in the first round and is rounded once. Messages are tagged
with the number of the fence they follow, so that one left from a call that raised is never taken for another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from phalanx.transport.backend import giver
from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import Reduction, combine, is_narrow

_TAGS = 1 << 31


class Endpoint(Protocol):
    """Where a ring sends and receives."""

    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> Any:
        """Begin to send; the answer's wait() returns when the tensor may be changed."""

    def recv(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        """Wait for a message from `peer` and write it into `tensor`."""

    def close(self) -> None:
        """Give back what the endpoint holds."""


class GroupEndpoint:
    """Send and recv of a c10d process group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def send(self, peer: int, tensor: torch.Tensor, tag: int) -> Any:
        """See Endpoint.send."""
        return self._group.send([tensor], peer, tag)

    def recv(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
        """See Endpoint.recv."""
        self._group.recv([tensor], peer, tag).wait()

    def close(self) -> None:
        """See Endpoint.close. The group is its owner's."""


class Ring:
    """The transport over an endpoint of `rank` in `size` ranks."""

    name = "ring"

    def __init__(self, rank: int, size: int, endpoint: Endpoint) -> None:
        self._rank, self._size, self._endpoint = rank, size, endpoint
        self._left, self._right = (rank - 1) % size, (rank + 1) % size

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int, fence: Fence) -> None:
        """See Transport.reduce."""
        flat = tensor.view(-1)
        bounds = [flat.numel() * place // self._size for place in range(self._size + 1)]
        parts = [flat[low:high] for low, high in zip(bounds, bounds[1:], strict=False)]
        if root not in (-1, self._rank):
            parts = [part.clone() for part in parts]  # only the root's own tensor may change
        with _begun(fence) as tag:
            parts[self._rank].copy_(self._added_up(parts, reduction, tag))
            self._spread(parts, tag)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction, fence: Fence
    ) -> None:
        """See Transport.reduce_scatter."""
        with _begun(fence) as tag:
            output.view(-1).copy_(self._added_up([part.view(-1) for part in inputs], reduction, tag))

    def share(self, mine: torch.Tensor | None, outputs: Sequence[torch.Tensor | None], size: int, fence: Fence) -> None:
        """See Transport.share: all ranks give to all, or one gives and the others hand on."""
        root = giver(mine, outputs, self._rank)
        with _begun(fence) as tag:
            if root < 0:
                blocks = [_bytes(out) for out in outputs]  # type: ignore[arg-type]
                blocks[self._rank].copy_(_bytes(mine))  # type: ignore[arg-type]
                self._spread(blocks, tag)
                return
            block = _bytes(mine if root == self._rank else outputs[root])  # type: ignore[arg-type]
            if root != self._rank:
                self._endpoint.recv(self._left, block, tag)
            if self._right != root:
                self._endpoint.send(self._right, block, tag).wait()

    def route(
        self,
        parts: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None],
        largest: int,
        fence: Fence,
    ) -> None:
        """See Transport.route: straight from rank to rank, first the next, then the one after, and so on."""
        mine, own = parts[self._rank], outputs[self._rank]
        if mine is not None and own is not None:
            _bytes(own).copy_(_bytes(mine))
        with _begun(fence) as tag:
            for distance in range(1, self._size):
                to, source = (self._rank + distance) % self._size, (self._rank - distance) % self._size
                part, out = parts[to], outputs[source]
                sent = None if part is None else self._endpoint.send(to, _bytes(part), tag)
                if out is not None:
                    self._endpoint.recv(source, _bytes(out), tag)
                if sent is not None:
                    sent.wait()

    def close(self) -> None:
        """See Transport.close."""
        self._endpoint.close()

    def _added_up(self, parts: Sequence[torch.Tensor], reduction: Reduction, tag: int) -> torch.Tensor:
        """First round: send on what has been added up so far; end with this rank's part, of all ranks."""
        dtype = parts[0].dtype
        wide = torch.float32 if is_narrow(dtype) else dtype
        step = Reduction.SUM if reduction is Reduction.AVG else reduction
        total = parts[(self._rank - 1) % self._size].to(wide)
        for distance in range(2, self._size + 1):
            part = parts[(self._rank - distance) % self._size].to(wide)
            received = torch.empty_like(part)
            sent = self._endpoint.send(self._right, total, tag)
            self._endpoint.recv(self._left, received, tag)
            sent.wait()
            combine([received, part], received, step)
            total = received
        if reduction is Reduction.AVG:
            total = total / self._size if wide.is_floating_point or wide.is_complex else _quotient(total, self._size)
        return total

    def _spread(self, blocks: Sequence[torch.Tensor], tag: int) -> None:
        """Second round: block r, which rank r has, travels round the ring."""
        for distance in range(self._size - 1):
            sent = self._endpoint.send(self._right, blocks[(self._rank - distance) % self._size], tag)
            self._endpoint.recv(self._left, blocks[(self._rank - distance - 1) % self._size], tag)
            sent.wait()


def _quotient(total: torch.Tensor, divisor: int) -> torch.Tensor:
    return torch.div(total.to(torch.int64), divisor, rounding_mode="trunc").to(total.dtype)


@contextlib.contextmanager
def _begun(fence: Fence) -> Iterator[int]:
    """Pass the fence; gives the tag of the messages that follow it."""
    tag = fence.step % _TAGS
    fence()
    try:
        yield tag
    except RuntimeError:
        fence()  # whatever the endpoint says, the links know which rank is gone
        raise


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
