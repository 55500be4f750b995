"""`phalanx bench` runs end to end and what it says hangs together. Nothing here depends on speed."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from phalanx.errors import InternalError
from phalanx.observe import bench, bench_allreduce
from phalanx.observe.bench_allreduce import Contender
from phalanx.observe.bench_figures import differences, order_of_round, ratio, spread
from phalanx.observe.bench_models import WORKLOADS, count_parameters
from phalanx.observe.bench_ranks import Ranks
from phalanx.observe.bench_steps import TOLERANCE, Trainer
from phalanx.observe.bench_variants import VARIANTS

ROOT = Path(bench.__file__).parents[2]
PARAMETERS = {"digits": 29_610, "deep": 316_800, "resnet": 5_138_250, "gpt": 6_868_992}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The JSON of one quick run of everything on two ranks with the smallest model."""
    file = tmp_path_factory.mktemp("bench") / "results.json"
    code = bench.main(["--quick", "--models", "digits", "--json", str(file)])
    assert code == 0
    return json.loads(file.read_text())


def _is_spread(figure: dict) -> bool:
    return set(figure) == {"median", "q1", "q3"} and figure["q1"] <= figure["median"] <= figure["q3"]


def test_header_names_versions_and_machine(results: dict) -> None:
    header = results["header"]
    assert header["torch"] == torch.__version__
    assert header["ranks"] == 2 and header["threads_per_rank"] == 1 and header["quick"] is True
    assert header["cores"] == len(os.sched_getaffinity(0))
    assert list(header["variants"]) == ["local", "torch", "phalanx"]


def test_variants_that_synchronise_agree_with_the_mean_over_ranks(results: dict) -> None:
    (entry,) = results["steps"]
    away = entry["difference_from_reference"]
    assert set(away) == {"local", "torch", "phalanx"}
    assert away["torch"] <= TOLERANCE and away["phalanx"] <= TOLERANCE
    # The ranks' batches differ, so whoever does not synchronise is far away: the check can fail.
    assert away["local"] > 100 * TOLERANCE


def test_step_times_hang_together(results: dict) -> None:
    (entry,) = results["steps"]
    assert entry["model"] == "digits" and entry["parameters"] == PARAMETERS["digits"]
    steps, syncs = entry["step_seconds"], entry["sync_seconds"]
    assert set(steps) == {"local", "torch", "phalanx"} and set(syncs) == {"torch", "phalanx"}
    assert all(_is_spread(figure) and figure["q1"] > 0 for figure in steps.values())
    assert all(_is_spread(figure) for figure in syncs.values())
    found = entry["step_ratio"]["phalanx"]["median"]
    assert found == pytest.approx(steps["phalanx"]["median"] / steps["torch"]["median"])


@pytest.mark.parametrize("kind", ["allreduce", "buckets"])
def test_each_size_is_measured_on_both_groups(results: dict, kind: str) -> None:
    assert [entry["bytes"] for entry in results[kind]] == list(bench_allreduce.SIZES)
    for entry in results[kind]:
        seconds = entry["seconds"]
        assert set(seconds) == {"gloo", "phalanx"} and set(entry["speedup"]) == {"phalanx"}
        assert all(_is_spread(figure) and figure["q1"] > 0 for figure in seconds.values())
        found = entry["speedup"]["phalanx"]["median"]
        assert found == pytest.approx(seconds["gloo"]["median"] / seconds["phalanx"]["median"])


def test_memory_holds_at_least_parameters_and_gradients(results: dict) -> None:
    (entry,) = results["memory"]
    assert entry["parameter_bytes"] == 4 * PARAMETERS["digits"]
    for held in entry["variants"].values():
        # Two ranks, each with parameters and gradients; half of it, as free pages may be used again.
        assert held["host_bytes"] >= 2 * entry["parameter_bytes"]
        assert held["host_bytes"] >= held["private_bytes_per_rank"] + held["shared_bytes_per_host"]
    baseline = entry["variants"]["torch-view"]["host_bytes"]
    assert entry["allowed_host_bytes"] == baseline + entry["parameter_bytes"]


