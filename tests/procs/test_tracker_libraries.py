"""Weights & Biases without its server and MLflow with a database of its own, where they are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import run_command

RUN = """
import sys
import phalanx

kind, options = sys.argv[1], eval(sys.argv[2])
for life in range(2):
    tracker = phalanx.tracker(kind, dir="run", config={"lr": 0.1}, options={kind: options})
    for step in (3, 1, 2):
        tracker.log({"loss": 10 * life + step}, step)
    tracker.log({"accuracy": 0.5}, 2)
    tracker.finish("failed" if life else "finished")
"""

READ_MLFLOW = """
import mlflow
client = mlflow.MlflowClient(tracking_uri="sqlite:///run/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
history = client.get_metric_history(run.info.run_id, "loss")
print(run.info.status, run.data.params, sorted((m.step, m.value) for m in history), run.data.metrics["accuracy"])
"""


def run_with(kind: str, options: dict, folder: Path) -> None:
    (folder / "train.py").write_text(RUN)
    command = [sys.executable, "train.py", kind, repr(options)]
    run_command(command, folder, env={"PYTHONPATH": str(Path(__file__).parents[2])})


@pytest.mark.full  # making MLflow's database takes seconds
def test_mlflow_has_one_run_with_both_lives(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    run_with("mlflow", {"experiment": "digits"}, tmp_path)
    read = run_command([sys.executable, "-c", READ_MLFLOW], tmp_path)
    values = [(step, 10.0 * life + step) for step in (1, 2, 3) for life in (0, 1)]
    assert read.splitlines()[-1] == f"FAILED {{'lr': '0.1'}} {values} 0.5"


def test_weights_and_biases_has_one_run_with_both_lives(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_with("wandb", {"mode": "offline", "project": "digits"}, tmp_path)
    identity = (tmp_path / "run/wandb.id").read_text().strip()
    written = list((tmp_path / "run").rglob("*.wandb"))
    assert {path.name for path in written} == {f"run-{identity}.wandb"}
    for path in written:
        content = path.read_bytes()
        assert b"loss" in content and b"accuracy" in content and b"digits" in content
