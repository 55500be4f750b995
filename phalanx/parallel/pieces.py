"""Hashing tensors by their bytes: whole, and a piece of all their memory at a time.

CRC-32 finds any changed bit and any pair of swapped elements, takes bytes as they are (equal NaNs are equal), and
runs at 2.5 GB/s; sums of integers are faster for large tensors, but cost ten times as much to call for small ones.
A piece is read where it lies, by address, without an operation of torch; tensors that do not lie plainly in this
process's memory are hashed whole only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from zlib import crc32

import torch

_LEAST_BYTES = 512


def checksum(tensor: torch.Tensor) -> int:
    """The CRC-32 of the elements of a tensor, in logical order, whatever its device and strides."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    plain = plain.resolve_conj().resolve_neg().contiguous().cpu()
    return crc32(_memory(plain.data_ptr(), plain.numel() * plain.element_size()))


def can_be_hashed(tensor: torch.Tensor) -> bool:
    """Whether the bytes of this tensor are all of it: no subclass that keeps its data elsewhere, none without data."""
    return type(tensor.data) is torch.Tensor and tensor.device.type != "meta"


class Pieces:
    """The memory of some tensors, cut into at most `most` pieces of equal size.

    `of[i]` are the numbers of the pieces that tensor i has a part in. Keeps the tensors alive.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], most: int) -> None:
        sizes = [_plain_bytes(tensor) for tensor in tensors]
        room = size = max(_LEAST_BYTES, -(-sum(sizes) // most))
        self._pieces: list[list[_Part]] = [[]] if any(sizes) else []
        self.of: list[list[int]] = [[] for _ in tensors]
        for index, tensor in enumerate(tensors):
            start = 0
            while start < sizes[index]:
                if not room:
                    self._pieces.append([])
                    room = size
                taken = min(room, sizes[index] - start)
                self.of[index].append(len(self._pieces) - 1)
                self._pieces[-1].append(_Part(tensor, start, taken))
                start, room = start + taken, room - taken

    def __len__(self) -> int:
        return len(self._pieces)

    def leave_out(self, number: int) -> None:
        """Have a piece hash to the same from now on, whatever is in it."""
        self._pieces[number] = []

    def hash(self, number: int) -> int:
        """The CRC-32 of one piece as it is now."""
        value = 0
        for part in self._pieces[number]:
            if part.data_ptr() != part.pointer:
                part.locate()
            value = crc32(part.memory, value)
        return value


class _Part:
    """A range of bytes of one tensor. `pointer` is where the tensor was when `memory` was made."""

    __slots__ = ("_count", "_start", "_tensor", "data_ptr", "memory", "pointer")

    def __init__(self, tensor: torch.Tensor, start: int, count: int) -> None:
        self._tensor, self._start, self._count = tensor, start, count
        self.data_ptr = tensor.data_ptr
        self.locate()

    def locate(self) -> None:
        """Follow the tensor to where its data is now; if it does not reach so far any more, to nowhere."""
        self.pointer = self.data_ptr()
        reaches = _plain_bytes(self._tensor) >= self._start + self._count
        self.memory = _memory(self.pointer + self._start, self._count if reaches else 0)


def _memory(address: int, count: int) -> ctypes.Array[ctypes.c_char]:
    # Not tensor.numpy(), which would make the storage refuse to be resized for ever.
    return (ctypes.c_char * count).from_address(address) if count else (ctypes.c_char * 0)()


def _plain_bytes(tensor: torch.Tensor) -> int:
    """The size of a tensor that fills a range of this process's memory without gaps; 0 for any other."""
    if not can_be_hashed(tensor) or tensor.layout is not torch.strided or not tensor.is_cpu:
        return 0
    if tensor.is_neg() or tensor.is_conj() or not _is_dense(tensor):
        return 0
    return tensor.numel() * tensor.element_size()


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor.permute(order).is_contiguous()
