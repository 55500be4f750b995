"""Named tensors in one file, in the safetensors format: a length, a JSON header, the tensors' bytes.

Written here and not by the safetensors library, because a checkpoint that is saved while training goes on
has to be written in slices, hashed on the way, without holding the interpreter's lock. What is written is
plain safetensors and read by every reader of the format. The format stores nothing twice, so a tensor with
two names (tied weights) is written under both: then `module.load_state_dict(load_file(path))` has all names
it asks for.

complex128 is not in the format. It is written as pairs of float64, and its name is in the metadata.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.bool: "BOOL",
    torch.complex64: "C64", torch.complex128: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The dtypes that a container holds."""

_DTYPES = {code: dtype for dtype, code in CODES.items() if dtype is not torch.complex128}
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 16  # of the first tensor, for complex128; the format itself asks for 8
_COMPLEX = "complex128"  # the key of the metadata


def pieces(named: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file of these tensors, one after the other; what can be is a view of a tensor.

    The tensors may be on any device and must keep their values until all is consumed.
    """
    order = sorted(named, key=lambda name: (-named[name].element_size(), name))  # so that all are aligned
    pairs = [name for name in order if named[name].dtype is torch.complex128]
    notes = {**metadata, **({_COMPLEX: json.dumps(pairs)} if pairs else {})}
    header: dict[str, Any] = {"__metadata__": notes} if notes else {}
    at = 0
    for name in order:
        tensor = named[name]
        shape = [*tensor.shape, 2] if tensor.dtype is torch.complex128 else list(tensor.shape)
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": CODES[tensor.dtype], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    yield _LENGTH.pack(len(text)) + text
    for name in order:
        if named[name].numel():
            yield raw(named[name])


def parse(flat: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a file whose bytes are `flat` (uint8, on the CPU), as views of it, and the metadata."""
    start = _LENGTH.size + _LENGTH.unpack(bytes(flat[: _LENGTH.size].numpy()))[0]
    header = json.loads(bytes(flat[_LENGTH.size : start].numpy()))
    metadata = header.pop("__metadata__", {})
    pairs = json.loads(metadata.pop(_COMPLEX, "[]"))
    named = {}
    for name, entry in header.items():
        begin, end = (start + offset for offset in entry["data_offsets"])
        tensor = _typed(flat[begin:end], _DTYPES[entry["dtype"]], entry["shape"])
        named[name] = torch.view_as_complex(tensor) if name in pairs else tensor
    return named, metadata


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor that is not empty; a view of it if it is contiguous and on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return memoryview(plain.reshape(-1).view(torch.uint8).numpy())


def _typed(part: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    if not part.numel():
        return torch.empty(shape, dtype=dtype)
    if part.storage_offset() % dtype.itemsize or part.data_ptr() % dtype.itemsize:
        part = part.clone()  # written by another program, which does not align
    return part.view(dtype).view(shape)
