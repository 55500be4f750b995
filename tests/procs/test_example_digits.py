"""The main job, on real data: one script, started in each of the ways that it promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import run_command

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_digits.py"
KEYS = {"accuracy", "samples_per_second", "sync_share", "world_size", "checkpoint"}

PYTHON = [sys.executable]
TORCHRUN = ["torchrun", "--nproc-per-node", "2"]
PHALANX = ["phalanx", "run", "-n", "2"]


def started(command: list[str], folder: Path, stdin: str | None = None) -> str:
    """Start the script or what imports it, and return what it wrote to standard output."""
    return run_command(command, folder, stdin, env={"PYTHONPATH": str(SCRIPT.parent)})


def summary_in(folder: Path, world_size: int) -> dict:
    """Read the figures of a run and check those that do not depend on luck."""
    summary = json.loads((folder / "runs/digits/summary.json").read_text())
    assert set(summary) == KEYS
    assert summary["world_size"] == world_size
    assert 0 <= summary["sync_share"] < 1 and summary["samples_per_second"] > 0
    assert summary["sync_share"] > 0.005 if world_size > 1 else summary["sync_share"] < 0.05
    weights = torch.load(folder / summary["checkpoint"], weights_only=True)
    assert weights and not any(name.startswith("module.") for name in weights)
    return summary


def test_two_ranks_reach_the_accuracy_and_say_so(tmp_path: Path) -> None:
    written = started([*PHALANX, str(SCRIPT)], tmp_path)
    summary = summary_in(tmp_path, 2)
    assert summary["accuracy"] >= 0.97
    assert "world 2 | hosts 1 | transport shared memory | threads per rank 1" in written
    accuracy = f"accuracy {summary['accuracy']:.2%}"
    assert f"{accuracy} over the whole test set (361 images, each counted once)" in written
    assert written.count("held-out accuracy") == 15  # from rank 0 only
    assert [path.name for path in (tmp_path / "runs/digits").glob("*.tmp")] == []


@pytest.mark.parametrize(
    ("launcher", "world_size"),
    [pytest.param(PYTHON, 1, marks=pytest.mark.full), (TORCHRUN, 2)],
    ids=["python", "torchrun"],
)
def test_other_launchers_run_the_same_script(launcher: list[str], world_size: int, tmp_path: Path) -> None:
    written = started([*launcher, str(SCRIPT), "--epochs", "3"], tmp_path)
    assert summary_in(tmp_path, world_size)["accuracy"] > 0.85
    assert "(361 images, each counted once)" in written
    assert written.count("held-out accuracy") == 3


SPAWN = """
import phalanx
from train_digits import main

if __name__ == "__main__":
    phalanx.spawn(main, args=(3,), nprocs=2)
"""

# As in a notebook: the functions are defined in __main__, which has no file.
NOTEBOOK = f"""
source = open({str(SCRIPT)!r}).read()
exec(source.partition('if __name__ == "__main__":')[0])
phalanx.spawn(main, args=(3,), nprocs=2)
"""


@pytest.mark.full
def test_spawn_runs_it_from_a_script(tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWN)
    started([sys.executable, "spawning.py"], tmp_path)
    assert summary_in(tmp_path, 2)["accuracy"] > 0.85


@pytest.mark.full
def test_spawn_runs_it_from_a_notebook_cell(tmp_path: Path) -> None:
    started([sys.executable, "-"], tmp_path, stdin=NOTEBOOK)
    assert summary_in(tmp_path, 2)["accuracy"] > 0.85
