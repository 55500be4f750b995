"""Splitting a batch over replicas, and putting their outputs together again.

All of it is plain differentiable operations (narrow, to, cat), so that it runs on any mixture of devices and
gradients of any order go through it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from phalanx.errors import MisuseError
from phalanx.parallel.containers import children, leaves, like, map_tensors

Part = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one replica."""


def scatter(
    arguments: tuple[Any, ...], keywords: dict[str, Any], devices: Sequence[torch.device], dim: int
) -> list[Part]:
    """Split every tensor in the arguments along `dim` into at most one part for each device.

    A batch that does not divide gives smaller parts at the end; one that is smaller than the number of
    devices gives fewer parts. Tensors of no dimension are copied to each device; containers are rebuilt;
    anything else is shared. Without any argument there is one part.

    Raises MisuseError if tensors would give different numbers of parts, or cannot be split.
    """
    if not arguments and not keywords:
        return [((), {})]
    tensors = {id(leaf): (where, leaf) for where, leaf in _written(arguments, keywords) if isinstance(leaf, Tensor)}
    sizes = {key: _sizes(where, tensor, len(devices), dim) for key, (where, tensor) in tensors.items()}
    count = _common_count({tensors[key]: list(split) for key, split in sizes.items() if split}, len(devices), dim)
    used = devices[:count]
    parts = {key: _parts(tensor, sizes[key], used, dim) for key, (_, tensor) in tensors.items()}
    whole = arguments, keywords
    return [map_tensors(whole, lambda tensor: parts[id(tensor)][index]) for index in range(count)]  # noqa: B023


def _written(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [pair for i, value in enumerate(arguments) for pair in leaves(value, f"argument {i}")]
    found += [pair for name, value in keywords.items() for pair in leaves(value, f"argument {name!r}")]
    for where, leaf in found:
        if isinstance(leaf, PackedSequence):
            raise MisuseError(
                f"DataParallel cannot split a PackedSequence ({where}): its items are not along one dimension",
                "pass the padded batch and its lengths, and call pack_padded_sequence inside the module",
            )
    return found


def _sizes(where: str, tensor: Tensor, count: int, dim: int) -> list[int]:
    """The sizes of a tensor's parts, those of torch.chunk; none for a tensor that has no dimension."""
    if tensor.dim() == 0:
        return []
    if not -tensor.dim() <= dim < tensor.dim():
        raise MisuseError(
            f"DataParallel(dim={dim}) cannot split {where}, which is of size {list(tensor.shape)}",
            "a tensor with that dimension, or another dim",
        )
    size = tensor.size(dim)
    each = max(1, -(-size // count))
    return [min(each, size - start) for start in range(0, size, each)] or [0]


def _common_count(sizes: dict[tuple[str, Tensor], list[int]], devices: int, dim: int) -> int:
    counts = {len(split) for split in sizes.values()}
    if len(counts) > 1:
        # torch goes by the fewest and drops the rest of the others without a word.
        lines = [f"  {where}, of size {list(tensor.shape)}: {len(split)}" for (where, tensor), split in sizes.items()]
        raise MisuseError(
            f"DataParallel splits tensors along dimension {dim}, and these give different numbers of parts for "
            f"{devices} devices:\n" + "\n".join(lines),
            f"tensors of one size in dimension {dim}: expand what is the same for all items to the batch, or make "
            "it a buffer of the module",
        )
    return counts.pop() if counts else devices


def _parts(tensor: Tensor, sizes: list[int], devices: Sequence[torch.device], dim: int) -> list[Tensor]:
    if not sizes:
        return [tensor.to(device, non_blocking=True) for device in devices]
    differentiable = torch.is_grad_enabled() and tensor.requires_grad
    parts, start = [], 0
    for size, device in zip(sizes, devices, strict=True):
        # Replicas may change their parts in place, and must not meet in the history of one base tensor then.
        part = (tensor if differentiable else tensor.detach()).narrow(dim, start, size)
        parts.append(part.to(device, non_blocking=True, copy=differentiable))
        start += size
    return parts


def gather(outputs: Sequence[Any], device: torch.device, dim: int) -> Any:
    """Put the outputs of replicas together: tensors are concatenated along `dim` on `device`.

    Numbers (tensors of no dimension) become a vector with one element for each replica, as in torch. Containers
    are rebuilt; anything else must be equal in all replicas. Raises MisuseError where it is not.
    """
    return _gathered(list(outputs), device, dim, "the output")


def _gathered(outputs: list[Any], device: torch.device, dim: int, where: str) -> Any:
    first = outputs[0]
    if all(isinstance(output, Tensor) for output in outputs):
        return _concatenated(outputs, device, dim)
    parts = [children(output) for output in outputs]
    if all(part is not None for part in parts) and len({_shape(output) for output in outputs}) == 1:
        together = zip(*(part or [] for part in parts), strict=True)
        return like(first, [_gathered([v for _, v in same], device, dim, where + same[0][0]) for same in together])
    if any(part is not None or isinstance(o, Tensor) for part, o in zip(parts, outputs, strict=True)) or any(
        output != first for output in outputs
    ):
        shown = "; ".join(f"replica {i}: {_described(output)}" for i, output in enumerate(outputs))
        raise MisuseError(
            f"DataParallel cannot put {where} of its replicas together: {shown}",
            "return tensors with one item for each item of the batch, in the same structure from every replica",
        )
    return first


def _concatenated(tensors: list[Tensor], device: torch.device, dim: int) -> Tensor:
    if dim == 0 and all(tensor.dim() == 0 for tensor in tensors):
        warnings.warn(
            "Was asked to gather along dimension 0, but all input tensors were scalars; will instead unsqueeze "
            "and return a vector.",
            stacklevel=6,
        )
        tensors = [tensor.unsqueeze(0) for tensor in tensors]
    return torch.cat([tensor.to(device, non_blocking=device.type != "cpu") for tensor in tensors], dim)


def _shape(container: Any) -> tuple[Any, ...]:
    return type(container), *(name for name, _ in children(container) or ())


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of size {list(output.shape)}"
    parts = children(output)
    if parts is None:
        return repr(output)[:80]
    return f"a {type(output).__name__} with {', '.join(name for name, _ in parts) or 'nothing'}"
