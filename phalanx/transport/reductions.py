"""How contributions of several ranks are combined, element by element, in rank order.

Half precision is added in float32 and rounded once; bool is a logical value (sum is or, product is and);
small unsigned integers wrap as in C; complex numbers can be summed, averaged and multiplied.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

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
COMMUTATIVE = frozenset(_PAIRWISE)
"""Reductions of two tensors that give the same bits in either order."""
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
    elif is_narrow(dtype):
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


def segment(count: int, rank: int, size: int) -> tuple[int, int]:
    """Which of `count` elements, from the first to before the last, a rank adds up for all."""
    return count * rank // size, count * (rank + 1) // size


# -- weighted sums, of gradients -----------------------------------------------------------------------

PIECE = 64 << 10  # elements: what is read again and again stays in the caches


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a dtype is added in float32 and rounded once."""
    return dtype.is_floating_point and dtype.itemsize < 4


def scale_left(scales: Sequence[float], dtype: torch.dtype) -> float:
    """What weighted_sum leaves to be multiplied by: equal scales of wide numbers, else nothing."""
    return scales[0] if scales and len(set(scales)) == 1 and not is_narrow(dtype) else 1.0


def _are_all(scale: float, scales: Sequence[float]) -> bool:
    return all(each == scale for each in scales)


def weighted_sum(parts: Sequence[torch.Tensor], scales: Sequence[float], out: torch.Tensor) -> None:
    """Write sum(scale x part), in order, into `out`, but for the factor scale_left(scales, out.dtype)."""
    if not parts:
        out.zero_()
        return
    plain = _are_all(scale_left(scales, out.dtype), scales)
    if plain and len(parts) <= 2:
        _fold(parts, out, torch.add)
        return
    narrow = is_narrow(out.dtype)
    for start in range(0, out.numel(), PIECE):
        target = out[start : start + PIECE]
        pieces = [part[start : start + PIECE] for part in parts]
        if plain and not narrow:
            _fold(pieces, target, torch.add)
            continue
        if narrow:
            pieces = [piece.float() for piece in pieces]
        total = torch.empty_like(pieces[0]) if narrow else target
        torch.mul(pieces[0], scales[0], out=total)
        for piece, scale in zip(pieces[1:], scales[1:], strict=True):
            total.add_(piece, alpha=scale)
        if narrow:
            target.copy_(total)


def summation(parts: Sequence[torch.Tensor], scales: Sequence[float], out: torch.Tensor) -> list[Callable[[], object]]:
    """Return the calls that write sum(scale x part), in order, into `out`: what is decided once, is decided here."""
    left = scale_left(scales, out.dtype)
    plain = len(parts) == 2 and _are_all(left, scales)
    add = partial(torch.add, parts[0], parts[1], out=out) if plain else partial(weighted_sum, parts, scales, out)
    if left == 1.0:
        return [add]
    operation, number = _scaling(left, out.dtype)
    return [add, partial(operation, out, number, out=out)]


def scale_into(total: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Write total x scale into `out`, which may be `total`; where `scale` is 1/n, divide by n: that rounds once.

    `out` may be narrower: it is rounded to once, after that.
    """
    if scale != 1.0:
        operation, number = _scaling(scale, total.dtype)
        operation(total, number, out=out)
    elif out is not total:
        out.copy_(total)


def _scaling(scale: float, dtype: torch.dtype) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    inverse = round(1 / scale) if scale else 0
    # 1/3 is no float, 1/4 is: multiplying by a power of two is exact, and faster.
    if inverse and 1 / inverse == scale and inverse & (inverse - 1):
        return torch.div, constant(inverse, dtype)
    return torch.mul, constant(scale, dtype)


@lru_cache(maxsize=64)
def constant(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Return `number` as a tensor without dimensions, not to be written to, to calculate with tensors of `dtype`.

    Given the number itself, torch makes such a tensor at every call, which can take longer than the calculation.
    """
    return torch.tensor(number, dtype=dtype, device="cpu")
