"""How contributions of several ranks are combined, element by element, in rank order.

Half precision is added in float32 and rounded once; bool is a logical value (sum is or, product is and);
small unsigned integers wrap as in C; complex numbers can be summed, averaged and multiplied.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch

from phalanx.errors import MisuseError


class Reduction(enum.IntEnum):
    """How contributions are combined."""

    NONE = 0
    SUM = 1
    AVG = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5
    BAND = 6
    BOR = 7
    BXOR = 8
    PREMUL_SUM = 9


_PAIRWISE: dict[Reduction, Callable[..., torch.Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PREMUL_SUM: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}
_ON_BOOL: dict[Reduction, Callable[..., torch.Tensor]] = {
    Reduction.SUM: torch.logical_or,
    Reduction.MAX: torch.logical_or,
    Reduction.PRODUCT: torch.logical_and,
    Reduction.MIN: torch.logical_and,
    Reduction.BAND: torch.logical_and,
    Reduction.BOR: torch.logical_or,
    Reduction.BXOR: torch.logical_xor,
}
_BITWISE = {Reduction.BAND, Reduction.BOR, Reduction.BXOR}
_SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_ORDERED = {Reduction.MIN, Reduction.MAX}


def check(dtype: torch.dtype, reduction: Reduction) -> None:
    """Raise MisuseError, before any data moves, if this dtype cannot be reduced in this way."""
    name = str(dtype).removeprefix("torch.")
    floating = dtype.is_floating_point or dtype.is_complex
    if floating and reduction in _BITWISE:
        raise MisuseError(f"ReduceOp.{reduction.name} of {name} tensors", "bitwise operations take integers or bool")
    if dtype.is_complex and reduction in _ORDERED:
        raise MisuseError(f"ReduceOp.{reduction.name} of {name} tensors", "complex numbers have no order")
    if dtype is torch.uint64 and reduction in _ORDERED:
        raise MisuseError(f"ReduceOp.{reduction.name} of uint64 tensors", "convert to int64 first")
    if dtype is torch.bool and reduction not in _ON_BOOL:
        raise MisuseError(f"ReduceOp.{reduction.name} of bool tensors", "convert to uint8 or float first")


def combine(parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction) -> None:
    """Write the combination of `parts`, one tensor per rank and in rank order, into `out`.

    All are one-dimensional, of one dtype and size; `out` may be one of the parts.
    """
    dtype = out.dtype
    if dtype is torch.bool:
        _fold(parts, out, _ON_BOOL[reduction])
    elif dtype.is_floating_point and dtype.itemsize < 4:
        _wide(parts, out, reduction, torch.float32)
    elif dtype in _SAME_BITS:
        if reduction in _ORDERED or reduction is Reduction.AVG:
            _wide(parts, out, reduction, torch.int64)
        else:
            bits = _SAME_BITS[dtype]
            _fold([part.view(bits) for part in parts], out.view(bits), _PAIRWISE[reduction])
    else:
        _fold(parts, out, _PAIRWISE[reduction])
        if reduction is Reduction.AVG:
            _divide(out, len(parts))


def _fold(parts: Sequence[torch.Tensor], out: torch.Tensor, pairwise: Callable[..., torch.Tensor]) -> None:
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    aliased = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    target = torch.empty_like(out) if aliased else out
    pairwise(parts[0], parts[1], out=target)
    for part in parts[2:]:
        pairwise(target, part, out=target)
    if aliased:
        out.copy_(target)


def _wide(parts: Sequence[torch.Tensor], out: torch.Tensor, reduction: Reduction, dtype: torch.dtype) -> None:
    total = parts[0].to(dtype)
    for part in parts[1:]:
        _PAIRWISE[reduction](total, part.to(dtype), out=total)
    if reduction is Reduction.AVG:
        _divide(total, len(parts))
    out.copy_(total)


def _divide(total: torch.Tensor, count: int) -> None:
    if total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(count)
    else:
        total.div_(count, rounding_mode="trunc")
