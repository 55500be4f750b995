"""The numbers of docs/uneven.md: every row of its tables is run on two processes, in every setting that it names."""

from __future__ import annotations

import contextlib
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import DistributedDataParallel, SyncBatchNorm
from phalanx.testing import run

PAGE = Path(__file__).parents[2] / "docs/uneven.md"
SKIPS, LEFT = "*skips*", "*left*"

Row = dict[str, str]


def rows() -> list[Row]:
    """The rows of all tables, each by the headings of its columns."""
    found, headings = [], []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            headings = []
        elif not headings:
            headings = cells
        elif set(line) - set("|-"):
            found.append(dict(zip(headings, cells, strict=True)))
    return found


def settings(row: Row) -> dict[str, dict[str, Any]]:
    """The columns of a row that hold a number, and how to train for it."""
    inside = "join" in row["setting"]
    if "running mean" in row:
        return {"running mean": {"whole": True if LEFT in row.values() else None}}
    if "`True`" not in row:
        whole = True if inside else None
        return {name: {"weighed": name == "with `weigh`", "whole": whole} for name in list(row)[3:]}
    return {
        "`True`": {"weighed": False, "whole": True},
        "`False`": {"weighed": False, "whole": False},
        "with `weigh`": {"weighed": True, "whole": True},
    }


def micro_batches(cell: str) -> list[list[float] | str]:
    """Read a rank's cell: the inputs of its micro-batches, or that it skips one, or has left before."""
    parts = cell.removeprefix(LEFT).strip().split(" then ")
    return [part if part == SKIPS else [float(number) for number in re.findall(r"\d+", part)] for part in parts if part]


def tensor(inputs: list[float]) -> Tensor:
    return torch.tensor(inputs).view(-1, 1)


def gradient(cell: str, weighed: bool, whole: bool | None, divisor: int) -> float | None:
    """Train for one step as a cell says and return the gradient, on this rank."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    micros, seen = micro_batches(cell), None
    with contextlib.nullcontext() if whole is None else ddp.join(divide_by_initial_world_size=whole):
        for number, inputs in enumerate(micros, 1):
            stays = number < len(micros) or cell.startswith(LEFT)
            with ddp.no_sync() if stays else contextlib.nullcontext():
                if inputs == SKIPS:
                    ddp.skip()
                else:
                    outputs = ddp(tensor(inputs))
                    loss = outputs.mean() if weighed else outputs.sum() / max(len(inputs), 1) / divisor
                    (ddp.weigh(loss, len(inputs)) if weighed else loss).backward()
        if not cell.startswith(LEFT):
            seen = ddp.module.weight.grad
    got = ddp.module.weight.grad
    if seen is not None and not torch.equal(seen, got):
        raise AssertionError(f"{seen} in the block, {got} after it")
    return None if got is None else got.item()


def running_mean(setting: str, cell: str, whole: bool | None) -> float:
    norm = SyncBatchNorm(1) if setting.startswith("SyncBatchNorm") else nn.BatchNorm1d(1)
    ddp = DistributedDataParallel(norm)
    if '`"mean"`' in setting:
        ddp.buffer_policy("running_*", "mean")
    with contextlib.nullcontext() if whole is None else ddp.join():
        for inputs in micro_batches(cell):
            ddp(tensor(inputs)).sum().backward()
    if whole is not None:
        return norm.running_mean.item()
    begins_with: list[float] = []
    norm.register_forward_pre_hook(lambda *_: begins_with.append(norm.running_mean.item()))
    ddp(tensor([0.0, 1.0]))
    return begins_with[0]


def program(rank: int, table: list[Row]) -> list[dict[str, float | None]]:
    """What this rank gets for each number of the table."""
    results = []
    for row in table:
        cell, setting = row[f"rank {rank}"], row["setting"]
        divisor = 2 if "divided by 2" in setting else 1
        got: dict[str, float | None] = {}
        for name, how in settings(row).items():
            if name == "running mean":
                got[name] = running_mean(setting, cell, **how)
            elif row[name] != "*do not divide*":
                got[name] = gradient(cell, divisor=divisor, **how)
        results.append(got)
    return results


def number(cell: str) -> float | None:
    return None if cell == "none" else float(Fraction(cell))


def test_every_number_of_the_page() -> None:
    table = rows()
    assert len(table) == 7 + 3 + 4 + 5
    for row, *of_ranks in zip(table, *run(2, program, table, over="processes", timeout=60), strict=True):
        for got in of_ranks:
            expected = {name: number(row[name]) for name in got}
            assert got == pytest.approx(expected), row["setting"]


def test_the_page_is_two_pages_long() -> None:
    words = PAGE.read_text().split()
    assert 600 < len(words) < 1500


def test_the_reader_reads_what_is_there() -> None:
    assert micro_batches("`1` then `3, 3`") == [[1.0], [3.0, 3.0]]
    assert micro_batches("*none*") == [[]]
    assert micro_batches("*left*") == []
    assert micro_batches("*left* `2`") == [[2.0]]
    assert micro_batches("`2` then *skips*") == [[2.0], SKIPS]
    assert number("13/3") == pytest.approx(13 / 3) and number("none") is None
