"""`phalanx.seed`: the same start on every rank, then streams of their own.

    phalanx.seed(7)     random.seed(7), numpy.random.seed(7), torch.manual_seed(7) (all CUDA devices included),
                        on every rank: weights, data splits and permutations come out alike
    ddp = DistributedDataParallel(model)
                        from here on, rank r draws from streams of its own, which follow from 7 and r alone:
                        dropout, augmentation, and the seeds of DataLoader workers differ between ranks

Why the moment of wrapping. Seeds that differ from the start give each rank other weights, and other halves
from `random_split`; seeds that never differ give all ranks the same dropout masks. What is built before the
wrap has to be alike, what is drawn after it has to differ, and wrapping is what every script does in between.
It is noticed by torch's hook on the registration of a submodule, so torch's own class is noticed too. Where a
model is wrapped already when `seed` is called, its next forward is such a moment as well.

DataLoader workers need nothing of their own: torch derives the seeds of torch, random and numpy in worker w
from a number that the loader draws, when it is iterated, from the rank's generator, and w. What cannot be
reached from here: `numpy.random.default_rng()` without a seed, and a `generator=` that the user has seeded.
"""

from __future__ import annotations

import gc
import hashlib
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook, register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from phalanx.errors import MisuseError
from phalanx.group import world
from phalanx.parallel.seeds import expect_different_seeds

_LIMIT = 1 << 63
_WORDS = 2**32


@dataclass(frozen=True)
class Seed:
    """What `phalanx.seed` was given; `split` says that ranks have streams of their own by now."""

    value: int
    per_rank: bool = True
    split: bool = False


class _State:
    """The seed of this process; one, as there is one random generator in each library."""

    current: Seed | None = None
    watches_wraps = False
    watches_forwards: RemovableHandle | None = None


def seed(s: int, per_rank: bool = True) -> None:
    """Seed python, numpy and torch, CUDA devices included, so that a run can be repeated.

    Up to the first DistributedDataParallel all ranks draw the same numbers, those of a plain
    `torch.manual_seed(s)`: build models and split data there. From then on every rank has streams of its
    own, so that dropout and augmentation differ, also in DataLoader workers; with `per_rank=False` ranks
    stay alike. A forward of a model that has been wrapped before the call parts the streams as well.

    Ranks that all have the same seed when a model synchronises its first step, although they were to part,
    are told so by the warning "same-seed": somebody has called `torch.manual_seed` in between.

    Not collective: may be called before `phalanx.init`, with the same `s` on every rank. Checkpoints record
    it. Raises MisuseError unless 0 <= s < 2**63.
    """
    if isinstance(s, bool) or not isinstance(s, int) or not 0 <= s < _LIMIT:
        raise MisuseError(f"phalanx.seed({s!r}): not an integer from 0 to 2**63 - 1", "phalanx.seed(0)")
    _take(Seed(s, per_rank))
    _seed_all(s, [s % _WORDS, s // _WORDS] if s >= _WORDS else s)
    if not _State.watches_wraps:
        register_module_module_registration_hook(_on_registration)  # for good: it cannot be removed in a wrap
        _State.watches_wraps = True
    _stop_watching_forwards()
    if per_rank and _wrapped_already():
        _State.watches_forwards = register_module_forward_pre_hook(_on_forward)


def recorded() -> dict[str, Any] | None:
    """Return the seed of this process as data, or None if `phalanx.seed` has not been called."""
    return None if _State.current is None else asdict(_State.current)


def adopt(record: Mapping[str, Any] | None) -> None:
    """Take over the seed of a checkpoint, whose random states have been restored: wrapping changes nothing then."""
    _take(None if record is None else Seed(**record))
    if _State.current is None or _State.current.split:
        _stop_watching_forwards()


def reseed(record: Mapping[str, Any], salt: str) -> None:
    """Give every rank new streams, which follow from the seed of a checkpoint, the rank, and `salt`."""
    _take(replace(Seed(**record), split=True))
    _stop_watching_forwards()
    _seed_streams(f"{salt} of phalanx.seed")


def _take(current: Seed | None) -> None:
    """Go by this seed from now on; a wrapped model then looks whether ranks do draw from different ones."""
    _State.current = current
    expect_different_seeds(current is not None and current.per_rank)


def _on_registration(module: nn.Module, name: str, _submodule: nn.Module | None) -> None:
    if name == "module" and isinstance(module, DistributedDataParallel):
        _split()


def _on_forward(module: nn.Module, _inputs: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        _split()


def _split() -> None:
    current = _State.current
    _stop_watching_forwards()
    if current is not None and current.per_rank and not current.split:
        _State.current = replace(current, split=True)
        _seed_streams("phalanx.seed")


def _seed_streams(name: str) -> None:
    current = _State.current
    if current is None:
        return
    place = f", rank {world.rank()}" if current.per_rank else ""
    digest = hashlib.sha256(f"{name}({current.value}){place}".encode()).digest()
    _seed_all(int.from_bytes(digest[:8], "little") >> 1, np.frombuffer(digest, dtype=np.uint32))


def _seed_all(number: int, words: Any) -> None:
    random.seed(number)
    np.random.seed(words)
    torch.manual_seed(number)


def _stop_watching_forwards() -> None:
    if _State.watches_forwards is not None:
        _State.watches_forwards.remove()
        _State.watches_forwards = None


def _wrapped_already() -> bool:
    """Whether there is a wrapped model. By the type: looking at other attributes of all objects wakes some up."""
    return dist.is_initialized() and any(issubclass(type(each), DistributedDataParallel) for each in gc.get_objects())
