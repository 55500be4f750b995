"""Nested Python data as JSON and a list of tensors, and back. Nothing is pickled: reading runs no code.

What an optimizer, a scheduler or a user has to say is dicts, lists, tuples, numbers, text and tensors. A
type that could not be read back is refused when it is written, by the place it stands in; torch.save would
take it, and torch.load with weights_only would refuse it on the day it is needed.

JSON has no tuples and only text as keys. What JSON does not have is an object with the key `~`:
`{"~": "tuple", "v": [...]}`, `{"~": "tensor", "v": 3}` for the fourth tensor of the list.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.checkpoint import container
from phalanx.errors import MisuseError

_TAG = "~"
_SEQUENCES: dict[type[Any], str] = {tuple: "tuple", torch.Size: "Size", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type[Any], str] = {OrderedDict: "OrderedDict", Counter: "Counter", dict: "dict", defaultdict: "dict"}
_HINTS = {
    "Namespace": "vars(...) of it",
    "Path": "str(...) of it",
    "PosixPath": "str(...) of it",
    "Generator": "its get_state()",
}


def encode(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """Return JSON data for `value`, and append its tensors to `tensors`, as they are, not copied.

    `where` is the place of `value`, for errors. Raises MisuseError for a type that cannot be stored.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_TAG: "float", "v": repr(value)}
    if isinstance(value, torch.Tensor):
        tensors.append(dense(value, where))
        return {_TAG: "tensor", "v": len(tensors) - 1}
    if isinstance(value, (np.ndarray, np.generic)):
        tensors.append(_from_numpy(value, where))
        return {_TAG: "array" if isinstance(value, np.ndarray) else "scalar", "v": len(tensors) - 1}
    if kind in _MAPPINGS:
        return _encode_mapping(value, where, tensors)
    if kind is list:
        return [encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
    if kind in _SEQUENCES:
        items = [encode(item, f"{where}[{i}]", tensors) for i, item in enumerate(value)]
        return {_TAG: _SEQUENCES[kind], "v": items}
    return _encode_leaf(value, where)


def decode(data: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the value that `encode` was given; its tensors are those of `tensors`."""
    if isinstance(data, list):
        return [decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: decode(item, tensors) for key, item in data.items()}
    value = data["v"]
    if data[_TAG] == "tensor":
        return tensors[value]
    if data[_TAG] == "array":
        return tensors[value].numpy()
    if data[_TAG] == "scalar":
        return tensors[value].numpy()[()]
    return _DECODERS[data[_TAG]]([decode(item, tensors) for item in value] if isinstance(value, list) else value)


def pack(value: Any, where: str) -> bytes:
    """Return nested data as bytes of one piece; for small things."""
    tensors: list[torch.Tensor] = []
    text = json.dumps(encode(value, where, tensors))
    return b"".join(container.pieces(numbered(tensors), {"tree": text}))


def unpack(data: bytes) -> Any:
    """Return what `pack` was given."""
    named, metadata = container.parse(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return decode(json.loads(metadata["tree"]), unnumbered(named))


def numbered(tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name the tensors of a list, for a container."""
    return {str(i): tensor for i, tensor in enumerate(tensors)}


def unnumbered(named: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the list that `numbered` was given."""
    return [named[str(i)] for i in range(len(named))]


def dense(value: torch.Tensor, where: str) -> torch.Tensor:
    """Return the tensor without its graph. Raises MisuseError if a checkpoint cannot hold it."""
    tensor = value.detach()
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        raise MisuseError(
            f"{where} is a {type(value).__name__} with layout {value.layout}: a checkpoint holds dense tensors",
            "tensor.to_dense(), tensor.full_tensor(), or what else makes a plain one of it",
        )
    if tensor.is_quantized or tensor.dtype not in container.CODES:
        raise MisuseError(
            f"{where} has dtype {tensor.dtype}, which a checkpoint cannot hold", "tensor.dequantize(), or another dtype"
        )
    return tensor


def _from_numpy(value: np.ndarray | np.generic, where: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(value))
    except TypeError:
        raise MisuseError(
            f"{where} is a numpy {type(value).__name__} of dtype {value.dtype}, which a checkpoint cannot hold",
            "numbers in the array, or value.tolist()",
        ) from None


def _encode_mapping(value: dict[str, Any], where: str, tensors: list[torch.Tensor]) -> Any:
    if type(value) is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(item, f"{where}[{key!r}]", tensors) for key, item in value.items()}
    pairs = [
        [encode(key, f"the key {key!r} of {where}", tensors), encode(item, f"{where}[{key!r}]", tensors)]
        for key, item in value.items()
    ]
    return {_TAG: _MAPPINGS[type(value)], "v": pairs}


def _encode_leaf(value: Any, where: str) -> Any:
    if type(value) in (bytes, bytearray):
        return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {_TAG: "complex", "v": repr(value)}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_TAG: "device", "v": str(value)}
    kind = type(value)
    raise MisuseError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: reading it back "
        "would have to run its code",
        _HINTS.get(kind.__name__, "numbers, text, tensors, arrays, and dicts, lists, tuples and sets of them"),
    )


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": complex,
    "bytes": base64.b64decode,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
    "tuple": tuple,
    "Size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": lambda pairs: Counter(dict(pairs)),
}
