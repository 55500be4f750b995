"""The code that a dtype has in a ticket, and its name for people."""

from __future__ import annotations

import torch

_NAMES = (
    "float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool",
    "complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "uint16", "uint32", "uint64",
)  # fmt: skip

# Codes are places in the list above, from 1; 0 means no dtype. Append, never reorder.
CODES: dict[torch.dtype, int] = {
    getattr(torch, name): code for code, name in enumerate(_NAMES, 1) if hasattr(torch, name)
}
NAMES: dict[int, str] = {code: str(dtype).removeprefix("torch.") for dtype, code in CODES.items()}
