"""SyncBatchNorm: batch normalisation over the batches of all ranks, as if one process had the whole batch.

The module keeps torch's attributes, buffers and rules; the arithmetic, and what the ranks tell one another,
is in batch_norm_function.py. On one rank, without torch.distributed and in eval mode it is torch's own
BatchNorm.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from phalanx.errors import MisuseError
from phalanx.nn.batch_norm_function import Moments, moments_of_all_ranks, normalize
from phalanx.nn.batch_norm_replicas import normalize_parts
from phalanx.parallel.crew import AcrossReplicas, Seat

_TorchSyncBatchNorm = nn.SyncBatchNorm  # whatever takes its place there later


class SyncBatchNorm(AcrossReplicas, _TorchSyncBatchNorm):
    """Normalise each channel of a (batch, channels, ...) input over the batches of all ranks, on any device.

    In training the output, the running statistics and the gradients are those of one BatchNorm over the
    concatenated batches, which may differ in size and may be empty. The gradients of weight and bias are each
    rank's part; DistributedDataParallel averages them. Statistics are at least in float32.

    Collective in training: every rank of `process_group` (the default group, if None), once in forward and,
    where the input requires a gradient, once in backward, with the same number of channels. No communication
    in eval mode, in a group of one rank, or without torch.distributed. In the replicas of a `DataParallel`, the
    batch of a rank is that of all its replicas.

    Raises torch's ValueError on every rank if all ranks together have one value per channel. Constructor and
    attributes are those of `torch.nn.SyncBatchNorm`.
    """

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        group = self._group_to_ask()
        seat = self._seat
        if seat is not None and self.training:
            self._check_before_asking(input)
            if torch.compiler.is_compiling():
                return _uncompiled(self._forward_in_replica, input, seat)
            return self._forward_in_replica(input, seat)
        if group is None:
            # One rank is torch's plain BatchNorm; that of the parent class accepts no CPU tensor.
            return super(_TorchSyncBatchNorm, self).forward(input)
        self._check_before_asking(input)
        if torch.compiler.is_compiling():
            return _uncompiled(self._forward_on_all_ranks, input, group)
        return self._forward_on_all_ranks(input, group)

    def _group_to_ask(self) -> dist.ProcessGroup | None:
        """The group whose ranks share their statistics now; None if this rank needs nobody."""
        if not (self.training and dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD if self.process_group is None else self.process_group
        return group if dist.get_world_size(group) > 1 else None

    def _check_before_asking(self, input: Tensor) -> None:
        """Raise what BatchNorm raises for such an input, while no other rank depends on this one yet."""
        rank = dist.get_rank() if dist.is_initialized() else None
        channels, own = input.size(1), self.num_features
        if channels != own and (self.weight is not None or self.running_mean is not None):
            raise MisuseError(
                f"SyncBatchNorm({own}) got an input of size {tuple(input.size())}: "
                f"running_mean should contain {channels} elements not {own}",
                f"SyncBatchNorm({channels}), or an input whose dimension 1 is {own}",
                rank,
            )
        if not input.is_floating_point():
            what = f"SyncBatchNorm got an input of {input.dtype}"
            raise MisuseError(what, "an input of a floating-point type", rank)

    def _forward_in_replica(self, input: Tensor, seat: Seat) -> Tensor:
        """Meet the other replicas of a DataParallel, then the other ranks, if there are any, with all their parts."""
        output: Tensor = seat.crew.meet(seat.index, seat.place, (self, input), _forward_of_replicas)
        return output

    def _forward_on_all_ranks(self, input: Tensor, group: dist.ProcessGroup) -> Tensor:
        tracked = self.track_running_stats and self.running_mean is not None
        if tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        moments = moments_of_all_ranks(input, group)
        # Whoever has two values knows that there are two, and need not wait for the device to hear the sum.
        local = input.numel() // input.size(1)
        count = local if local > 1 else int(moments.count)
        if count == 1:
            whole = torch.Size([1, input.size(1), *[1] * (input.dim() - 2)])
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {whole}")
        if count == 0:  # On every rank, so that none waits for another in backward either.
            return F.batch_norm(input, None, None, self.weight, self.bias, training=True)
        if tracked:
            self._update_running_statistics(moments)
        return normalize(input, self.weight, self.bias, moments, self.eps, group)

    @torch.no_grad()
    def _update_running_statistics(self, moments: Moments) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked or 1)
        unbiased = moments.variance * (moments.count / (moments.count - 1))
        self.running_mean.lerp_(moments.mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Put this class in the place of every BatchNorm (and torch's SyncBatchNorm) in `module`.

        Returns `module`, or the new layer if `module` is itself a BatchNorm. A new layer shares parameters,
        buffers, training flag and qconfig with the one that it replaces; a layer used in several places is
        still one layer. Without a `process_group`, one that is synchronised already keeps its group.
        """
        return _convert(cls, module, process_group, {})

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["process_group"] = _Ranks.of(self.process_group)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if isinstance(self.process_group, _Ranks):
            self.process_group = self.process_group.group()

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self.process_group)] = self.process_group  # A copy is in the same group.
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def _forward_of_replicas(parts: list[tuple[SyncBatchNorm, Tensor]]) -> list[Tensor]:
    layer = parts[0][0]
    group = layer._group_to_ask()
    if group is None:
        return normalize_parts(parts, partial(_BatchNorm.forward, layer))
    return normalize_parts(parts, partial(layer._forward_on_all_ranks, group=group), alone=False)


