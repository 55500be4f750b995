"""Ranks that were to draw from seeds of their own, and draw from one: `phalanx.seed` says so to wrapped models."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import phalanx
from phalanx.testing import run
from phalanx.train import seed


def test_seeding_alike_after_phalanx_seed_is_named_unless_ranks_were_to_stay_alike() -> None:
    def warned(by_hand: bool) -> list[str]:
        model = phalanx.DistributedDataParallel(nn.Linear(2, 1))
        if by_hand:
            torch.manual_seed(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(1, 2)).sum().backward()
        return [each.message.name for each in caught]

    def program(rank: int) -> list[list[str]]:
        found = []
        for per_rank, by_hand in [(True, False), (True, True), (False, True)]:
            phalanx.seed(3, per_rank=per_rank)
            found.append(warned(by_hand))
        for record in ({"value": 3, "split": True}, {"value": 3, "per_rank": False}, None):  # as a checkpoint has it
            seed.adopt(record)
            found.append(warned(True))
        seed.reseed({"value": 3}, "a test")
        found += [warned(False), warned(True)]
        return found

    named = ["same-seed"]
    first, second = run(2, program, over="processes")
    assert first == [[], named, [], named, [], [], [], named]
    assert second == [[]] * len(first), "one rank speaks"
