"""The examples of whole runs: stopped in the middle of an epoch, resumed, evaluated exactly, tracked."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

import phalanx
from tests.commands import run_command
from tests.procs.launching import ENV

EXAMPLES = Path(__file__).parents[2] / "examples"
IMAGES = ["image_classification.py", "--epochs", "3", "--log-every", "1", "--save-every", "10"]
GPT = ["char_gpt.py", "--evaluate-every", "10", "--save-every", "10", "--files", "12", "--layers", "1",
       "--width", "32", "--context", "32"]  # fmt: skip


def command(script: str, *arguments: str, ranks: int = 2, resume: bool = False) -> list[str]:
    options = ["--resume", "auto"] if resume else []
    start = [sys.executable, "-m", "phalanx", "run", "-n", str(ranks), *options]
    return [*start, str(EXAMPLES / script), *arguments]


def finished(line: list[str], folder: Path) -> str:
    """Run a command to its end and return what it wrote."""
    return run_command(line, folder, env={"PYTHONPATH": ENV["PYTHONPATH"]})


def stopped(line: list[str], folder: Path, metrics: str, steps: int) -> int:
    """Run a command, end it with SIGTERM after so many steps and return the step that it got to."""
    process = subprocess.Popen(line, cwd=folder, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 60
        while not (folder / metrics).exists() or len(rows(folder / metrics)) < steps:
            assert process.poll() is None and time.monotonic() < until, "it has not got so far"
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert json.loads((folder / metrics).with_name("run.json").read_text())["status"] == "killed"
    return int(rows(folder / metrics)[-1]["step"])


def rows(metrics: Path) -> list[dict[str, str]]:
    with metrics.open(newline="") as file:
        return list(csv.DictReader(file))


def steps_of(metrics: Path, key: str) -> list[int]:
    return [int(row["step"]) for row in rows(metrics) if row.get(key)]


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a module."""
    for name, value in (("KMP_DUPLICATE_LIB_OK", "True"), ("KMP_INIT_AT_FORK", "FALSE")):
        monkeypatch.setenv(name, value)  # as scikit-learn does when it is imported, for good
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / request.param)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.parametrize("example", [IMAGES[0]], indirect=True)
def test_image_classification_is_stopped_and_goes_on(example: ModuleType, tmp_path: Path) -> None:
    metrics = tmp_path / "runs/images/metrics.csv"
    at = stopped(command(*IMAGES), tmp_path, "runs/images/metrics.csv", 3)
    assert 3 <= at < 69
    written = finished(command(*IMAGES, resume=True), tmp_path)
    assert steps_of(metrics, "loss") == list(range(1, 70))
    assert steps_of(metrics, "accuracy") == [23, 46, 69]
    assert json.loads(metrics.with_name("run.json").read_text())["status"] == "finished"
    assert check_images(example, tmp_path, written, "epoch 3: step 69") > 80


@pytest.mark.parametrize("example", [IMAGES[0]], indirect=True)
def test_image_classification_is_evaluated_exactly(example: ModuleType, tmp_path: Path) -> None:
    written = finished(command(IMAGES[0], "--epochs", "1"), tmp_path)
    check_images(example, tmp_path, written, "epoch 1: step 23")


def check_images(example: ModuleType, folder: Path, written: str, said: str) -> float:
    """One process finds the same accuracy for the last checkpoint; return it."""
    (accuracy,) = re.findall(rf"{said}, accuracy ([\d.]+)% over 361 images", written)
    model = example.network()
    step = int(said.rpartition(" ")[2])
    phalanx.checkpoint.load(folder / "runs/images/checkpoints", model=model, step=step, random=False)
    assert float(accuracy) == pytest.approx(100 * accuracy_of(model, example.Digits(True, False)), abs=0.006)
    return float(accuracy)


