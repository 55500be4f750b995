"""The keyword arguments of DistributedDataParallel, checked and frozen at the door.

Names, order and defaults are torch 2.13's. What each means here is in the table at the end of this file's
only class; what has no meaning here is accepted, so that scripts run unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.errors import MisuseError

FIRST_BUCKET_BYTES = 1 << 20
DEFAULT_BUCKET_MB = 25


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    device_ids, output_device    a single GPU for a module on that GPU; None for CPU and multi-device modules
    forward_sync_buffers         buffers are broadcast from rank 0 at each training forward, and for evaluation
                                 after each step (broadcast_buffers is its older name)
    init_sync                    parameters and buffers of rank 0 are copied to all ranks when wrapping
    bucket_cap_mb(_list)         bucket sizes that communication hooks see
    find_unused_parameters, static_graph, skip_all_reduce_unused_params
                                 not needed here: every graph is handled in one way, and what no rank used is
                                 not exchanged
    gradient_as_bucket_view, batched_grad_copy
                                 not needed here: gradients always live in their bucket
    """

    device_ids: tuple[Any, ...] | None
    output_device: Any
    forward_sync_buffers: bool
    init_sync: bool
    init_sync_buffers: bool
    bucket_cap_mb: float
    bucket_bytes_cap_list: tuple[int, ...]
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    batched_grad_copy: bool
    mixed_precision: Any

    @property
    def caps(self) -> tuple[int, ...]:
        """Bucket sizes in bytes: of the first, the second, ...; the last repeats."""
        if self.bucket_bytes_cap_list:
            return self.bucket_bytes_cap_list
        cap = int(self.bucket_cap_mb * (1 << 20))
        return (min(FIRST_BUCKET_BYTES, cap), cap)


def of_torch(state: Mapping[str, Any]) -> Options:
    """The options in the state that torch's own DistributedDataParallel pickles."""
    return Options(
        None if state["device_ids"] is None else tuple(state["device_ids"]), state["output_device"],
        state["forward_sync_buffers"], init_sync=True, init_sync_buffers=True,
        bucket_cap_mb=state["bucket_bytes_cap"] / (1 << 20), bucket_bytes_cap_list=(),
        mixed_precision=None, **{name: state[name] for name in _AS_IN_TORCH},
    )  # fmt: skip


_AS_IN_TORCH = (
    "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params",
    "batched_grad_copy",
)  # fmt: skip


def buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Settle the two names of one option; return (sync at forward, sync when wrapping)."""
    if broadcast_buffers is not None:
        if forward_sync_buffers is not None:
            text = "both broadcast_buffers and forward_sync_buffers are given: broadcast_buffers is ignored"
        else:
            text = (
                "broadcast_buffers is deprecated in torch 2.13: use forward_sync_buffers. "
                "broadcast_buffers=False also leaves buffers alone when wrapping, forward_sync_buffers=False does not"
            )
        warnings.warn(text, FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    wanted = True if broadcast_buffers is None else broadcast_buffers
    return wanted, wanted


def _refuse_other_dtypes(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in named:
        wanted = parameter.grad_dtype
        if wanted is not None and wanted != parameter.dtype and parameter.requires_grad:
            raise MisuseError(
                f"the gradients of {name} are to be {wanted}, of a parameter that is {parameter.dtype}: they are "
                "exchanged in the dtype of the parameter",
                f"{name} in {wanted} and torch.autocast, or leave its grad_dtype alone",
            )


def check_devices(
    named: Sequence[tuple[str, nn.Parameter]], device_ids: Sequence[Any] | None, output_device: Any
) -> tuple[tuple[Any, ...] | None, Any]:
    """Check device_ids against where the parameters are; the beginnings of the texts are torch's."""
    parameters = [parameter for _, parameter in named]
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    types = {parameter.device.type for parameter in parameters}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {types}.\n{_where(named)}\nInstead: move the module to one device before wrapping "
            "it, module.to(device); several devices of one type are fine."
        )
    if types == {"meta"}:
        raise MisuseError(
            "DistributedDataParallel of a module without data: its parameters are on the meta device",
            "module.to_empty(device=...) and initialise or load it, before wrapping it",
        )
    _refuse_other_dtypes(named)
    devices = {parameter.device for parameter in parameters}
    if not device_ids or types == {"cpu"} or len(devices) > 1:
        if device_ids or output_device is not None:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with "
                "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                f"{device_ids}, output_device {output_device}, and module parameters {devices}. "
                "Instead: leave both out, and move the module to its device before wrapping it."
            )
        return None, None
    chosen = tuple(torch.device("cuda", i) if isinstance(i, int) else torch.device(i) for i in device_ids)
    indices = tuple(device.index for device in chosen)
    return indices, indices[0] if output_device is None else output_device


def _where(named: Sequence[tuple[str, nn.Parameter]]) -> str:
    """Say which parameters are where, a few of each."""
    places: dict[str, list[str]] = {}
    for name, parameter in named:
        places.setdefault(str(parameter.device), []).append(name)
    return "\n".join(
        f"  on {device}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for device, names in sorted(places.items())
    )
