"""The names that tensors have in the plain module, whatever it is wrapped in.

Wrappers put a part into the name: DistributedDataParallel and DataParallel `module.`, torch.compile
`_orig_mod.`, also around a part of the model only. A checkpoint has the names without them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_COMPILED = "_orig_mod"
_WRAPPED = "module"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of all wrappers."""
    while part := _wraps(model):
        model = model.get_submodule(part)
    return model


def plain_names(model: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Map the keys of `model.state_dict()` to the names in the plain module."""
    wrappers = {name: part for name, module in model.named_modules(remove_duplicate=False) if (part := _wraps(module))}
    return {key: _plain(key, wrappers) for key in keys}


def fitting(state: Mapping[str, Any], wanted: Iterable[str]) -> dict[str, Any]:
    """Return `state` with the names that are `wanted`, where only wrappers' parts tell them apart."""
    known = set(wanted)
    bare = {_bare(name): name for name in known}
    renamed = {}
    for key, value in state.items():
        renamed[key if key in known else bare.get(_bare(key), key)] = value
    return renamed


def _wraps(module: nn.Module) -> str:
    """The part that a wrapper puts into names; empty for a module that is none."""
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return _WRAPPED
    return _COMPILED if _COMPILED in module._modules else ""


def _plain(key: str, wrappers: Mapping[str, str]) -> str:
    kept: list[str] = []
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if wrappers.get(".".join(parts[:depth])) != part:
            kept.append(part)
    return ".".join(kept)


def _bare(key: str) -> str:
    """A name without what wrappers put at its beginning, and without torch.compile's part anywhere."""
    parts = [part for part in key.split(".") if part != _COMPILED]
    while len(parts) > 1 and parts[0] == _WRAPPED:
        parts = parts[1:]
    return ".".join(parts)
