"""Broadcasting a module's tensors from one rank: parameters and buffers at wrapping, buffers at each step.

Tensors are sent packed, in one collective for each device and 64 MB. If the root turns out to
follow (it has run out of data, or skips this step), the lowest rank that does not sends in its place: that
is read from the tickets, so the usual case costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_

import torch

from phalanx.group import follow, ticket
from phalanx.group.dtypes import CODES
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.group.ticket import Operation
from phalanx.reduce.posting import copy_all
from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import Reduction

_CHUNK_BYTES = 64 << 20
_MAX_PACKS = 64
_KEPT_BYTES = 1 << 20
_ALIGN = 16
_form = attrgetter("shape", "dtype", "device")


class Broadcaster:
    """Broadcasts the tensors that `tensors()` lists, and follows when the other ranks do.

    `tag` tells its collectives from those of other wrapped models; it must be equal on all ranks.
    """

    def __init__(self, group: PhalanxProcessGroup, tag: int, tensors: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._group, self._tag, self._tensors = group, tag, tensors
        self._packs: list[Pack] = []
        self._packed: list[torch.Tensor] = []
        self._forms: list[tuple[torch.Size, torch.dtype, torch.device]] = []
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
        for pack in _received(self._group, self._packs_now(), root, self._tag):
            pack.put_unseen()

    def fetch(self, root: int) -> list[Pack]:
        """As `broadcast`, but leave the tensors alone; `put` writes what has come, until the next broadcast."""
        return [pack.kept() for pack in _received(self._group, self._packs_now(), root, self._tag)]

    def _follow(self, number: int, got: list[bytes], fence: Fence) -> None:
        core = self._group.core
        active = next(place for place, wire in enumerate(got) if not ticket.follows(wire))
        root = ticket.decode(got[active]).root
        pack = self._packs_now()[number]
        if root == core.rank:
            pack.fill()
        _share(self._group, pack.flat, root, fence)
        if root in core.followers:
            _share(self._group, pack.flat, active, fence)
        pack.put_unseen()

    def _packs_now(self) -> list[Pack]:
        """The tensors packed; small packs are made once, for as long as the tensors and their forms are the same."""
        tensors = self._tensors()
        if len(tensors) == len(self._packed) and all(map(is_, tensors, self._packed)):
            if list(map(_form, tensors)) == self._forms:
                return self._packs
        packs = _packs(tensors)
        if sum(pack.flat.numel() for pack in packs) <= _KEPT_BYTES:
            self._packs, self._packed, self._forms = packs, list(tensors), list(map(_form, tensors))
        return packs


class Pack:
    """Tensors of one device, and `flat`, bytes with room for the values of all of them.

    Values of one dtype follow one another without gaps.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        sizes = {dtype: sum(t.numel() for t in kind) * dtype.itemsize for dtype, kind in by_dtype.items()}
        self.flat = torch.empty(sum(map(_aligned, sizes.values())), dtype=torch.uint8, device=tensors[0].device)
        self._kinds: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        start = 0
        for dtype, kind in by_dtype.items():
            pieces = self.flat[start : start + sizes[dtype]].view(dtype).split([t.numel() for t in kind])
            self._kinds.append((kind, [piece.view(t.shape) for piece, t in zip(pieces, kind, strict=True)]))
            start += _aligned(sizes[dtype])
        self._tensors = tuple(tensors)
        self._versions: list[int] | None = None

    def fill(self) -> None:
        """Take the values of the tensors."""
        for tensors, values in self._kinds:
            _copy_all(tensors, values)

    def _write(self) -> None:
        for tensors, values in self._kinds:
            _copy_all(values, tensors)

    def put_unseen(self) -> None:
        """Write the values into the tensors, unseen by autograd."""
        with torch.autograd._unsafe_preserve_version_counter(self._tensors):
            self._write()

    def kept(self) -> Pack:
        """For a `put` that comes later: it does nothing if somebody has written to the tensors meanwhile."""
        self._versions = [tensor._version for tensor in self._tensors]
        return self

    def put(self) -> None:
        """Write the values into the tensors."""
        if self._versions is None or [tensor._version for tensor in self._tensors] == self._versions:
            self._write()


@torch.no_grad()
def _copy_all(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    if not copy_all(targets, sources):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


def broadcast(group: PhalanxProcessGroup, tensors: Sequence[torch.Tensor], root: int, tag: int = 1) -> None:
    """Give every rank the values of rank `root`. A collective: every rank, with tensors of equal sizes."""
    for pack in _received(group, _packs(tensors), root, tag):
        pack.put()


def _received(group: PhalanxProcessGroup, packs: Sequence[Pack], root: int, tag: int) -> Iterator[Pack]:
    core = group.core
    if core.size == 1:
        return
    for number, pack in enumerate(packs):
        if core.rank == root:
            pack.fill()
        wire = ticket.plain(Operation.BROADCAST, 0, CODES[torch.uint8], pack.flat.numel(), root, tag + number)
        with core.collective(wire) as fence:
            _share(group, pack.flat, root, fence)
            sender = root
            if root in core.followers:
                sender = next(place for place in range(core.size) if place not in core.followers)
                if core.rank == sender:
                    pack.fill()
                _share(group, pack.flat, sender, fence)
        if core.rank != sender:
            yield pack


def average(group: PhalanxProcessGroup, tensors: Sequence[torch.Tensor], contributes: bool) -> None:
    """Replace floating-point and complex tensors by their mean, others by their maximum, over the contributing ranks.

    A collective: every rank of the group, with tensors of equal sizes.
    """
    core = group.core
    if core.size == 1:
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        for pack in _packs([tensor for tensor in tensors if tensor.dtype is dtype]):
            pack.fill()
            flat = values = pack.flat.view(dtype)
            mean = dtype.is_floating_point or dtype.is_complex
            reduction = Reduction.SUM if mean else Reduction.MAX
            if mean:
                flat = torch.cat([flat, flat.new_ones(1)])
            if not contributes:
                follow.fill_neutral(flat, reduction)
            wire = ticket.plain(Operation.ALL_REDUCE, reduction, CODES[dtype], flat.numel(), -1)
            with core.collective(wire) as fence:
                group.transport_for(flat.device).reduce(flat, reduction, -1, fence)
            if mean:
                values.copy_(flat[:-1].div_(flat[-1]))
            pack.put()


def _share(group: PhalanxProcessGroup, flat: torch.Tensor, root: int, fence: Fence) -> None:
    core = group.core
    outputs = [flat if place == root and place != core.rank else None for place in range(core.size)]
    mine = flat if core.rank == root else None
    group.transport_for(flat.device).share(mine, outputs, flat.numel() * flat.element_size(), fence)


def _packs(tensors: Sequence[torch.Tensor]) -> list[Pack]:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_device.setdefault(tensor.device, []).append(tensor)
    packs: list[list[torch.Tensor]] = []
    for kind in by_device.values():
        room = 0
        for tensor in kind:
            size = tensor.numel() * tensor.element_size()
            if size > room:
                packs.append([])
                room = _CHUNK_BYTES
            packs[-1].append(tensor)
            room -= size
    return [Pack(pack) for pack in packs]


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
