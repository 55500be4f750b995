"""A training run that saves every few steps, goes on from where it was, and writes down what it did.

The run has all that a resumed run can get wrong: dropout, an optimizer with state, a schedule, a shuffled
sampler that is stopped in the middle of an epoch. Its weights at the end are a function of its arguments.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import nn

import phalanx
from phalanx import DistributedDataParallel, DistributedSampler

ITEMS, BATCH = 22, 2  # 22 items over two ranks: 5 or 6 batches of each rank an epoch, the last one smaller


@dataclass(frozen=True)
class Plan:
    """A run: where it saves, how long it is, how often it saves and whether in the background."""

    folder: Path
    epochs: int = 4
    every: int = 3
    asynchronous: bool = False
    stop_at: int | None = None


class Ledger:
    """Lines of one rank on the disk, which stay when it is killed."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(folder / f"rank-{rank}.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def note(self, *words: object) -> None:
        os.write(self._file, (" ".join(map(str, words)) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def train(rank: int, plan: Plan, notes: Path) -> str:
    """Train to the end, or to `stop_at`; return a digest of weights, optimizer state and learning rate."""
    ledger = Ledger(notes, rank)
    ledger.note("pid", os.getpid(), time.monotonic())
    phalanx.seed(3)
    inputs = torch.randn(ITEMS, 4)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    sampler = DistributedSampler(range(ITEMS), seed=5, pad=False)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    loaded = phalanx.checkpoint.resume(plan.folder, always=True, **state)
    step = loaded.step if loaded else 0
    ledger.note("start", step)
    handle = None
    for epoch in range(sampler.epoch, plan.epochs):
        sampler.set_epoch(epoch)
        items = iter(sampler)
        while batch := list(islice(items, BATCH)):
            optimizer.zero_grad()
            loss = model(inputs[batch].repeat(2, 1)).square().mean()
            model.weigh(loss, len(batch)).backward()
            optimizer.step()
            scheduler.step()
            step += 1
            ledger.note("step", step, epoch, *batch)
            if step % plan.every == 0:
                handle = save(plan, step, state, handle, ledger)
            if step == plan.stop_at:
                return ""
    if handle is not None:
        handle.wait()
    ledger.note("end", time.monotonic())
    ledger.close()
    return digest(model, optimizer, scheduler)


def save(plan: Plan, step: int, state: dict, handle: object, ledger: Ledger) -> object:
    """Save; write down what is known to be on the disk."""
    if not plan.asynchronous:
        phalanx.checkpoint.save(plan.folder, step=step, keep=2, **state)
        ledger.note("saved", step)
        return None
    new = phalanx.checkpoint.save(plan.folder, step=step, keep=2, asynchronous=True, **state)
    if handle is not None:
        ledger.note("saved", handle.step)  # the second save has waited for the first
    return new


def digest(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: object) -> str:
    """A digest of all that training has made, bit by bit."""
    seen = hashlib.sha256(repr(scheduler.state_dict()).encode())
    buffers = [] if phalanx.rank() else list(model.buffers())  # those of the other ranks are their own
    moments = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    for tensor in [*model.parameters(), *buffers, *moments]:
        seen.update(tensor.detach().numpy().tobytes())
    return seen.hexdigest()


# -- reading what was written down -----------------------------------------------------------------------


def lines(notes: Path, rank: int) -> list[list[str]]:
    """What one rank has written down, by word; the last line may have been cut."""
    file = notes / f"rank-{rank}.txt"
    text = file.read_text() if file.exists() else ""
    return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]


def check_restarts(notes: Path) -> int:
    """Every start is from the last step that was on the disk, or a later one. Returns the number of starts."""
    saved = last = starts = 0
    for word, *rest in lines(notes, 0):
        if word == "start":
            assert saved <= int(rest[0]) <= last, f"start from {rest[0]}, though {saved} of {last} was saved"
            starts += 1
        elif word == "saved":
            saved = int(rest[0])
        elif word == "step":
            last = int(rest[0])
    return starts


def check_items(notes: Path, epochs: int, ranks: int = 2) -> None:
    """In the steps that count, those that were not done again later, each epoch has each item once."""
    seen: dict[int, list[int]] = {epoch: [] for epoch in range(epochs)}
    for rank in range(ranks):
        kept: dict[int, tuple[int, list[int]]] = {}
        for word, *rest in lines(notes, rank):
            if word == "start":
                kept = {step: what for step, what in kept.items() if step <= int(rest[0])}
            elif word == "step":
                kept[int(rest[0])] = int(rest[1]), [int(item) for item in rest[2:]]
        for epoch, items in kept.values():
            seen[epoch] += items
    for epoch, items in seen.items():
        assert sorted(items) == list(range(ITEMS)), f"epoch {epoch} has {sorted(items)}"
