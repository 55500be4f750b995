"""Make the groups of a script that asks torch.distributed for gloo groups of Phalanx.

They go on answering to the name that was asked for: scripts and libraries compare dist.get_backend() with
"gloo", and a sub-group inherits the name and is then replaced as well.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from phalanx.group.adapter import Adapter
from phalanx.group.autoload import NAME

_build = c10d._new_process_group_helper
_register = c10d._register_pg_in_world
_set_timeout = c10d._set_pg_timeout


class _Asked(threading.local):
    """The backend that this thread's script has asked for, while its group is being made."""

    backend: str | None = None


_asked = _Asked()


def install() -> None:
    """Replace what torch.distributed makes and registers groups with; harmless when repeated."""
    c10d._new_process_group_helper = _new_group  # type: ignore[assignment]  # takes the same arguments
    c10d._register_pg_in_world = _register_as_asked  # type: ignore[assignment]
    c10d._set_pg_timeout = _set_timeout_of


def is_replaced(backend: str) -> bool:
    """Whether a group of this backend becomes one of Phalanx: gloo on the CPU, and gloo or NCCL besides.

    No backend at all, "undefined" to torch, is gloo where there is no accelerator.
    """
    name = str(backend).lower()
    if "gloo" not in name and name != c10d.Backend.UNDEFINED:
        return False
    devices = c10d.BackendConfig(c10d.Backend(name)).get_device_backend_map()
    return devices.get("cpu") == c10d.Backend.GLOO and set(devices.values()) <= {c10d.Backend.GLOO, c10d.Backend.NCCL}


def _new_group(size: int, rank: int, ranks: list[int], backend: str, *args: Any, **kwargs: Any) -> Any:
    if not is_replaced(backend):
        return _build(size, rank, ranks, backend, *args, **kwargs)
    if not isinstance(kwargs.get("backend_options"), str):  # ours is the name of a transport
        kwargs["backend_options"] = None
    before, _asked.backend = _asked.backend, str(backend)
    try:
        return _build(size, rank, ranks, c10d.Backend(NAME), *args, **kwargs)
    finally:
        _asked.backend = before


def _register_as_asked(group: dist.ProcessGroup, **kwargs: Any) -> Any:
    if _asked.backend is not None and isinstance(group, Adapter):
        name = c10d.Backend(_asked.backend)
        kwargs |= {"backend_name": name, "backend_config": str(c10d.BackendConfig(name))}
    return _register(group, **kwargs)


def _set_timeout_of(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    chosen = c10d._get_default_group() if group is None else group
    if isinstance(chosen, Adapter):
        chosen.set_timeout(timeout)
    else:
        _set_timeout(timeout, group)
