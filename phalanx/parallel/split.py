"""A model that is too large for one device: consecutive blocks on different devices, or on different ranks.

`split_over` places blocks on devices of this process, and hooks move what goes into a block to its device. The
model is the same object with the same state dict. `pipeline_stages` cuts the same way, one module for each
stage, for torch.distributed.pipelining.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from phalanx.errors import MisuseError
from phalanx.parallel.containers import map_tensors
from phalanx.parallel.partition import balanced_counts

M = TypeVar("M", bound=nn.Module)


def split_over(
    blocks: M | Sequence[nn.Module],
    devices: Sequence[str | int | torch.device],
    *,
    counts: Sequence[int] | None = None,
    output_device: str | int | torch.device | None = None,
) -> M | nn.Sequential:
    """Place consecutive blocks on `devices`, in order, and return the model: `blocks` itself, or a Sequential.

    `blocks` is an `nn.Sequential`, an `nn.ModuleList` inside a larger model, or a list of modules. Each device
    gets `counts[i]` blocks; by default as many as make the largest share of bytes (parameters and buffers) as
    small as possible. A block's inputs, tensors in containers and keyword arguments too, are moved to its device;
    the last block's output to `output_device`, or nowhere. A device may come up several times, and may be the CPU.

    Split before making the optimizer and before wrapping in DistributedDataParallel, without device_ids. To split
    again replaces the split. Raises MisuseError if a parameter is shared between blocks on different devices, or
    if the numbers of blocks and devices do not fit. Not a collective.
    """
    named = _named_blocks(blocks)
    places = [torch.device(device) for device in devices]
    cut = _counts([block for _, block in named], len(places), counts, "devices")
    device_of = [device for device, count in zip(places, cut, strict=True) for _ in range(count)]
    _refuse_shared(named, [str(device) for device in device_of])
    for (_, block), device in zip(named, device_of, strict=True):
        _remove_moves(block)
        block.to(device)
        block.register_forward_pre_hook(_MoveInputs(device), prepend=True, with_kwargs=True)
    if output_device is not None:
        named[-1][1].register_forward_hook(_MoveOutput(torch.device(output_device)))
    return blocks if isinstance(blocks, nn.Module) else nn.Sequential(*blocks)


def pipeline_stages(
    blocks: nn.Module | Sequence[nn.Module], stages: int, *, counts: Sequence[int] | None = None
) -> list[nn.Sequential]:
    """Cut consecutive blocks into `stages` modules; the state dicts of all stages together are the model's.

    Rank i of a pipeline keeps the i-th and gives it to torch.distributed.pipelining.PipelineStage, wrapped in
    DistributedDataParallel with the process group of the stage's replicas if there are any. The cut is that of
    `split_over`. Raises MisuseError if a parameter is shared between stages. Not a collective.
    """
    named = _named_blocks(blocks)
    cut = _counts([block for _, block in named], stages, counts, "stages")
    stage_of = [stage for stage, count in enumerate(cut) for _ in range(count)]
    _refuse_shared(named, [f"stage {stage}" for stage in stage_of])
    found: list[nn.Sequential] = [nn.Sequential() for _ in range(stages)]
    for (name, block), stage in zip(named, stage_of, strict=True):
        found[stage].add_module(name, block)
    return found


def _named_blocks(blocks: nn.Module | Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    if isinstance(blocks, (nn.Sequential, nn.ModuleList)):
        return list(blocks.named_children())
    if isinstance(blocks, nn.Module):
        lists = [name for name, part in blocks.named_modules() if isinstance(part, (nn.Sequential, nn.ModuleList))]
        hint = f"its blocks, {' or '.join(lists[:3])}" if lists else "its blocks as an nn.Sequential or a list"
        raise MisuseError(f"a {type(blocks).__name__} has no order of blocks that could be read off it", hint)
    return [(str(index), block) for index, block in enumerate(blocks)]


def _counts(blocks: Sequence[nn.Module], groups: int, counts: Sequence[int] | None, what: str) -> list[int]:
    if not 1 <= groups <= len(blocks):
        raise MisuseError(f"{len(blocks)} blocks for {groups} {what}", f"1 to {len(blocks)} {what}")
    if counts is None:
        return balanced_counts([_bytes(block) for block in blocks], groups)
    if len(counts) != groups or sum(counts) != len(blocks) or min(counts) < 1:
        raise MisuseError(
            f"counts={list(counts)} for {len(blocks)} blocks and {groups} {what}",
            f"{groups} positive numbers whose sum is {len(blocks)}",
        )
    return list(counts)


def _tensors(block: nn.Module) -> Iterable[Tensor]:
    return chain(block.parameters(), block.buffers())


def _bytes(block: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(block))


def _refuse_shared(named: Sequence[tuple[str, nn.Module]], places: Sequence[str]) -> None:
    """A shared tensor would move to the device of the last block that has it, under the feet of the others."""
    first: dict[int, tuple[str, str]] = {}
    for (name, block), place in zip(named, places, strict=True):
        for path, tensor in chain(block.named_parameters(), block.named_buffers()):
            known, where = first.setdefault(id(tensor), (f"{name}.{path}", place))
            if where != place:
                raise MisuseError(
                    f"{known!r} on {where} and '{name}.{path}' on {place} are one tensor",
                    "counts=[...] that put both blocks in one place, or a tensor of its own for each",
                )


class _MoveInputs:
    """A forward pre-hook; a class, so that the model can be pickled."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return _moved(arguments, self.device), _moved(keywords, self.device)


class _MoveOutput:
    """A forward hook."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        return _moved(output, self.device)


def _moved(value: Any, device: torch.device) -> Any:
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"))


def _remove_moves(block: nn.Module) -> None:
    for hooks in (block._forward_pre_hooks, block._forward_hooks):
        for number, hook in list(hooks.items()):
            if isinstance(hook, (_MoveInputs, _MoveOutput)):
                del hooks[number]
                block._forward_pre_hooks_with_kwargs.pop(number, None)