@_disable_dynamo
def _uncompiled(forward: Any, input: Tensor, others: dist.ProcessGroup | Seat) -> Tensor:
    """Call `forward` outside of the graph that torch.compile is making."""
    output: Tensor = forward(input, others)
    return output


def _convert(
    cls: type[SyncBatchNorm],
    module: nn.Module,
    group: dist.ProcessGroup | None,
    done: dict[nn.Module, nn.Module],
) -> nn.Module:
    if module in done:
        return done[module]
    new = _layer_for(cls, module, group) if isinstance(module, _BatchNorm) else module
    done[module] = done[new] = new
    for name, child in list(module._modules.items()):
        if child is not None:
            new.add_module(name, _convert(cls, child, group, done))
    return new


def _layer_for(cls: type[SyncBatchNorm], old: _BatchNorm, group: dist.ProcessGroup | None) -> SyncBatchNorm:
    if group is None and isinstance(old, _TorchSyncBatchNorm):
        group = old.process_group
    if isinstance(old, cls) and old.process_group is group:
        return old
    if isinstance(old, LazyModuleMixin) and old.has_uninitialized_params():
        raise MisuseError(
            f"convert_sync_batchnorm of {type(old).__name__}, whose number of channels is not known yet",
            "call the model once on a batch, then convert it",
        )
    options = old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats
    new = cls(*options, group, bias=old.bias is not None)
    if old.affine:
        new.weight, new.bias = old.weight, old.bias
    new.running_mean, new.running_var = old.running_mean, old.running_var
    new.num_batches_tracked = old.num_batches_tracked
    new.training = old.training
    if hasattr(old, "qconfig"):
        new.qconfig = old.qconfig
    return new


@dataclass(frozen=True)
class _Ranks:
    """What is pickled of a process group: its ranks."""

    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: Any) -> Any:
        """Return the ranks of a group, None for one that is closed, and anything else as it is."""
        if not isinstance(group, dist.ProcessGroup):
            return group
        ranks = c10d._world.pg_group_ranks.get(group)
        return None if ranks is None else cls(tuple(sorted(ranks)))

    def group(self) -> dist.ProcessGroup | None:
        """Return this process's group of these ranks; None, the default, in a process that is in no group."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        for group, ranks in c10d._world.pg_group_ranks.items():
            if tuple(sorted(ranks)) == self.ranks:
                return group
        raise MisuseError(
            f"unpickling a SyncBatchNorm of the ranks {list(self.ranks)}, but this process has no such group",
            f"torch.distributed.new_group({list(self.ranks)}) on every rank first",
            dist.get_rank(),
        )
