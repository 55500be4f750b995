"""Which process group a model is wrapped on."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist

from phalanx.errors import MisuseError
from phalanx.group import world


def choose_group(process_group: dist.ProcessGroup | None, device_mesh: Any) -> dist.ProcessGroup:
    """Return the group that the arguments of DistributedDataParallel mean; join the world if need be."""
    if device_mesh is not None:
        if process_group is not None:
            raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
        return group
    if process_group is not None:
        outside: object = dist.GroupMember.NON_GROUP_MEMBER
        if process_group is outside:
            raise MisuseError(
                "DistributedDataParallel(process_group=...) with a group that this rank is not a member of",
                "wrap the model only on the ranks of the group",
            )
        return process_group
    if not dist.is_initialized():
        world.init()
    return cast(dist.ProcessGroup, dist.group.WORLD)


def find_group(ranks: list[int]) -> dist.ProcessGroup:
    """The group of this process with these ranks, for an unpickled wrapper; else a world of one."""
    if not dist.is_initialized():
        world.init()
    default = cast(dist.ProcessGroup, dist.group.WORLD)
    if ranks == list(range(dist.get_world_size())) or dist.get_world_size() == 1:
        return default
    for group, members in dist.distributed_c10d._world.pg_group_ranks.items():
        if sorted(members) == sorted(ranks):
            return group
    raise MisuseError(
        f"unpickling a DistributedDataParallel of ranks {ranks}, but this process has no group of these ranks",
        f"create it first on every rank with torch.distributed.new_group({ranks})", dist.get_rank(),
    )  # fmt: skip
