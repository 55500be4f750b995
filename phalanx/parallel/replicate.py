"""Replicas of a module, one for each device, whose gradients arrive at the one module.

Replica 0 has the module's own parameters and buffers. The others have copies: those of parameters are made by
an operation that autograd knows, so the gradients of all replicas are summed into the module's; those of buffers
are thrown away with the replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel.replicate import _replicatable_module

from phalanx.parallel.crew import AcrossReplicas, Crew, Replicas, Seat


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> Replicas:
    """Return one replica of `module`, which is on `devices[0]`, for each device.

    A replica has the module's structure, hooks and plain attributes (shared, not copied). What it computes is
    differentiable as a function of the module's parameters, unless gradients are disabled. Compiled modules are
    replicated as what they were compiled from.

    Raises RuntimeError for lazy modules without parameters yet, and for Python modules inside of a ScriptModule.
    """
    if not _replicatable_module(module):
        raise RuntimeError("Cannot replicate network where python modules are children of ScriptModule")
    crew = Crew(len(devices))
    names = {id(part): name for name, part in module.named_modules()}
    parts = list(module.modules())
    copies = [_copies_of(parts, names, crew, index) for index in range(len(devices))]
    for index, device in enumerate(devices):
        tensors = _tensors_for(module, device, own=index == 0)
        for part in parts:
            if _compiled_from(part) is None:
                _fill(part, copies[index], tensors)
    firsts = [(part, copies[0][id(part)]) for part in parts if part._buffers]
    return Replicas(crew, [copy[id(module)] for copy in copies], firsts)


def _copies_of(parts: Sequence[nn.Module], names: dict[int, str], crew: Crew, index: int) -> dict[int, nn.Module]:
    """Empty copies of modules, by the id of what they are copies of."""
    copies = {}
    for part in parts:
        if _compiled_from(part) is None:
            copy = part._replicate_for_data_parallel()
            copies[id(part)] = copy
            if isinstance(copy, AcrossReplicas):
                copy._seat = Seat(crew, index, f"{type(copy).__name__} {names[id(part)]!r}")
    for part in reversed(parts):
        inner = _compiled_from(part)
        if inner is not None:
            copies[id(part)] = copies[id(inner)]
    return copies


def _compiled_from(module: nn.Module) -> nn.Module | None:
    """What torch.compile was given, if `module` is what it returned: that always runs the original."""
    return module._modules["_orig_mod"] if "_orig_mod" in module._modules else None


class _Copy(Function):
    """Copy tensors to a device. By `to`, a sparse gradient would find no way back."""

    @staticmethod
    def forward(ctx: Any, device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.home = tensors[0].device
        return tuple(tensor.to(device, non_blocking=True, copy=True) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(None if gradient is None else gradient.to(ctx.home) for gradient in gradients)


def _tensors_for(module: nn.Module, device: torch.device, own: bool) -> dict[int, Tensor]:
    """The tensors of one replica, by the id of what they are copies of; a shared tensor is copied once."""
    held = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
    if own:
        return held
    learning = {key: tensor for key, tensor in held.items() if tensor.requires_grad}
    rest = {key: tensor for key, tensor in held.items() if key not in learning}
    copies = {key: tensor.to(device, non_blocking=True, copy=True) for key, tensor in rest.items()}
    if learning:
        learned = _Copy.apply(device, *learning.values())  # type: ignore[no-untyped-call]
        copies |= zip(learning, learned, strict=True)
    return copies


def _fill(part: nn.Module, copies: dict[int, nn.Module], tensors: dict[int, Tensor]) -> None:
    """Give the copy of a module its children, parameters and buffers."""
    copy = copies[id(part)]
    scripted = isinstance(copy, torch.jit.ScriptModule)
    for name, child in part._modules.items():
        twin = None if child is None else copies[id(child)]
        if scripted:
            setattr(copy, name, twin)
        else:
            copy._modules[name] = twin
    for held, kept in ((part._parameters, "_parameters"), (part._buffers, "_buffers")):
        for name, tensor in held.items():
            copied = None if tensor is None else tensors[id(tensor)]
            if scripted:
                setattr(copy, name, copied)
            else:
                # Not by setattr: the replica's parameters() then yields them, as libraries expect in a forward.
                getattr(copy, kept)[name] = copied
    if not scripted:
        _bind(part, copy)


def _bind(part: nn.Module, copy: nn.Module) -> None:
    """Have what is bound to the module bound to its copy: replaced methods, an RNN's list of weights."""
    copy._compiled_call_impl = None
    for name, value in copy.__dict__.items():
        if isinstance(value, MethodType) and value.__self__ is part:
            copy.__dict__[name] = MethodType(value.__func__, copy)
    if isinstance(copy, nn.RNNBase):
        copy._flat_weights = [getattr(copy, name, None) for name in copy._flat_weights_names]
