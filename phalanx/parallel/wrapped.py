"""What the parts of DistributedDataParallel know of each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.parallel.buffers import Broadcaster
from phalanx.parallel.logging_data import LoggingData
from phalanx.parallel.mixed_precision import LowPrecision
from phalanx.parallel.options import Options
from phalanx.parallel.structure import Structure
from phalanx.reduce.reducer import Reducer
from phalanx.reduce.watch import Local


class Wrapped(nn.Module):
    """A module that is trained on several ranks."""

    module: nn.Module
    _modules: dict[str, Any]  # its "module" is never None
    options: Options
    forward_sync_buffers: bool
    no_sync: Callable[..., AbstractContextManager[None]]
    register_comm_hook: Callable[[object, Callable[[Any, Any], Any]], None]
    process_group: dist.ProcessGroup
    modules_buffers: list[torch.Tensor]
    require_forward_param_sync: bool
    _broadcaster: Broadcaster
    _group: PhalanxProcessGroup
    _reducer: Reducer
    _logging: LoggingData
    _local_now: Callable[[], Local]
    _attach: Callable[[PhalanxProcessGroup], None]
    _remember_structure: Callable[[], None]
    _follow_model: Callable[[], None]
    _structure: Structure
    _trainable: Callable[[], list[tuple[str, nn.Parameter]]]
    _low: LowPrecision | None
    require_backward_grad_sync: bool
    drift_check: bool
    parameters_to_ignore: set[str]
    named_module_buffers: dict[str, torch.Tensor]
    _everything: list[nn.Parameter]
    _buffers_with: Callable[[str], list[torch.Tensor]]
    _join_config: Any
    _authoritative_rank: int
    _sync_final_model: Callable[[int], None]


def attribute_of_module(wrapper: nn.Module, module: nn.Module, name: str) -> Any:
    """Return an attribute of the wrapped module that its wrapper lacks; if the module lacks it too, say so of both."""
    try:
        return getattr(module, name)
    except AttributeError as error:
        if error.name != name or error.obj is not module:
            raise  # it has the attribute, which lacks another
    text = f"{type(wrapper).__name__!r} object has no attribute {name!r}, nor has the {type(module).__name__} in it"
    raise AttributeError(text, name=name, obj=wrapper) from None
