"""Batch normalisation over the parts of a batch that the replicas of one DataParallel have.

It runs once for all replicas, in one of their threads, and is made of operations that autograd knows: the graphs
of the replicas are joined here, and a backward through them, of any order, needs no further meeting. The
parameters and running statistics are replica 0's, which are the module's own.

On one device it is torch's BatchNorm of the concatenated parts. Over several devices the parts stay where they
are; only sums over each channel travel, to the device of replica 0 and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from phalanx.errors import MisuseError


def normalize_parts(
    parts: Sequence[tuple[_BatchNorm, Tensor]], forward: Callable[[Tensor], Tensor], alone: bool = True
) -> list[Tensor]:
    """Return the normalised input of each replica; `parts` has each one's layer and input, in training.

    `forward` is that of replica 0's layer for a whole batch on one device; `alone` if no other rank takes part.
    """
    layer, inputs = parts[0][0], [input for _, input in parts]
    if len({input.device for input in inputs}) == 1:
        whole = forward(torch.cat(inputs))
        # Copies: replicas may change their outputs in place, and must not meet in the history of one base.
        return [part.clone() for part in whole.split([len(input) for input in inputs])]
    if not alone:
        raise MisuseError(
            f"a {type(layer).__name__} over the replicas of a DataParallel on several devices, and other ranks as well",
            "DistributedDataParallel with one rank for each device, without DataParallel",
        )
    return normalize_apart(layer, inputs)


def normalize_apart(layer: _BatchNorm, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Normalise inputs on different devices with the moments of all, and update running statistics."""
    wide = torch.promote_types(inputs[0].dtype, torch.float32)
    count = sum(input.numel() // input.size(1) for input in inputs)
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {inputs[0].size()}")
    home = inputs[0].device
    mean = _sum_over_all(inputs, lambda input: input.to(wide), home) / count
    deviations = [input.to(wide) - _along(input, mean) for input in inputs]
    variance = _sum_over_all(deviations, torch.square, home) / count
    if layer.track_running_stats and layer.running_mean is not None:
        _update_running_statistics(layer, mean.detach(), variance.detach() * (count / (count - 1)))
    scale = (variance + layer.eps).rsqrt()
    if layer.weight is not None:
        scale = scale * layer.weight
    outputs = []
    for input, deviation in zip(inputs, deviations, strict=True):
        output = deviation * _along(input, scale)
        outputs.append((output if layer.bias is None else output + _along(input, layer.bias)).to(input.dtype))
    return outputs


def _sum_over_all(tensors: Sequence[Tensor], function: Callable[[Tensor], Tensor], home: torch.device) -> Tensor:
    """Sum `function` of the tensors over all but the channels, on the device `home`."""
    sums = [function(tensor).sum([0, *range(2, tensor.dim())]).to(home) for tensor in tensors]
    return torch.stack(sums).sum(0)


def _along(input: Tensor, channels: Tensor) -> Tensor:
    """Return one number per channel, on the device of `input` and in a shape that broadcasts over it."""
    return channels.to(input.device).view(-1, *[1] * (input.dim() - 2))


@torch.no_grad()
def _update_running_statistics(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    running_mean, running_var, seen = layer.running_mean, layer.running_var, layer.num_batches_tracked
    if running_mean is None or running_var is None:
        return
    momentum = layer.momentum
    if seen is not None:
        seen.add_(1)
        momentum = 1.0 / float(seen) if momentum is None else momentum
    running_mean.lerp_(mean.to(running_mean.dtype), momentum or 0.0)
    running_var.lerp_(variance.to(running_var.dtype), momentum or 0.0)
