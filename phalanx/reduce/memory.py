"""Where a reducer's gradients live: one store for each device, all with the same few methods."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import torch

from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.reduce.plan import Plan
from phalanx.transport.backend import BackendGradients
from phalanx.transport.protocol import Fence
from phalanx.transport.shm import SharedGradients


class Gradients(Protocol):
    """The gradients of one device. `own[k]` is this rank's flat memory for the k-th dtype."""

    own: list[torch.Tensor]

    def reduce(
        self, spans: Sequence[tuple[int, int, int]], scales: Sequence[float], fence: Fence, takes: bool
    ) -> None:
        """Replace `spans` (k, start, stop) by the scaled sum over ranks, here only if `takes`."""


class Memory:
    """All regions of a plan. Making one is a collective: every rank of the group, with the same plan."""

    def __init__(self, group: PhalanxProcessGroup, plan: Plan) -> None:
        self.own: list[torch.Tensor] = [torch.empty(0)] * len(plan.regions)
        self._stores: list[tuple[Gradients, dict[int, int]]] = []
        self._shared: dict[int, tuple[SharedGradients, int]] = {}
        for device in dict.fromkeys(region.device for region in plan.regions):
            numbers = [number for number, region in enumerate(plan.regions) if region.device == device]
            layout = [(getattr(torch, plan.regions[n].dtype), plan.regions[n].count) for n in numbers]
            store = _make_store(group, torch.device(device), layout)
            self._stores.append((store, {number: place for place, number in enumerate(numbers)}))
            for place, number in enumerate(numbers):
                self.own[number] = store.own[place]
                if isinstance(store, SharedGradients):
                    self._shared[number] = (store, store.offsets[place])

    def view(self, region: int, start: int, like: torch.Tensor) -> torch.Tensor:
        """A gradient for parameter `like` at element `start` of `region`, with its shape and strides.

        In shared memory it gets a storage of its own: a view of the whole arena would drag the arena
        along when it is pickled or deep-copied. It is no view for autograd, which refuses to detach_() those.
        """
        count = like.numel()
        shared = self._shared.get(region)
        if shared is None:
            flat = self.own[region][start : start + count]
        else:
            store, offset = shared
            at = offset + start * like.element_size()
            flat = torch.frombuffer(store.arena, dtype=like.dtype, count=count, offset=at)
        storage, at = flat.untyped_storage(), flat.storage_offset()
        return flat.new_empty(0).set_(storage, at, like.shape, dense_strides(like))

    def has_own_storage(self, region: int) -> bool:
        """Whether each gradient of the region has a storage of its own, so that its users can be counted."""
        return region in self._shared

    def reduce(
        self, spans: Sequence[tuple[int, int, int]], scales: Sequence[float], fence: Fence, takes: bool = True
    ) -> None:
        """See Gradients.reduce; `spans` name the plan's regions."""
        for store, places in self._stores:
            mine = [(places[region], start, stop) for region, start, stop in spans if region in places]
            store.reduce(mine, scales, fence, takes)


def _make_store(
    group: PhalanxProcessGroup, device: torch.device, layout: Sequence[tuple[torch.dtype, int]]
) -> Gradients:
    core = group.core
    if device.type != "cpu" or not (core.size == 1 or group.shares_memory):
        return BackendGradients(group, layout, device)
    needed = SharedGradients.bytes_needed(core.size, layout)
    arena = mmap.mmap(-1, needed) if core.size == 1 else core.arena(needed)
    return SharedGradients(core.rank, core.size, arena, layout)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of `tensor` if it fills its memory without gaps or overlaps, else contiguous ones."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
