"""The keyword arguments of DistributedDataParallel, checked and frozen at the door.

Names, order and defaults are torch 2.13's. What each means here is in the table at the end of this file's
only class; what has no meaning here is accepted, so that scripts run unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

FIRST_BUCKET_BYTES = 1 << 20
DEFAULT_BUCKET_MB = 25


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    device_ids, output_device    a single GPU for a module on that GPU; None for CPU and multi-device modules
    forward_sync_buffers         buffers are broadcast from rank 0 at each training forward (broadcast_buffers is
                                 its older name)
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
        warnings.warn(text, FutureWarning, stacklevel=4)
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    wanted = True if broadcast_buffers is None else broadcast_buffers
    return wanted, wanted


def check_devices(
    parameters: Sequence[nn.Parameter], device_ids: Sequence[Any] | None, output_device: Any
) -> tuple[tuple[Any, ...] | None, Any]:
    """Check device_ids against where the parameters are; the texts are torch's."""
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    types = {parameter.device.type for parameter in parameters}
    if len(types) != 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {types}."
        )
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
