"""What callers may pass to a collective, checked before anything moves; texts as in torch.distributed.

Code that catches errors of torch.distributed matches on these texts ("invalid root rank", "requires a
single-element tensor list"), and on their types: bad lists and sizes are ValueErrors there, and so here.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import MisuseError
from phalanx.group import dtypes


class ArgumentError(MisuseError, ValueError):
    """An argument of a collective that cannot be right."""


def single(tensors: Any, call: str) -> Tensor:
    """The one tensor of a list of one."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ArgumentError(f"{call}: requires a single-element tensor list, got {len(tensors)}")
    tensor: Tensor = tensors[0]
    return tensor


def non_empty(tensors: Sequence[Any], call: str) -> None:
    """Refuse an empty list."""
    if not tensors:
        raise ArgumentError(f"{call}: requires non-empty tensor list")


def same_lengths(outputs: Sequence[Any], inputs: Sequence[Any], call: str) -> None:
    """Refuse lists that do not go together."""
    non_empty(inputs, call)
    if len(outputs) != len(inputs):
        raise ArgumentError(f"{call}: requires input/output tensor lists to have the same length")


def dense(tensor: Tensor, call: str) -> Tensor:
    """Refuse sparse tensors."""
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{call}: only supports dense tensors, got {tensor.layout}")
    return tensor


def code(tensor: Tensor, call: str) -> int:
    """The code of a tensor's dtype in a ticket."""
    found = dtypes.CODES.get(tensor.dtype)
    if found is None:
        raise ArgumentError(f"{call}: invalid tensor type {tensor.dtype}")
    return found


def root_rank(root: int, size: int, call: str) -> int:
    """Refuse a root that is not in the group."""
    if not 0 <= root < size:
        raise ArgumentError(f"{call}: invalid root rank: {root}, the group has {size}")
    return root


def alike(tensors: Sequence[Tensor], model: Tensor, call: str) -> None:
    """Refuse tensors that differ from `model` in dtype or number of elements."""
    dtype, count = model.dtype, model.numel()
    for index, tensor in enumerate(tensors):
        dense(tensor, call)
        if tensor.dtype is not dtype:
            raise ArgumentError(f"{call}: invalid tensor type at index {index} (expected {dtype}, got {tensor.dtype})")
        if tensor.numel() != count:
            raise ArgumentError(
                f"{call}: invalid tensor size at index {index} (expected {list(model.shape)}, got {list(tensor.shape)})"
            )


def uneven(tensors: Sequence[Tensor], own: Tensor, rank: int, call: str) -> int:
    """A tag of the sizes of `tensors`, one per rank, if they differ and that of this rank is `own`'s; else 0."""
    counts = [tensor.numel() for tensor in tensors]
    if len(set(counts)) == 1 or counts[rank] != own.numel():
        return 0
    one_type([own, *tensors], call)
    return zlib.crc32(repr(counts).encode()) | 1 << 32


def one_type(tensors: Sequence[Tensor], call: str) -> None:
    """Refuse a list of tensors of several dtypes."""
    for index, tensor in enumerate(tensors):
        dense(tensor, call)
        if tensor.dtype is not tensors[0].dtype:
            raise ArgumentError(
                f"{call}: tensors must all have the same type: invalid tensor type at index {index} "
                f"(expected {tensors[0].dtype}, got {tensor.dtype})"
            )


def per_rank(lists: Sequence[Any], size: int, call: str, which: str) -> Sequence[Tensor]:
    """The one list of one tensor per rank in a list of lists (or the list of tensors itself)."""
    if lists and isinstance(lists[0], Tensor):
        lists = [lists]
    if len(lists) != 1:
        raise ArgumentError(
            f"{call}: requires a single-element {which} list containing a list with {size} tensors, got {len(lists)}"
        )
    if len(lists[0]) != size:
        raise ArgumentError(
            f"{call}: Incorrect {which} list size {len(lists[0])}. {which.capitalize()} list size should be "
            f"{size}, same as size of the process group (invalid {which} tensor list at index 0)."
        )
    inner: Sequence[Tensor] = lists[0]
    return inner


def none_here(lists: Sequence[Any], call: str, which: str) -> None:
    """Refuse a list that only the root may give."""
    if lists and (isinstance(lists[0], Tensor) or lists[0]):
        raise ArgumentError(f"{call}: requires empty {which} on non-root")


def stacked(whole: Tensor, part: Tensor, size: int, call: str, names: tuple[str, str]) -> None:
    """Refuse a tensor for all ranks that is not `size` times as large as the one for one rank."""
    dense(whole, call)
    dense(part, call)
    if whole.dtype is not part.dtype:
        raise ArgumentError(
            f"{call}: {names[0]} tensor must have the same type as {names[1]} tensor, "
            f"got {whole.dtype} and {part.dtype}"
        )
    if whole.numel() != part.numel() * size:
        raise ArgumentError(
            f"{call}: {names[0]} tensor size must be equal to world_size times {names[1]} tensor size, "
            f"got {whole.numel()} and {size} x {part.numel()} elements"
        )


def splits(sizes: Sequence[int], tensor: Tensor, size: int, call: str) -> list[int]:
    """How many elements of `tensor` go to (or come from) each rank; equal parts if `sizes` is empty."""
    dense(tensor, call)
    rows = tensor.shape[0] if tensor.dim() else tensor.numel()
    if not sizes:
        if rows % size:
            raise ArgumentError(
                f"{call}: Tensor's dim 0 does not divide equally across group size: {rows} rows, {size} ranks"
            )
        return [tensor.numel() // size] * size
    if len(sizes) != size:
        raise ArgumentError(f"{call}: Number of tensor splits not equal to group size: {len(sizes)} and {size}")
    if sum(sizes) != rows:
        raise ArgumentError(f"{call}: Split sizes doesn't match total dim 0 size: {list(sizes)}, {rows} rows")
    per_row = tensor.numel() // rows if rows else 0
    return [count * per_row for count in sizes]
