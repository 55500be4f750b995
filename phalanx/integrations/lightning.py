"""Lightning's Trainer and Fabric on Phalanx: `Trainer(strategy=PhalanxStrategy())`, or `strategy="phalanx"`.

The strategies are Lightning's own DDP strategies with another process group, wrapper and SyncBatchNorm; all
their arguments, and those of DistributedDataParallel, are accepted. Importing this registers the name.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch import nn

from phalanx.nn.sync_batchnorm import SyncBatchNorm
from phalanx.parallel.ddp import DistributedDataParallel

NAME = "phalanx"


class PhalanxStrategy(DDPStrategy):
    """Train with `lightning.pytorch.Trainer` on Phalanx; the arguments are those of Lightning's DDPStrategy."""

    strategy_name = NAME

    def __init__(self, *args: Any, process_group_backend: str | None = NAME, **kwargs: Any) -> None:
        super().__init__(*args, process_group_backend=process_group_backend, **kwargs)  # type: ignore[misc]  # by name in both

    def setup(self, trainer: Trainer) -> None:
        """Prepare the model for `trainer`. Collective: every rank."""
        if isinstance(self._layer_sync, TorchSyncBatchNorm):
            self._layer_sync = _LayerSync()
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return _wrapped(model, self.determine_ddp_device_ids(), self._ddp_kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register under the name `phalanx`."""
        _register(cls, strategy_registry)


class PhalanxFabricStrategy(FabricDDPStrategy):
    """Train with `lightning.fabric.Fabric` on Phalanx; the arguments are those of Lightning's DDPStrategy."""

    strategy_name = NAME

    def __init__(self, *args: Any, process_group_backend: str | None = NAME, **kwargs: Any) -> None:
        super().__init__(*args, process_group_backend=process_group_backend, **kwargs)  # type: ignore[misc]  # by name in both

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Wrap `module`. Collective: every rank."""
        return _wrapped(module, self._determine_ddp_device_ids(), self._ddp_kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register under the name `phalanx`."""
        _register(cls, strategy_registry)


class _LayerSync(TorchSyncBatchNorm):
    """What `Trainer(sync_batchnorm=True)` makes of BatchNorm."""

    def apply(self, model: nn.Module) -> nn.Module:
        return SyncBatchNorm.convert_sync_batchnorm(model)


def _wrapped(module: nn.Module, device_ids: list[int] | None, kwargs: dict[str, Any]) -> DistributedDataParallel:
    # On a stream of its own, as Lightning does, so that steps can be captured later.
    with nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream()):
        return DistributedDataParallel(module, device_ids=device_ids, **kwargs)


def _register(cls: type, registry: _StrategyRegistry) -> None:
    if NAME not in registry:
        registry.register(NAME, cls, description="data-parallel training with Phalanx", start_method="popen")


PhalanxStrategy.register_strategies(StrategyRegistry)
PhalanxFabricStrategy.register_strategies(STRATEGY_REGISTRY)
