"""Walking what people hand to a model and get back: tensors in tuples, lists, mappings and dataclasses.

A container is anything that `children` knows; all else is a leaf, tensors above all. A container is rebuilt,
never changed in place: `like` gives one of the same type with other children.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def children(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a container, each with how one writes it (`[0]`, `['x']`, `.x`); None for a leaf."""
    if isinstance(value, MutableMapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (tuple, list)) and not isinstance(value, (torch.Size, PackedSequence)):
        names = getattr(value, "_fields", None)
        written = [f"[{i}]" for i in range(len(value))] if names is None else [f".{name}" for name in names]
        return list(zip(written, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def like(value: Any, items: list[Any]) -> Any:
    """Return a container of the type of `value` that holds `items` where `value` has its children."""
    if isinstance(value, tuple):
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    twin = copy.copy(value)
    if isinstance(value, MutableMapping):
        for key, item in zip(list(value), items, strict=True):
            twin[key] = item
    elif isinstance(value, list):
        twin[:] = items
    else:
        for field, item in zip(dataclasses.fields(value), items, strict=True):
            object.__setattr__(twin, field.name, item)
    return twin


def leaves(value: Any, written: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with how one writes it."""
    parts = children(value)
    if parts is None:
        yield written, value
    else:
        for name, item in parts:
            yield from leaves(item, written + name)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `function` applied to every tensor in it; other leaves are the same objects."""
    parts = children(value)
    if parts is not None:
        return like(value, [map_tensors(item, function) for _, item in parts])
    return function(value) if isinstance(value, Tensor) else value
