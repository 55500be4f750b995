"""Hugging Face Accelerate's own test scripts, as they ship with it, under the drop-in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.ecosystem.launching import DROP_IN, SCRIPTS, launch

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(600)]

OURS = "phalanx: drop-in"


@pytest.mark.parametrize(
    ("module", "needs", "says"),
    [
        ("test_sync", [], "gradient accumulation with optimizer and scheduler"),
        ("test_ops", [], "testing sending tensors across devices"),
        ("test_script", [], "Breakpoint trigger test"),
        ("external_deps.test_metrics", ["datasets", "evaluate", "transformers"], "`drop_last` is taken into account"),
    ],
)
def test_its_scripts(module: str, needs: list[str], says: str, tmp_path: Path) -> None:
    for name in needs:
        pytest.importorskip(name)
    assert says in launch(DROP_IN, ["-m", f"accelerate.test_utils.scripts.{module}"], tmp_path)


def test_uneven_inputs(tmp_path: Path) -> None:
    script = str(SCRIPTS / "accelerate_uneven.py")  # looks for warnings
    assert launch(DROP_IN, [script], tmp_path, env={"PYTHONWARNINGS": "default"}).count("all joined") == 2


def test_under_its_own_launchers(tmp_path: Path) -> None:
    """`debug_launcher` forks its ranks; their groups meet over a file."""
    code = (
        "from accelerate import debug_launcher\n"
        "from accelerate.test_utils.scripts import test_sync\n"
        "debug_launcher(test_sync.main)\n"
        "print('forked well')\n"
    )
    written = run_command(
        [sys.executable, "-c", code], tmp_path, env={"PHALANX_DROPIN": "1", "PYTHONWARNINGS": "ignore"}, timeout=300
    )
    assert "forked well" in written
