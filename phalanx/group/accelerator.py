"""CUDA tensors of a group: NCCL, behind the group's tickets.

The tickets are exchanged in the calling thread, because NCCL takes the caller's current stream and a rank
that disagrees must be found before its kernel is queued: a kernel that waits for a peer in another call
blocks its stream for good. The device is never synchronised here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName

from phalanx.group.group import Group
from phalanx.launch.environment import LOOPBACK, variable
from phalanx.transport.backend import Backend


def inner_group(
    kind: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    members: Sequence[int],
    address: str = LOOPBACK,
) -> ProcessGroup:
    """Make a plain group of torch.distributed over `store` that torch does not know of: "gloo" or "nccl".

    Gloo listens on `address`, at which the others reach this rank; by itself it takes what the hostname
    resolves to, which on many hosts is the loopback. GLOO_SOCKET_IFNAME comes first, as in torch.
    """
    group = ProcessGroup(store, rank, size)
    backend: Any
    if kind == "nccl":
        chosen, device = ProcessGroup.BackendType.NCCL, torch.device("cuda")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(members)
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        chosen, device = ProcessGroup.BackendType.GLOO, torch.device("cpu")
        gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
        gloo._timeout = timeout
        named = variable("GLOO_SOCKET_IFNAME", "")
        make = dist.ProcessGroupGloo.create_device
        gloo._devices = [make(interface=name) for name in named.split(",") if name] or [make(hostname=address)]
        backend = dist.ProcessGroupGloo(store, rank, size, gloo)
    group._set_default_backend(chosen)
    backend._set_sequence_number_for_group()
    group._register_backend(device, chosen, backend)
    group._set_group_name(GroupName(f"phalanx {kind}"))
    group._set_group_desc("inside a Phalanx group")
    return group


class Accelerator:
    """The CUDA side of one group; NCCL is made when the first CUDA tensor comes."""

    def __init__(self, core: Group, store: dist.Store) -> None:
        self._core, self._store = core, store
        self._inner: ProcessGroup | None = None

    def call(self, method: str, wire: bytes | None, arguments: Sequence[Any]) -> Any:
        """Exchange tickets (None: a message, which has none), then make the call; returns NCCL's work."""
        with self._core.lock:
            if wire is not None:
                self._core.tickets(wire)
            return getattr(self.group(), method)(*arguments)

    def transport(self) -> Backend:
        """The transport for CUDA tensors."""
        return Backend(self.group(), "nccl")

    def group(self) -> ProcessGroup:
        """The NCCL group, made now if need be."""
        if self._inner is None:
            core = self._core
            self._inner = inner_group(
                "nccl", dist.PrefixStore("nccl", self._store), core.rank, core.size,
                timedelta(seconds=core.timeout), core.members,
            )  # fmt: skip
        return self._inner

    def close(self) -> None:
        """Shut NCCL down, if it was ever used."""
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.shutdown()
