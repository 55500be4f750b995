"""What a checkpoint says of itself: `manifest.json`, written last, so that a folder without it is none.

It has the size and SHA-256 of every other file, and its own SHA-256, of its text without that entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

NAME = "manifest.json"
FORMAT = 1
_OWN = "sha256"


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: its size in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """One checkpoint.

    `serial` counts the checkpoints of a folder in the order in which they were saved, which is not that of
    `step` when somebody went back. `run` is the same for all that were saved by one run and by those that
    resumed it. `metric` is the mean over the ranks; `mode` says which is better, "min" or "max".
    """

    step: int
    serial: int
    run: str
    world_size: int
    holds: tuple[str, ...]
    seed: Mapping[str, Any] | None = None
    metric: float | None = None
    mode: str | None = None
    files: Mapping[str, File] = field(default_factory=dict)

    def text(self) -> str:
        """The contents of `manifest.json`."""
        data = {"format": FORMAT, **asdict(self)}
        return json.dumps({**data, _OWN: _digest(data)}, indent=1) + "\n"

    @classmethod
    def read(cls, text: str) -> Manifest:
        """Read `text()` back. Raises ValueError, in words, if it is not whole."""
        try:
            data = json.loads(text)
            own = data.pop(_OWN)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{NAME} is not whole") from None
        if own != _digest(data):
            raise ValueError(f"{NAME} does not have its checksum")
        if data.pop("format") != FORMAT:
            raise ValueError(f"{NAME} is of another version of Phalanx")
        files = {name: File(**entry) for name, entry in data.pop("files").items()}
        return cls(**{**data, "holds": tuple(data["holds"]), "files": files})

    def better_than(self, other: Manifest | None) -> bool:
        """Whether this one's metric is better; one without a metric, or with NaN, is never better."""
        if self.metric is None or self.metric != self.metric:
            return False
        if other is None or other.metric is None:
            return True
        return self.metric < other.metric if self.mode == "min" else self.metric > other.metric


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
