"""Loading: rank 0 reads and checks, the others receive the same bytes, every rank gives them to its objects."""

from __future__ import annotations

import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.checkpoint import container, foreign, names, random_state, tree
from phalanx.checkpoint import folder as disk
from phalanx.checkpoint.agreement import Job, Ranks
from phalanx.checkpoint.content import STATE, load_state, model_files, tensors_of
from phalanx.checkpoint.saving import continue_run, finish_pending
from phalanx.checkpoint.source import Source, Wanted, find
from phalanx.errors import MisuseError
from phalanx.launch.environment import Place
from phalanx.train import seed

_AUTO = "auto"


@dataclass(frozen=True)
class Loaded:
    """What was loaded: the checkpoint's path, step, world size, metric and seed, and the `extra` of save.

    For a file of others' `extra` is what was in it besides, and what is not known is None. `damaged` names the
    newer checkpoints that were passed over, with what is wrong with them.
    """

    path: Path
    step: int | None
    extra: Any = None
    world_size: int | None = None
    metric: float | None = None
    seed: int | None = None
    damaged: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    step: int | None = None,
    random: bool = True,
    strict: bool = True,
    map_location: torch.device | str = "cpu",
) -> Loaded:
    """Load a checkpoint on every rank: the same bytes, which rank 0 alone reads.

    `path` is a folder of checkpoints (the newest good one is taken, or that of `step`), one checkpoint, or a
    file of others': safetensors, or torch.save of a state dict or of a dict of them, read without running code.
    The model may be wrapped or not, then and now. Weights and optimizer state go to the devices where the
    model is; tensors of `extra` go to `map_location`. `strict` is that of Module.load_state_dict.

    Checksums are verified. If the newest checkpoint is damaged, the one before is taken and a warning says so;
    one that was named is an error instead. `random` restores every rank's random states; where the number of
    ranks is another one, they are derived anew from the recorded seed of phalanx.seed, and a warning says so.

    Collective: every rank, with the same arguments. Raises on every rank: CheckpointError if there is nothing
    good to load, MisuseError if what is asked for is not in it; what load_state_dict of one rank raises.
    """
    loader = _Loader("checkpoint.load", model, _given(optimizer, scheduler, scaler, sampler), random, strict)
    loaded = loader.run(lambda: find(Path(path), loader.wanted(step)), map_location)
    if loaded is None:
        raise MisuseError(f"checkpoint.load({str(path)!r}): rank 0 is in checkpoint.resume", "the same on every rank")
    return loaded


