"""Where a reducer's gradients live: one store for each device and kind of memory, all with the same few methods."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from phalanx.group.arenas import make_arena
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.reduce.plan import Plan, Region
from phalanx.transport.backend import BackendGradients
from phalanx.transport.hosts import Hosts
from phalanx.transport.pieces import Cut
from phalanx.transport.protocol import Fence
from phalanx.transport.shared_gradients import SharedGradients

CUT = Cut()


class Gradients(Protocol):
    """The gradients of one device. `own[k]` is this rank's flat memory for the k-th dtype."""

    own: list[torch.Tensor]

    def reduce(
        self,
        spans: Sequence[tuple[int, int, int]],
        scales: Sequence[float],
        fence: Fence,
        takes: bool = True,
    ) -> None:
        """Replace `spans` (k, start, stop) by the scaled sum over ranks, here only if `takes`."""

    def renew(self) -> None:
        """Make `own` anew. What was there is gone from here."""


class Form(NamedTuple):
    """What a gradient looks like. Parameters may change theirs; places keep the one they were made with."""

    shape: torch.Size
    strides: tuple[int, ...]


class Memory:
    """All regions of a plan. Making one is a collective: every rank of the group, with the same plan."""

    def __init__(self, group: PhalanxProcessGroup, plan: Plan) -> None:
        self.own: list[torch.Tensor] = [torch.empty(0)] * len(plan.regions)
        self.at_home: list[torch.Tensor] = []
        self._stores: list[tuple[Gradients, dict[int, int]]] = []
        self._mapped: dict[int, tuple[mmap.mmap, int]] = {}
        self.shared: SharedGradients | None = None
        self.staged: dict[int, int] = {}  # regions whose contributions are posted, and their numbers in `shared`
        makers = [_maker(group, region) for region in plan.regions]
        for kind in dict.fromkeys(makers):
            numbers = [number for number, maker in enumerate(makers) if maker == kind]
            layout = [(getattr(torch, plan.regions[n].dtype), plan.regions[n].count) for n in numbers]
            store = _make_store(group, *kind, layout)
            places = {number: place for place, number in enumerate(numbers)}
            self._stores.append((store, places))
            if isinstance(store, SharedGradients):
                self.shared, self.staged = store, places
        self._take_in()

    def _take_in(self) -> None:
        for store, places in self._stores:
            for number, place in places.items():
                self.own[number] = store.own[place]
                if isinstance(store, SharedGradients):
                    self._mapped[number] = (store.memory, store.offsets[place])
        self.at_home = [flat for number, flat in enumerate(self.own) if number not in self.staged]

    def renew(self, staged: bool) -> None:
        """Leave the memory of all staged regions, or of all others, to whoever keeps some of it, and make new one."""
        for store, _ in self._stores:
            if (store is self.shared) == staged:
                store.renew()
        self._take_in()

    def must_part(self, by_policy: bool) -> bool:
        """Whether this rank's results must go to memory of its own from now on; its tickets say so."""
        if self.shared is None:
            return False
        self.shared.apart |= by_policy
        return self.shared.must_part()

    def share(self, by_all: bool, parted: bool = False) -> None:
        """See SharedGradients.share."""
        if self.shared is not None:
            self.shared.share(by_all, parted)

    def view(self, region: int, start: int, form: Form) -> torch.Tensor:
        """A gradient of this form at element `start` of `region`.

        In mapped memory it gets a storage of its own: a view of the whole would drag the whole
        along when it is pickled or deep-copied. It is no view for autograd, which refuses to detach_() those.
        """
        count = form.shape.numel()
        mapped = self._mapped.get(region)
        if mapped is None:
            flat = self.own[region][start : start + count]
        else:
            memory, offset = mapped
            dtype = self.own[region].dtype
            flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset + start * dtype.itemsize)
        return shaped(flat, form)

    def reduce(
        self,
        spans: Sequence[tuple[int, int, int]],
        scales: Sequence[float],
        fence: Fence,
        takes: bool = True,
    ) -> None:
        """See Gradients.reduce; `spans` name the plan's regions."""
        if len(self._stores) == 1:
            self._stores[0][0].reduce(spans, scales, fence, takes)
            return
        for store, places in self._stores:
            mine = [(places[region], start, stop) for region, start, stop in spans if region in places]
            store.reduce(mine, scales, fence, takes)


def _maker(group: PhalanxProcessGroup, region: Region) -> tuple[type[Gradients], str]:
    """The kind of memory for a region, and its device."""
    if torch.device(region.device).type != "cpu" or not (group.core.size == 1 or group.shares_memory):
        return BackendGradients, region.device
    return SharedGradients, region.device


def _make_store(
    group: PhalanxProcessGroup, kind: type[Gradients], device: str, layout: Sequence[tuple[torch.dtype, int]]
) -> Gradients:
    core = group.core
    if kind is BackendGradients:
        return BackendGradients(group, layout, torch.device(device))
    if core.size == 1:
        return SharedGradients(0, 1, None, layout, CUT)
    between = group.transport.between if isinstance(group.transport, Hosts) else None
    most = core.size if between is None else max(map(len, between.hosts))
    arena = make_arena(core, SharedGradients.bytes_needed(most, layout, CUT))
    return SharedGradients(core.here.index(core.rank), len(core.here), arena, layout, CUT, between)


def shaped(flat: torch.Tensor, form: Form) -> torch.Tensor:
    """Memory as a gradient of this form. No view for autograd."""
    return flat.new_empty(0).set_(flat.untyped_storage(), flat.storage_offset(), form.shape, form.strides)


def form_of(parameter: torch.Tensor) -> Form:
    """The form of a parameter's gradient, which fills its memory."""
    return Form(parameter.shape, _dense_strides(parameter))


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of `tensor` if it fills its memory without gaps or overlaps, else contiguous ones."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
