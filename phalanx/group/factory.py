"""Make a group's transport, and the rendezvous that is behind a new world."""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from phalanx.errors import MisuseError, RankMismatchError
from phalanx.group.accelerator import inner_group
from phalanx.group.arenas import make_arena
from phalanx.group.group import Group
from phalanx.group.links import Switchboard
from phalanx.group.messages import RING_CHANNEL, Messages
from phalanx.group.rendezvous import meet
from phalanx.transport import shm
from phalanx.transport.alone import Alone
from phalanx.transport.backend import Backend
from phalanx.transport.between import hosts_of, lanes_of
from phalanx.transport.hosts import Hosts, arena_bytes
from phalanx.transport.protocol import Transport
from phalanx.transport.ring import Ring
from phalanx.transport.shm import SharedMemory

AUTO, SHARED_MEMORY, GLOO, RING = "auto", "shared memory", "gloo", "ring"
KINDS = (AUTO, SHARED_MEMORY, GLOO, RING)

_log = logging.getLogger("phalanx")
_process = uuid.uuid4().hex


def connect(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Switchboard:
    """Meet the other ranks of a new world over `store`, which may have served earlier worlds.

    Collective. A launcher's store outlives the groups made from it, with the records of the last
    meeting in it; so every world that a process makes over one store gets a prefix of its own.
    """
    if size == 1:
        return meet(store, rank, size, timeout)
    attempt = store.add(f"attempt/{rank}", 1)
    if attempt == 1:
        store.set(f"process/{rank}", _process)
    elif store.get(f"process/{rank}").decode() != _process:
        raise MisuseError(
            f"two processes claim rank {rank} of {size}",
            "give every process its own RANK; one job needs its own MASTER_PORT or store path", rank,
        )  # fmt: skip
    return meet(dist.PrefixStore(f"world-{attempt}", store), rank, size, timeout)


def transport_for(core: Group, store: dist.Store, kind: str = AUTO) -> Transport:
    """Make the transport for CPU tensors of `core`: the one asked for, or the best that all ranks have.

    Collective. `store` is used only where the data does not go through shared memory.
    """
    if kind not in KINDS:
        raise MisuseError(f"transport={kind!r}", f"one of {', '.join(map(repr, KINDS))}", core.rank)
    if core.size == 1:
        return Alone()
    neighbours = core.here if hasattr(os, "memfd_create") else [core.rank]
    mine = json.dumps([kind, neighbours, uuid.uuid4().hex]).encode()
    said = [json.loads(answer) for answer in core.exchange(mine, "making a group")]
    if any(other != kind for other, _, _ in said):
        raise RankMismatchError(
            {rank: f"making a group with transport={other!r}" for rank, (other, _, _) in enumerate(said)},
            core.rank,
            "Every rank must ask for the same transport.",
        )
    hosts = hosts_of([near for _, near, _ in said])
    everywhere = len(hosts) == 1
    if kind == SHARED_MEMORY and not everywhere:
        raise MisuseError("transport='shared memory' for ranks on several hosts", "transport='auto'", core.rank)
    if kind in (AUTO, SHARED_MEMORY) and everywhere:
        return SharedMemory(core.rank, core.size, make_arena(core, shm.arena_bytes(core.size)).memory)
    if kind == RING:
        return Ring(core.rank, core.size, Messages(core, RING_CHANNEL))
    several = kind == AUTO and 1 < len(hosts) < core.size
    if kind == AUTO and core.rank == 0:
        way = "shared memory, and over gloo between hosts" if several else "gloo"
        _say_once(f"CPU tensors travel over {way}: not all ranks of %s are on one host and share memory", core.name)
    return _hosts(core, store, said[0][2], hosts) if several else _gloo(core, store, said[0][2])


def gloo_beside(core: Group, store: dist.Store) -> Backend:
    """Make one more transport over gloo, for a sequence of collectives of its own. Collective."""
    return _gloo(core, store, core.exchange(uuid.uuid4().hex.encode(), "DistributedDataParallel(...)")[0].decode())


def _gloo(core: Group, store: dist.Store, name: str) -> Backend:
    return Backend(_inner_gloo(core, store, name, range(core.size)), "gloo")


def _hosts(core: Group, store: dist.Store, name: str, hosts: Sequence[Sequence[int]]) -> Hosts:
    arena = make_arena(core, arena_bytes(hosts)).memory
    lane = next((lane for lane in lanes_of(hosts) if core.rank in lane), None)
    between = None if lane is None else _inner_gloo(core, store, f"{name} lane {lane[0]}", lane)
    return Hosts(_inner_gloo(core, store, name, range(core.size)), hosts, core.rank, arena, between)


def _inner_gloo(core: Group, store: dist.Store, name: str, places: Sequence[int]) -> dist.ProcessGroup:
    # A group that comes again under its name finds the addresses of the last in its store.
    store, timeout = dist.PrefixStore(f"gloo {name}", store), timedelta(seconds=core.timeout)
    members = [core.members[place] for place in places]
    return inner_group("gloo", store, places.index(core.rank), len(places), timeout, members, core.address)


_said: set[str] = set()


def _say_once(text: str, name: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.info(text, f"group {name}")