def test_a_variant_that_does_not_synchronise_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    wrong = replace(VARIANTS["local"], name="torch-view", synchronises=True)
    monkeypatch.setitem(VARIANTS, "torch-view", wrong)
    code = bench.main(["--torch-only", "--quick", "--what", "steps", "--models", "digits"])
    out, err = capfd.readouterr()
    assert code == 1
    assert "torch-view on digits" in err and "its speed means nothing" in err
    assert "Training step" not in out


def test_steps_that_clip_their_gradients(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    file = tmp_path / "figures.json"
    arguments = ["--quick", "--clip", "--what", "steps", "--models", "deep", "--variants", "phalanx,phalanx-clip"]
    assert bench.main([*arguments, "--json", str(file)]) == 0
    assert "gradients are clipped in each step" in capfd.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["header"]["clip"] is True
    assert figures["steps"][0]["difference_from_reference"]["phalanx-clip"] < 1e-5


@pytest.mark.parametrize("clip", [True, False])
def test_a_step_clips_gradients_where_that_is_measured(clip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MAX_NORM", 0.01)
    (workload,) = bench.Plan(models=("digits",), clip=clip).workloads()
    ranks: Any = SimpleNamespace(rank=0, size=1, group=lambda backend: None)
    trainer = Trainer(workload, VARIANTS["local"], ranks)
    trainer.step()
    norm = torch.nn.utils.get_total_norm([p.grad for p in trainer.plain.parameters()])
    assert (norm < 0.0101) == clip


@pytest.mark.parametrize(
    ("mean", "reduce"),
    [
        (False, lambda tensor: None),
        (False, lambda tensor: tensor.mul_(2)),
        (True, lambda tensor: tensor.mul_(2).sub_(1)),  # the sum instead of the mean
    ],
)
def test_a_wrong_reduction_is_refused(
    monkeypatch: pytest.MonkeyPatch, mean: bool, reduce: Callable[[torch.Tensor], object]
) -> None:
    ranks = Ranks(rank=1, size=2)
    monkeypatch.setattr(Ranks, "slowest", lambda self, values: values)
    tensor = torch.empty(8)
    with pytest.raises(InternalError, match="hasty: reducing 8 floats is wrong in [78] elements"):
        bench_allreduce._check(ranks, Contender("hasty", tensor, lambda: reduce(tensor), mean))


@pytest.mark.parametrize("mean", [False, True])
def test_a_right_reduction_is_accepted(monkeypatch: pytest.MonkeyPatch, mean: bool) -> None:
    monkeypatch.setattr(Ranks, "slowest", lambda self, values: values)
    tensor = torch.empty(2500)

    def reduce() -> None:  # rank 1 holds x + 1, so rank 0 holds x
        tensor.mul_(2).sub_(1).div_(2 if mean else 1)

    bench_allreduce._check(Ranks(rank=1, size=2), Contender("right", tensor, reduce, mean))


@pytest.mark.parametrize("terminal", [True, False], ids=["whole terminal", "parent only"])
def test_ctrl_c_ends_every_rank(tmp_path: Path, terminal: bool) -> None:
    program = "import sys; from phalanx.observe.bench import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "--torch-only", "--what", "steps", "--models", "gpt"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    children: list[psutil.Process] = []
    try:
        assert process.stderr is not None and "step time: gpt" in process.stderr.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        (os.killpg if terminal else os.kill)(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
        _, alive = psutil.wait_procs(children, timeout=5)
    finally:
        for each in (process, *children):
            if each.pid and psutil.pid_exists(each.pid):
                each.kill()
    assert process.returncode == bench.INTERRUPTED and alive == []
    assert "interrupted" in err and "Traceback" not in err and out == ""
    assert list(tmp_path.glob("phalanx-*")) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "0"], "'0' is not a number of ranks"),
        (["--models", "digits,vgg"], "choose from digits, deep, resnet, gpt"),
        (["--what", ""], "choose from steps, allreduce, buckets, memory"),
        (["--variants", "ddp"], "choose from local, torch, torch-view, phalanx"),
        (["--json", "/nowhere/at/all.json"], "there is no directory /nowhere/at"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", WORKLOADS)
def test_models_have_the_sizes_they_claim_and_follow_from_the_seed(name: str) -> None:
    workload = WORKLOADS[name]
    state = torch.get_rng_state()
    first, again, other = workload.build(1), workload.build(1), workload.build(2)
    assert torch.equal(torch.get_rng_state(), state)
    assert count_parameters(first) == PARAMETERS[name]
    weights = [next(iter(model.parameters())) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    batches = [workload.batch(seed) for seed in (3, 3, 4)]
    assert torch.equal(batches[0][0], batches[1][0])
    assert not torch.equal(batches[0][0], batches[2][0])


def test_gpt_does_not_look_ahead() -> None:
    model = WORKLOADS["gpt"].build(0).eval()
    tokens = WORKLOADS["gpt"].batch(0)[0][:1]
    changed = tokens.clone()
    changed[0, 64] = (changed[0, 64] + 1) % 4096
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.allclose(before[0, :64], after[0, :64], atol=1e-5)
    assert not torch.allclose(before[0, 64:], after[0, 64:], atol=1e-5)


def test_spread_is_median_and_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0}
    assert spread([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0}


def test_ratio_is_of_the_medians_and_survives_noise() -> None:
    theirs = [2.0, 2.1, 1.9, 40.0, 2.0]
    exact = ratio([t / 4 for t in theirs], theirs)
    assert exact == pytest.approx({"median": 0.25, "q1": 0.25, "q3": 0.25})
    assert ratio([1.0, 1.0, 1.0], [-1.0, -1.0, 5.0]) is None
    noisy = ratio([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0])
    assert noisy is not None and noisy["median"] == 1.0 and noisy["q1"] < 1.0 < noisy["q3"]
    assert math.isfinite(noisy["q3"])
    with pytest.raises(ValueError):
        differences([1.0], [1.0, 2.0])


def test_every_variant_has_every_place_and_neighbour_equally_often() -> None:
    count = 3
    orders = [order_of_round(number, count) for number in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    for place in range(count):
        assert sorted(order[place] for order in orders) == [0, 0, 1, 1, 2, 2]
    neighbours = Counter(pair for order in orders for pair in pairwise(order))
    assert len(neighbours) == count * (count - 1) and set(neighbours.values()) == {2}


def _figure(value: float) -> dict:
    return {"median": value, "q1": value, "q3": value}


def _bars(file: Path, sync: float, speedup: float, held: int, ranks: int = 2) -> tuple[int, str]:
    """Judge a run in which Phalanx has these figures; return exit code and output."""
    step = {
        "model": "digits",
        "step_seconds": {"phalanx": _figure(1.0)},
        "step_ratio": {"phalanx": _figure(0.9)},
        "sync_ratio": {"phalanx": _figure(sync)},
    }
    memory = {"model": "gpt", "allowed_host_bytes": 100, "variants": {"phalanx": {"host_bytes": held}}}
    results = {
        "header": {"ranks": ranks},
        "steps": [step],
        "allreduce": [{"bytes": 1024, "speedup": {"phalanx": _figure(speedup)}}],
        "buckets": [{"bytes": 1024, "speedup": {"phalanx": _figure(speedup - 2)}}],
        "memory": [memory],
    }
    file.write_text(json.dumps(results))
    command = [sys.executable, str(ROOT / "benchmarks" / "bars.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_bars_tell_kept_from_broken(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    code, text = _bars(file, sync=0.2, speedup=8.0, held=100)
    assert code == 0 and text.count("kept") == 5 and "BROKEN" not in text
    code, text = _bars(file, sync=0.21, speedup=7.9, held=101)
    assert code == 1 and text.count("BROKEN") == 4
    code, text = _bars(file, sync=0.49, speedup=1.0, held=100, ranks=4)
    assert code == 0 and "4 ranks, digits" in text and "all-reduce" not in text