def resume(
    directory: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    always: bool = False,
    strict: bool = True,
    map_location: torch.device | str = "cpu",
) -> Loaded | None:
    """Go on from where the launch says, or return None to begin anew. For the top of a training script.

    With `phalanx run --resume auto` (or PHALANX_RESUME=auto), after a restart by torchrun or Slurm, and with
    `always=True`, it loads the newest good checkpoint of `directory`, and returns None where there is none yet.
    With `--resume PATH` it loads that one, and an error says if there is none. Otherwise returns None, with a
    warning if `directory` has checkpoints that could be resumed. Rank 0's word counts.

    Collective, and for the rest like `load`.
    """
    loader = _Loader("checkpoint.resume", model, _given(optimizer, scheduler, scaler, sampler), True, strict)
    folder = Path(directory)

    def search() -> Source | None:
        place = Place.from_environment()
        where = place.resume or (_AUTO if always or place.restart_count else "")
        if where not in ("", _AUTO):
            return find(Path(where), loader.wanted())
        there = disk.entries(folder)
        if where == _AUTO:
            return find(folder, loader.wanted()) if there else None
        if there:
            warnings.warn(f"beginning anew, though {folder} has checkpoints, the last {there[0].path.name}: "
                          "`phalanx run --resume auto` goes on from there", stacklevel=2)  # fmt: skip
        return None

    return loader.run(search, map_location)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the checkpoint that was saved last and is complete, or None.

    Looks at the names and sizes of its files only; `load` verifies every byte. Not collective: this rank's disk.
    """
    return next((entry.path for entry in disk.entries(Path(directory)) if not entry.fault), None)


def best(directory: str | os.PathLike[str]) -> Path | None:
    """Return the folder of the checkpoint with the best metric, or None. Not collective, as `latest`."""
    found = disk.best_of(entry for entry in disk.entries(Path(directory)) if not entry.fault)
    return None if found is None else found.path


def _given(optimizer: Any, scheduler: Any, scaler: Any, sampler: Any) -> dict[str, Any]:
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    return {name: part for name, part in parts.items() if part is not None}


class _Loader:
    """One load, by one rank."""

    def __init__(self, call: str, model: Any, parts: dict[str, Any], random: bool, strict: bool) -> None:
        self._ranks = Ranks.here(call)
        self._models = {} if model is None else model_files(model)
        self._parts, self._random, self._strict = parts, random, strict
        self._notes: list[str] = []

    def wanted(self, step: int | None = None) -> Wanted:
        """What to look for."""
        return Wanted(list(self._models), list(self._parts), step)

    def run(self, search: Callable[[], Source | None], map_location: torch.device | str) -> Loaded | None:
        """Let rank 0 search, share what it finds, give it to the user's objects on every rank."""
        finish_pending()
        found: list[Source | None] = []

        def work() -> bytes:
            found.append(search())
            return b"" if found[0] is None else found[0].header()

        job = Job(work, "phalanx-load") if self._ranks.rank == 0 else None
        header = self._ranks.attend(job)
        if not header:
            return None
        source = Source.shared(header, found[0] if found else None, self._ranks.broadcast)
        loaded: list[Loaded] = []

        def apply() -> bytes:
            take = self._take_foreign if source.manifest is None else self._take
            loaded.append(take(source, map_location))
            return b""

        self._ranks.gather(apply)
        self._say(loaded[0])
        return loaded[0]

    def _take(self, source: Source, map_location: torch.device | str) -> Loaded:
        manifest, state = source.own_manifest, json.loads(source.buffers[STATE].numpy().tobytes())
        lists = {file: _tensors(source, file) for file in source.buffers if file not in (*self._models, STATE)}

        def part(name: str) -> Any:
            return tree.decode(state[name], lists[tensors_of(name)])

        rest = part("rest")
        for file, model in self._models.items():
            named = container.parse(source.buffers[file])[0]
            self._load_model(model, {**named, **rest.get(file, {})})
        for name, target in self._parts.items():
            if name != "sampler":
                load_state(target, part(name), name)
        if "sampler" in self._parts:
            load_state(self._parts["sampler"], self._own_sampler_state(part("sampler")), "sampler")
        if self._random:
            self._restore_random(part("random"), source)
        continue_run(source.path.parent, manifest.run)
        return Loaded(
            source.path, manifest.step, _moved(part("extra"), map_location), manifest.world_size, manifest.metric,
            None if manifest.seed is None else manifest.seed["value"], tuple(source.damaged),
        )  # fmt: skip

    def _take_foreign(self, source: Source, map_location: torch.device | str) -> Loaded:
        theirs = foreign.read(source.path, next(iter(source.buffers.values())))
        if self._models and theirs.model is None:
            raise MisuseError(f"{source.path} has no model: it holds {', '.join(map(str, theirs.rest))}", "model=None")
        if len(self._models) > 1:
            raise MisuseError(f"{source.path} holds one model, and {len(self._models)} are to be loaded", "one model=")
        for name in self._parts:
            if name not in theirs.parts:
                raise MisuseError(f"{source.path} has no state of a {name}", f"leave {name} out of the call")
        for model in self._models.values():
            self._load_model(model, theirs.model or {})
        for name, target in self._parts.items():
            load_state(target, theirs.parts[name], name)
        return Loaded(source.path, theirs.step, _moved(theirs.rest, map_location))

    def _load_model(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        module = names.unwrapped(model)
        current = module.state_dict()
        plain = names.plain_names(module, current)
        fitted = names.fitting(state, plain.values())
        keys = {name: key for key, name in plain.items()}
        renamed = OrderedDict((keys.get(name, name), value) for name, value in fitted.items())
        renamed._metadata = getattr(current, "_metadata", {})  # type: ignore[attr-defined]  # versions of modules, which files do not have
        module.load_state_dict(renamed, strict=self._strict)

    def _own_sampler_state(self, states: list[Any]) -> Any:
        if len(states) == 1:
            return states[0]
        if len(states) != self._ranks.size:
            raise MisuseError(
                f"the sampler's state was another one on each of {len(states)} ranks, and cannot be dealt to "
                f"{self._ranks.size}",
                "phalanx.loader or phalanx.DistributedSampler, whose state fits any number of ranks, or leave "
                "sampler out of the call and begin the epoch again", self._ranks.rank,
            )  # fmt: skip
        return states[self._ranks.rank]

    def _restore_random(self, states: list[Any], source: Source) -> None:
        record, ranks = source.own_manifest.seed, self._ranks
        if len(states) == ranks.size:
            random_state.restore(states[ranks.rank])
            seed.adopt(record)
            return
        saved = f"{source.path} has random states of {len(states)} ranks, and this run has {ranks.size}"
        if record is None:
            self._notes.append(f"{saved}: they are not restored, and as phalanx.seed(...) was not called, random "
                               "numbers go on from where each rank's generators are")  # fmt: skip
            return
        seed.reseed(record, f"step {source.own_manifest.step} on {ranks.size} ranks")
        self._notes.append(f"{saved}: new ones are derived from the recorded phalanx.seed({record['value']}), the "
                           "step, the number of ranks and each rank")  # fmt: skip

    def _say(self, loaded: Loaded) -> None:
        if loaded.damaged:
            self._notes.append(f"{'; '.join(loaded.damaged)}. Loaded {loaded.path} (step {loaded.step}) instead")
        for note in self._notes if self._ranks.rank == 0 else ():
            warnings.warn(note, stacklevel=4)


def _tensors(source: Source, file: str) -> list[torch.Tensor]:
    # Copies, so that no tensor of an optimizer is a view of the whole file.
    named = container.parse(source.buffers[file])[0]
    return tree.unnumbered({name: tensor.clone() for name, tensor in named.items()})


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _moved(item, device)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(_moved(item, device) for item in value)
    return value
