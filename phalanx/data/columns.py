"""Nested outputs as columns with one entry per item, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Column = Tensor | list[Any]


class ColumnError(Exception):
    """The outputs are not one entry per item; the text says where."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One container of a structure: how to build it, and what is in it (nodes, or numbers of columns)."""

    kind: type
    names: tuple[Any, ...]
    children: tuple[Node | int, ...]


Layout = Node | int


def columns_of(
    batches: Sequence[Any], sizes: Sequence[int | None]
) -> tuple[Node | int | None, list[Column], list[int]]:
    """Return the structure that all batches have, its columns over all batches, and the batches' sizes.

    `sizes` are the numbers of items per batch, None to take them from the leaves. No batch has no structure.
    """
    layout, found, counts = None, [], []
    paths: list[str] = []
    for number, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        leaves: list[Any] = []
        paths = []
        this = _taken_apart(batch, f"outputs[{number}]", leaves, paths)
        if layout is None:
            layout = this
        elif this != layout:
            raise ColumnError(f"outputs[{number}] is nested in another way than outputs[0]")
        size = _size_of(leaves, paths, size)
        found.append([_entries(leaf, size, path) for leaf, path in zip(leaves, paths, strict=True)])
        counts.append(size)
    columns = [_joined(parts, path) for *parts, path in zip(*found, paths, strict=True)]
    return layout, columns, counts


def rebuilt(layout: Node | int, columns: Sequence[Any]) -> Any:
    """Put a structure together again, with columns as its leaves."""
    if isinstance(layout, int):
        return columns[layout]
    parts = [rebuilt(child, columns) for child in layout.children]
    if issubclass(layout.kind, Mapping):
        return dict(zip(layout.names, parts, strict=True))
    if layout.kind is tuple:
        return tuple(parts)
    return layout.kind(**dict(zip(layout.names, parts, strict=True)))


def _taken_apart(value: Any, path: str, leaves: list[Any], paths: list[str]) -> Node | int:
    def node(kind: type, names: Sequence[Any], parts: Sequence[Any], text: str) -> Node:
        pairs = zip(names, parts, strict=True)
        inside = tuple(_taken_apart(part, path + text.format(name), leaves, paths) for name, part in pairs)
        return Node(kind, tuple(names), inside)

    if isinstance(value, Mapping):
        return node(dict, list(value), list(value.values()), "[{!r}]")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return node(type(value), value._fields, value, ".{}")
    if isinstance(value, tuple):
        return node(tuple, range(len(value)), value, "[{}]")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return node(type(value), names, [getattr(value, name) for name in names], ".{}")
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    leaves.append(value)
    paths.append(path)
    return len(leaves) - 1


def _length(leaf: Any) -> int | None:
    """How many entries a leaf has; None if it stands for every item."""
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.dim() else None
    return len(leaf) if isinstance(leaf, list) or (isinstance(leaf, np.ndarray) and leaf.ndim) else None


def _size_of(leaves: Sequence[Any], paths: Sequence[str], size: int | None) -> int:
    """Return the number of items of a batch, or raise ColumnError where leaves have other numbers of entries."""
    lengths = {path: length for leaf, path in zip(leaves, paths, strict=True) if (length := _length(leaf)) is not None}
    if size is None and not lengths:
        raise ColumnError(f"nothing in {paths[0] if paths else 'the outputs'} has one entry per item")
    expected = next(iter(lengths.values())) if size is None else size
    for path, length in lengths.items():
        if length != expected:
            raise ColumnError(f"{path} has {length} entries, and its batch has {expected} items")
    return expected


def _entries(leaf: Any, size: int, path: str) -> Column:
    if isinstance(leaf, Tensor):
        return leaf.detach() if leaf.dim() else leaf.detach().expand(size)
    return list(leaf) if _length(leaf) is not None else [leaf] * size


def _joined(parts: Sequence[Column], path: str) -> Column:
    path = path[path.index("]") + 1 :] or "the outputs"
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) == len(parts):
        looks = {(part.dtype, part.shape[1:]) for part in tensors}
        if len(looks) > 1:
            shown = " and ".join(sorted(f"{dtype} {list(shape)}" for dtype, shape in looks))
            raise ColumnError(f"entries of {path} are {shown} in different batches: pad them, or list the tensors")
        return torch.cat(tensors)
    if tensors:
        raise ColumnError(f"{path} is a tensor in some batches and none in others")
    return [entry for part in parts for entry in part]
