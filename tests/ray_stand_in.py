"""Stands for `ray` where it is not installed: as much of Ray Train as the template in docs/templates calls.

What Ray does on each of its workers happens here on each rank: it makes the process group, calls the function that
trains, and keeps what that reports.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class TorchConfig:
    """How the process group is made."""

    backend: str


@dataclass(frozen=True)
class ScalingConfig:
    """How many workers, and what each needs."""

    num_workers: int
    resources_per_worker: dict[str, float]


@dataclass(frozen=True)
class FailureConfig:
    """How often a run that has failed is begun again."""

    max_failures: int


@dataclass(frozen=True)
class RunConfig:
    """What the run is called, and what becomes of failures."""

    name: str
    failure_config: FailureConfig


@dataclass
class Result:
    """What a run has reported last."""

    metrics: dict[str, Any]


class TorchTrainer:
    """Calls the function that trains; the workers are the ranks that there are."""

    def __init__(
        self,
        train_loop_per_worker: Callable[[dict[str, Any]], None],
        *,
        train_loop_config: dict[str, Any],
        torch_config: TorchConfig,
        scaling_config: ScalingConfig,
        run_config: RunConfig,
    ) -> None:
        self._train, self._config, self._backend = train_loop_per_worker, train_loop_config, torch_config.backend

    def fit(self) -> Result:
        """Train, and return what was reported last."""
        dist.init_process_group(self._backend, init_method="env://")
        self._train(self._config)
        return Result(_reported[-1])


_reported: list[dict[str, Any]] = []


@contextmanager
def installed() -> Any:
    """Have `import ray` find this."""
    ray, train, of_torch = ModuleType("ray"), ModuleType("ray.train"), ModuleType("ray.train.torch")
    ray.train, train.torch = train, of_torch
    vars(train).update(
        FailureConfig=FailureConfig, RunConfig=RunConfig, ScalingConfig=ScalingConfig, report=_reported.append
    )
    vars(of_torch).update(TorchConfig=TorchConfig, TorchTrainer=TorchTrainer)
    modules = {module.__name__: module for module in (ray, train, of_torch)}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
