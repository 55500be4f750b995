"""What is to be loaded: rank 0 finds and reads it, and sees that every byte is as it was written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from phalanx.checkpoint import folder as disk
from phalanx.checkpoint.content import STATE, tensors_of
from phalanx.checkpoint.failure import CheckpointError
from phalanx.checkpoint.folder import Entry
from phalanx.checkpoint.manifest import NAME, Manifest
from phalanx.errors import InternalError, MisuseError

_CALL = "checkpoint.load"


@dataclass(frozen=True)
class Wanted:
    """What the user wants: the models' files, and the other parts by name; `step` only if one was named."""

    models: Sequence[str]
    parts: Sequence[str]
    step: int | None = None

    def files(self) -> list[str]:
        """The files to read."""
        return [*self.models, STATE, *dict.fromkeys(tensors_of(part) for part in ("extra", *self.parts))]

    def check(self, manifest: Manifest, path: Path) -> None:
        """Raise MisuseError if the checkpoint does not have it all."""
        asked = [*(["model"] if self.models else []), *self.parts]
        lacking = [name for name in asked if name not in manifest.holds]
        lacking += [name for name in self.models if name not in manifest.files and "model" in manifest.holds]
        if lacking:
            raise MisuseError(
                f"{path} has no {', '.join(lacking)}: it holds {', '.join(sorted({*manifest.holds, *manifest.files}))}",
                f"leave {lacking[0]} out of {_CALL}(...)",
            )


@dataclass
class Source:
    """A checkpoint, or a file of others', whose bytes are in `buffers` by name; on rank 0, before they are shared.

    `manifest` is None for a file of others'. `damaged` says which newer checkpoints were passed over, and why.
    """

    path: Path
    manifest: Manifest | None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)

    @property
    def own_manifest(self) -> Manifest:
        """The manifest of a checkpoint of ours."""
        if self.manifest is None:
            raise InternalError(f"{self.path} is read as a checkpoint with a manifest, and has none")
        return self.manifest

    def header(self) -> bytes:
        """All but the bytes, for the other ranks."""
        return json.dumps({
            "path": str(self.path), "manifest": self.manifest and self.manifest.text(), "damaged": self.damaged,
            "files": [[name, flat.numel()] for name, flat in self.buffers.items()],
        }).encode()  # fmt: skip

    @classmethod
    def shared(cls, header: bytes, own: Source | None, broadcast: Callable[..., torch.Tensor]) -> Source:
        """Return the source on every rank, with its bytes, given its header and, on rank 0, itself. Collective."""
        data = json.loads(header)
        manifest = None if data["manifest"] is None else Manifest.read(data["manifest"])
        flats = {name: broadcast(own and own.buffers[name], size) for name, size in data["files"]}
        return cls(Path(data["path"]), manifest, flats, data["damaged"])


def find(path: Path, wanted: Wanted) -> Source:
    """Read the newest good checkpoint of a folder, or the one that `path` or `wanted.step` names, or a file.

    Raises CheckpointError if there is none; if one was named, also if that one is damaged.
    """
    if path.is_file():
        return Source(path, None, {path.name: disk.read_file(path, path.stat().st_size)})
    if (path / NAME).exists():
        return _first_good([disk.look_at(path)], wanted, path)
    found = disk.entries(path)
    if wanted.step is not None:
        found = [entry for entry in found if disk.step_of(entry.path) == wanted.step]
        return _first_good(found[:1], wanted, path)
    return _first_good(found, wanted, path)


def _first_good(found: Iterable[Entry], wanted: Wanted, path: Path) -> Source:
    damaged: list[str] = []
    for entry in found:
        if entry.fault:
            damaged.append(f"{entry.path} is damaged: {entry.fault}")
            continue
        manifest = entry.manifest
        if manifest is None:
            continue  # an entry without a fault has one
        wanted.check(manifest, entry.path)
        try:
            buffers = {name: disk.read(entry, name) for name in wanted.files() if name in manifest.files}
        except (OSError, ValueError) as error:
            damaged.append(f"{entry.path} is damaged: {error}")
            continue
        return Source(entry.path, entry.manifest, buffers, damaged)
    if damaged:
        raise CheckpointError("; ".join(damaged), f"another one: phalanx.checkpoint.load({str(path)!r}, step=...)")
    named = "" if wanted.step is None else f" of step {wanted.step}"
    there = "" if path.exists() else " (there is no such folder)"
    raise CheckpointError(
        f"no checkpoint{named} in {path}{there}",
        "phalanx.checkpoint.resume(...), which begins anew where there is none, or another path",
    )