def accuracy_of(model: torch.nn.Module, data: object) -> float:
    """Return the accuracy of one process over the whole set."""
    model.eval()
    with torch.no_grad():
        return (model(data.images).argmax(1) == data.labels).float().mean().item()


@pytest.mark.parametrize("example", [GPT[0]], indirect=True)
def test_char_gpt_learns_and_is_evaluated_exactly(example: ModuleType, tmp_path: Path) -> None:
    written = finished(command(*GPT, "--steps", "20"), tmp_path)
    check_gpt(example, tmp_path, written, 20)


@pytest.mark.full
@pytest.mark.parametrize("example", [GPT[0]], indirect=True)
def test_char_gpt_is_stopped_and_goes_on(example: ModuleType, tmp_path: Path) -> None:
    at = stopped(command(*GPT, "--steps", "100000"), tmp_path, "runs/gpt/metrics.csv", 5)
    last = (at // 10 + 2) * 10
    written = finished(command(*GPT, "--steps", str(last), resume=True), tmp_path)
    check_gpt(example, tmp_path, written, last)


def check_gpt(example: ModuleType, folder: Path, written: str, last: int) -> None:
    """Every step is there once, and one process finds the same held-out loss."""
    metrics = folder / "runs/gpt/metrics.csv"
    assert steps_of(metrics, "loss") == list(range(1, last + 1))
    assert steps_of(metrics, "held-out loss") == list(range(10, last + 1, 10))
    ((loss, count),) = re.findall(rf"step {last}: ([\d.]+) bits per character over (\d+)", written)
    text = b"".join(sorted_texts(12))
    data = example.Windows(text[-(len(text) // 10) :], 32)
    model = example.GPT(32, 1, 32)
    phalanx.checkpoint.load(folder / "runs/gpt/checkpoints", model=model, step=last, random=False)
    inputs, targets = (torch.stack(parts) for parts in zip(*(data[i] for i in range(len(data))), strict=True))
    with torch.no_grad():
        assert float(loss) == pytest.approx(example.bits(model, inputs, targets).item(), abs=2e-4)
    assert int(count) == targets.numel()
    assert float(loss) < 6  # of 7 bits for a guess


def sorted_texts(count: int) -> list[bytes]:
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[:count]
    return [file.read_text(errors="replace").encode("ascii", "replace") for file in files]


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "folder"), [(IMAGES, "images"), ([*GPT, "--steps", "60"], "gpt")], ids=["images", "gpt"]
)
def test_a_resumed_run_ends_with_the_same_bits(line: list[str], folder: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    finished(command(*line), tmp_path / "whole")
    at = stopped(command(*line), tmp_path, f"runs/{folder}/metrics.csv", 5)
    assert at < 60
    finished(command(*line, resume=True), tmp_path)
    ends = [phalanx.checkpoint.latest(place / f"runs/{folder}/checkpoints") for place in (tmp_path, tmp_path / "whole")]
    assert weights(ends[0]) == weights(ends[1])


@pytest.mark.full
def test_on_another_number_of_ranks_the_steps_are_as_many(tmp_path: Path) -> None:
    at = stopped(command(*IMAGES), tmp_path, "runs/images/metrics.csv", 3)
    assert at < 69
    finished(command(*IMAGES, ranks=1, resume=True), tmp_path)
    assert steps_of(tmp_path / "runs/images/metrics.csv", "loss") == list(range(1, 70))


def weights(checkpoint: Path) -> bytes:
    return (checkpoint / "model.safetensors").read_bytes()


@pytest.mark.parametrize("example", [GPT[0]], indirect=True)
def test_each_window_of_the_text_follows_the_last(example: ModuleType) -> None:
    data = example.Windows(bytes(range(65, 75)), 3)
    assert [part.tolist() for i in range(len(data)) for part in data[i]] == [
        [65, 66, 67], [66, 67, 68], [68, 69, 70], [69, 70, 71], [71, 72, 73], [72, 73, 74],
    ]  # fmt: skip
