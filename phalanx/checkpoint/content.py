"""What goes into a checkpoint, taken from the user's objects: tensors by file and name, the rest as JSON.

model.safetensors      the weights, by their names in the plain module
optimizer.safetensors  the optimizer's tensors, numbered
state.safetensors      the tensors of everything else, numbered
state.json             all that is no tensor, with numbers in place of tensors
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from phalanx.checkpoint import container, names, tree
from phalanx.checkpoint.folder import Pieces
from phalanx.errors import MisuseError

STATE = "state.json"
_OPTIMIZER = "optimizer"
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType)
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"


def model_files(model: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the models by the file that holds their weights: one, or one for each name of a mapping."""
    if isinstance(model, nn.Module):
        return {"model.safetensors": model}
    if not isinstance(model, Mapping) or not model:
        raise MisuseError(f"model={type(model).__name__}", 'model=ddp, or model={"generator": g, "critic": c}')
    wrong = next((name for name in model if not str(name).isidentifier()), None)
    if wrong is not None:
        raise MisuseError(f"the name {wrong!r} of a model, which becomes part of a file's name", "letters and digits")
    return {f"model-{name}.safetensors": each for name, each in model.items()}


def gather_shards(optimizer: Any) -> None:
    """Bring the whole state of torch's ZeroRedundancyOptimizer to rank 0. Collective; nothing for others."""
    zero = sys.modules.get(_ZERO)  # importing it takes seconds, and who uses it has done so
    for each in _each(optimizer):
        if zero is not None and isinstance(each, zero.ZeroRedundancyOptimizer):
            each.consolidate_state_dict(to=0)


def state_of(value: Any, where: str) -> Any:
    """Return the state dict of an object with one, or of each in a list, tuple or dict of them."""
    if isinstance(value, Mapping):
        return {key: state_of(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [state_of(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if not callable(getattr(value, "state_dict", None)):
        raise MisuseError(f"{where} is a {type(value).__name__}, which has no state_dict()", "leave it out")
    state = value.state_dict()
    if isinstance(state, dict):
        # Schedulers hold functions that they are made with again, as torch leaves out the lambdas of LambdaLR.
        return {key: item for key, item in state.items() if not isinstance(item, _FUNCTIONS)}
    return state


def load_state(value: Any, state: Any, where: str) -> None:
    """Give back what `state_of` returned. Raises MisuseError if there are more, fewer or other objects now."""
    if isinstance(value, Mapping) or isinstance(value, (list, tuple)):
        now = list(value) if isinstance(value, Mapping) else list(range(len(value)))
        then = list(state) if isinstance(value, Mapping) and isinstance(state, Mapping) else None
        then = list(range(len(state))) if isinstance(state, list) else then
        if now != then:
            raise MisuseError(f"{where} was saved with {then} and is loaded with {now}", "the same ones")
        for key in now:
            load_state(value[key], state[key], f"{where}[{key!r}]")
    else:
        value.load_state_dict(state)


def tensors_of(part: str) -> str:
    """The file that holds a part's tensors. The optimizer's are large, and not needed to evaluate a model."""
    return f"{_OPTIMIZER if part == _OPTIMIZER else 'state'}.safetensors"


class Content:
    """What rank 0 writes. References to the user's tensors until `freeze` has copied them."""

    def __init__(self, model: Any, parts: Mapping[str, Any], extra: Any) -> None:
        self._weights: dict[str, dict[str, torch.Tensor]] = {}
        self._tensors: dict[str, list[torch.Tensor]] = {}
        self._tree: dict[str, Any] = {}
        rest = {}
        for file, each in ({} if model is None else model_files(model)).items():
            self._weights[file], rest[file] = _split_state(each, file)
        self.add("rest", rest)
        for name, value in parts.items():
            self.add(name, state_of(value, name))
        self.add("extra", extra)

    def add(self, name: str, value: Any) -> None:
        """Add nested data. Raises MisuseError for what a checkpoint cannot hold."""
        self._tree[name] = tree.encode(value, name, self._tensors.setdefault(tensors_of(name), []))

    def freeze(self, pool: Pool) -> None:
        """Copy all tensors, so that training may go on."""
        held = [*(weights.values() for weights in self._weights.values()), *self._tensors.values()]
        copies = iter(pool.copy(list(chain.from_iterable(held))))
        self._weights = {file: {name: next(copies) for name in w} for file, w in self._weights.items()}
        self._tensors = {file: [next(copies) for _ in tensors] for file, tensors in self._tensors.items()}

    def files(self) -> dict[str, Pieces]:
        """What to write into each file."""
        files: dict[str, Pieces] = {file: _of_weights(weights) for file, weights in self._weights.items()}
        for file, tensors in self._tensors.items():
            files[file] = _of_tensors(tensors)
        files[STATE] = lambda: [json.dumps(self._tree).encode()]
        return files


class Pool:
    """Memory for the copies of an asynchronous save, kept for the next: new pages cost more than the copying."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the tensors, which last until the next call."""
        total = sum(_room(tensor) for tensor in tensors)
        if self._flat.numel() < total:
            self._flat = torch.empty(total, dtype=torch.uint8, pin_memory=any(t.is_cuda for t in tensors))
        copies, at = [], 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            copy = self._flat[at : at + size].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor.detach()))
            at += _room(tensor)
        return copies

    def clear(self) -> None:
        """Give the memory back."""
        self._flat = torch.empty(0, dtype=torch.uint8)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // 64) * 64


def _split_state(model: nn.Module, file: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The dense tensors of a model's state dict by their plain names, and what else it has (extra state)."""
    module = names.unwrapped(model)
    state = module.state_dict()
    plain = names.plain_names(module, state)
    weights, rest = {}, {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            weights[plain[key]] = tree.dense(value, f"{file}: {plain[key]}")
        else:
            rest[plain[key]] = value
    return weights, rest


def _of_weights(weights: Mapping[str, torch.Tensor]) -> Pieces:
    return lambda: container.pieces(weights, {"format": "pt"})  # what the format's readers look for


def _of_tensors(tensors: list[torch.Tensor]) -> Pieces:
    return lambda: container.pieces(tree.numbered(tensors), {})


def _each(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [value]
