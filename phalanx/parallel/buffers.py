"""Broadcasting a module's tensors from one rank: parameters and buffers at wrapping, buffers at each step.

Tensors are sent packed, in one collective for each dtype and device and 64 MB. If the root turns out to
follow (it has run out of data, or skips this step), the lowest rank that does not sends in its place: that
is read from the tickets, so the usual case costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from phalanx.group import follow, ticket
from phalanx.group.dtypes import CODES
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.group.ticket import Operation
from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import Reduction

_CHUNK_BYTES = 64 << 20
_MAX_PACKS = 64


class Broadcaster:
    """Broadcasts the tensors that `tensors()` lists, and follows when the other ranks do.

    `tag` tells its collectives from those of other wrapped models; it must be equal on all ranks.
    """

    def __init__(self, group: PhalanxProcessGroup, tag: int, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._group, self._tag, self._tensors = group, tag, tensors
        me = weakref.ref(self)

        def handler(number: int) -> Callable[[list[bytes], Fence], None]:
            def handle(got: list[bytes], fence: Fence) -> None:
                broadcaster = me()
                if broadcaster is not None:
                    broadcaster._follow(number, got, fence)

            return handle

        for number in range(_MAX_PACKS):
            key = (int(Operation.BROADCAST), tag + number)
            group.core.handlers[key] = handler(number)
            weakref.finalize(self, group.core.handlers.pop, key, None)

    def broadcast(self, root: int) -> None:
        """Give every rank the values of rank `root`. A collective: every rank of the group.

        As in torch, a graph that has saved the buffers stays valid: two forwards may come before a backward.
        """
        for received in _received(self._group, self._tensors(), root, self._tag):
            received.put_unseen()

    def fetch(self, root: int) -> list[Received]:
        """As `broadcast`, but leave the tensors alone; `put` writes what has come into them."""
        return [received.kept() for received in _received(self._group, self._tensors(), root, self._tag)]

    def _follow(self, number: int, got: list[bytes], fence: Fence) -> None:
        core = self._group.core
        active = next(place for place, wire in enumerate(got) if not ticket.follows(wire))
        root = ticket.decode(got[active]).root
        pack = list(_packs(self._tensors()))[number]
        flat = _flat(pack, root == core.rank)
        _share(self._group, flat, root, fence)
        if root in core.followers:
            _share(self._group, flat, active, fence)
        Received(flat, pack).put_unseen()


class Received:
    """Values for some tensors, which hold others until `put`."""

    def __init__(self, flat: torch.Tensor, pack: list[torch.Tensor]) -> None:
        self._flat, self._pack = flat, pack
        self._versions: list[int] | None = None

    def kept(self) -> Received:
        """For a `put` that comes later: it does nothing if somebody has written to the tensors meanwhile."""
        self._versions = [tensor._version for tensor in self._pack]
        return self

    def put_unseen(self) -> None:
        """Write the values, unseen by autograd."""
        with torch.autograd._unsafe_preserve_version_counter(tuple(self._pack)):
            _unpack(self._flat, self._pack)

    def put(self) -> None:
        """Write the values."""
        if self._versions is None or [tensor._version for tensor in self._pack] == self._versions:
            _unpack(self._flat, self._pack)


def broadcast(group: PhalanxProcessGroup, tensors: Sequence[torch.Tensor], root: int, tag: int = 1) -> None:
    """Give every rank the values of rank `root`. A collective: every rank, with tensors of equal sizes."""
    for received in _received(group, tensors, root, tag):
        received.put()


def _received(group: PhalanxProcessGroup, tensors: Sequence[torch.Tensor], root: int, tag: int) -> Iterator[Received]:
    core = group.core
    if core.size == 1:
        return
    for number, pack in enumerate(_packs(tensors)):
        flat = _flat(pack, core.rank == root)
        wire = ticket.plain(Operation.BROADCAST, 0, CODES[flat.dtype], flat.numel(), root, tag + number)
        with core.collective(wire) as fence:
            _share(group, flat, root, fence)
            sender = root
            if root in core.followers:
                sender = next(place for place in range(core.size) if place not in core.followers)
                if core.rank == sender:
                    flat = _flat(pack, True)
                _share(group, flat, sender, fence)
        if core.rank != sender:
            yield Received(flat, pack)


def average(group: PhalanxProcessGroup, tensors: Sequence[torch.Tensor], contributes: bool) -> None:
    """Replace floating-point tensors by their mean, others by their maximum, over the contributing ranks.

    A collective: every rank of the group, with tensors of equal sizes.
    """
    core = group.core
    if core.size == 1:
        return
    for pack in _packs(tensors):
        flat = _flat(pack, True)
        mean = flat.is_floating_point()
        reduction = Reduction.SUM if mean else Reduction.MAX
        if mean:
            flat = torch.cat([flat, flat.new_ones(1)])
        if not contributes:
            follow.fill_neutral(flat, reduction)
        wire = ticket.plain(Operation.ALL_REDUCE, reduction, CODES[flat.dtype], flat.numel(), -1)
        with core.collective(wire) as fence:
            group.transport_for(flat.device).reduce(flat, reduction, -1, fence)
        if mean:
            flat = flat[:-1].div_(flat[-1])
        _unpack(flat, pack)


def _share(group: PhalanxProcessGroup, flat: torch.Tensor, root: int, fence: Fence) -> None:
    core = group.core
    outputs = [flat if place == root and place != core.rank else None for place in range(core.size)]
    mine = flat if core.rank == root else None
    group.transport_for(flat.device).share(mine, outputs, flat.numel() * flat.element_size(), fence)


def _packs(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    packs: list[list[torch.Tensor]] = []
    for kind in by_kind.values():
        room = 0
        for tensor in kind:
            size = tensor.numel() * tensor.element_size()
            if size > room:
                packs.append([])
                room = _CHUNK_BYTES
            packs[-1].append(tensor)
            room -= size
    return packs


def _flat(pack: Sequence[torch.Tensor], filled: bool) -> torch.Tensor:
    if not filled:
        return torch.empty(sum(t.numel() for t in pack), dtype=pack[0].dtype, device=pack[0].device)
    flat = pack[0].reshape(-1) if len(pack) == 1 else torch.cat([tensor.reshape(-1) for tensor in pack])
    return flat.contiguous()


def _unpack(flat: torch.Tensor, pack: list[torch.Tensor]) -> None:
    pieces = flat.split([tensor.numel() for tensor in pack])
    with torch.no_grad():
        torch._foreach_copy_(pack, [piece.view(t.shape) for piece, t in zip(pieces, pack, strict=True)])
