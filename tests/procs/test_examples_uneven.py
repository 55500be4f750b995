"""The examples of uneven work, as one would start them; each checks its own results and says them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON = [sys.executable]
PHALANX = [sys.executable, "-m", "phalanx", "run", "-n"]

SAYS = {
    "uneven_join.py": "as one process computes it",
    "accumulation.py": "equal to one process on the whole batch",
    "mixed_precision.py": "step 5 left out by every rank",
}
RANKS = {1: PYTHON, 2: [*PHALANX, "2"]}


def ended(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize("name", SAYS)
def test_it_runs_and_says_what_it_has_checked(name: str, ranks: int, tmp_path: Path) -> None:
    run = ended([*RANKS[ranks], str(EXAMPLES / name)], tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert SAYS[name] in run.stdout
    assert run.stdout.count(SAYS[name]) == (1 if name == "mixed_precision.py" else 2)  # rank 0 alone speaks


@pytest.mark.full
def test_the_figures_of_the_classic_program(tmp_path: Path) -> None:
    """5 batches of 1 against 10 of 2: five common steps of 1.5, then five of 1 or of 2."""
    written = ended([*RANKS[2], str(EXAMPLES / "uneven_join.py")], tmp_path).stdout
    assert "batches per rank: [5, 10]" in written
    assert "the initial world size: weight -1.2500" in written
    assert "the ranks still running: weight -1.7500" in written


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "right", "wrong", "complaint"),
    [
        ("uneven_join.py", "with ddp.join(divide_by_initial_world_size=whole):", "with ddp.join():", "expected"),
        ("accumulation.py", "ddp.weigh(mse_loss(ddp(inputs), targets), len(inputs))", "mse_loss(ddp(inputs), targets)",
         "parameters differ"),
        ("mixed_precision.py", "targets = targets * math.inf", "pass", "left out []"),
    ],
)  # fmt: skip
def test_it_notices_what_is_wrong(name: str, right: str, wrong: str, complaint: str, tmp_path: Path) -> None:
    source = (EXAMPLES / name).read_text()
    assert right in source
    (tmp_path / name).write_text(source.replace(right, wrong))
    run = ended([*RANKS[2], name], tmp_path)
    assert run.returncode != 0 and complaint in run.stdout + run.stderr
