"""What the parts of DistributedDataParallel know of each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.parallel.logging_data import LoggingData
from phalanx.parallel.options import Options
from phalanx.reduce.reducer import Reducer
from phalanx.reduce.watch import Local


class Wrapped(nn.Module):
    """A module that is trained on several ranks."""

    module: nn.Module
    options: Options
    forward_sync_buffers: bool
    no_sync: Callable[..., AbstractContextManager[None]]
    _group: PhalanxProcessGroup
    _reducer: Reducer
    _logging: LoggingData
    _local_now: Callable[[], Local]
    _join_config: Any
    _authoritative_rank: int
    _sync_final_model: Callable[[int], None]
