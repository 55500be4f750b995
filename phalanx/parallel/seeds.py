"""Whether ranks that were to draw different random numbers do so."""

from __future__ import annotations

import struct

import torch

from phalanx import misuse
from phalanx.group.group import Group

_SAID = struct.Struct("<?Q")
_asked = False


def expect_different_seeds(wanted: bool = True) -> None:
    """Note that the user wants each rank of this process's world to have a seed of its own.

    When a wrapped model synchronises its first step, ranks whose torch.initial_seed() are all equal are warned.
    """
    global _asked
    _asked = wanted


def compare_seeds(core: Group) -> None:
    """Warn rank 0 if different seeds were asked for on some rank and all are equal. A collective."""
    answers = core.exchange(_SAID.pack(_asked, torch.initial_seed()), "a comparison of the seeds")
    said = [_SAID.unpack(each) for each in answers if each]
    seeds = {seed for _, seed in said}
    if core.rank == 0 and len(said) > 1 and len(seeds) == 1 and any(asked for asked, _ in said):
        misuse.warn(
            "same-seed",
            f"all ranks draw from the seed {seeds.pop()}, although one for each rank was asked for: they drop out the "
            "same units and augment alike. Usual cause: torch.manual_seed(s) on every rank, after phalanx.seed",
            "phalanx.seed(s, per_rank=True) last, on every rank; or torch.manual_seed(s + phalanx.rank())", core.rank,
        )  # fmt: skip
