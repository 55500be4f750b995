"""Checkpoints that others have written: a safetensors file, or what torch.save made of state dicts.

torch.save files are read with weights_only, so that no code of theirs runs. People save either the state
dict itself or a dict of several under names that hardly differ.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from phalanx.checkpoint.failure import CheckpointError
from phalanx.errors import MisuseError

_MODEL = ("model", "model_state_dict", "state_dict", "module", "net", "model_state")
_PARTS = {
    "optimizer": ("optimizer", "optimizer_state_dict", "optim", "optimizer_state"),
    "scheduler": ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_scheduler_state_dict"),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler"),
    "sampler": ("sampler", "sampler_state_dict"),
}
_STEPS = ("step", "global_step", "iteration")


@dataclass(frozen=True)
class Foreign:
    """What a file of others holds. `rest` is what was found besides, by its names there."""

    model: dict[str, torch.Tensor] | None
    parts: dict[str, Any] = field(default_factory=dict)
    step: int | None = None
    rest: dict[str, Any] = field(default_factory=dict)


def read(path: Path, flat: torch.Tensor) -> Foreign:
    """Understand a file whose bytes are `flat`.

    Raises CheckpointError if it is none of these formats, MisuseError for one that only code can read.
    """
    data = flat.numpy().tobytes()
    if path.suffix == ".safetensors":
        try:
            return Foreign(safetensors.torch.load(data))
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{path} is no whole safetensors file: {error}") from error
    try:
        loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0] if "Unsupported" not in str(error) else str(error)
        raise MisuseError(
            f"{path} holds more than state dicts (or is damaged), and is not read, because that would run code out "
            f"of the file: {reason}",
            "if you trust the file, torch.load(path, weights_only=False) and load its parts by hand",
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read by torch.load: {error}") from error
    return _sorted_out(path, loaded)


def _sorted_out(path: Path, loaded: Any) -> Foreign:
    if not isinstance(loaded, Mapping):
        raise MisuseError(f"{path} holds a {type(loaded).__name__}, not a dict of states", "a state dict")
    if loaded and all(isinstance(value, torch.Tensor) for value in loaded.values()):
        return Foreign(dict(loaded))
    rest = dict(loaded)
    model = _taken(rest, _MODEL)
    parts = {name: _taken(rest, spellings) for name, spellings in _PARTS.items()}
    steps = [rest[name] for name in _STEPS if isinstance(rest.get(name), int)]
    return Foreign(
        None if model is None else dict(model),
        {name: part for name, part in parts.items() if part is not None},
        steps[0] if steps else None,
        rest,
    )


def _taken(rest: dict[str, Any], spellings: tuple[str, ...]) -> Any:
    for name in spellings:
        if name in rest:
            return rest.pop(name)
    return None
