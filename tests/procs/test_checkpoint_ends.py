"""The ends of a run that saves: SIGTERM and `--resume auto`, a disk that is full, a last save that is lost."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.data import DataLoader, Dataset, random_split

import phalanx
from phalanx.checkpoint import CheckpointError
from phalanx.testing import run
from tests.procs.launching import ENV, Launch, launch, lines_of  # noqa: F401 (a fixture)

TRAINS = """
import torch, phalanx
phalanx.init()
phalanx.seed(1)
model = phalanx.DistributedDataParallel(torch.nn.Linear(2, 1))
loaded = phalanx.checkpoint.resume("saves", model=model)
step = first = loaded.step if loaded else 0
print("from", step, flush=True)
with phalanx.checkpoint.preemption() as stop:
    while step < (first + 3 if loaded else 10**6):
        model(torch.randn(2, 2)).sum().backward()  # without an optimizer, whose import takes seconds
        step += 1
        if step == 5:
            open(f"up-{rank}", "w").close()
        if stop:
            phalanx.checkpoint.save("saves", step=step, model=model)
            assert stop, "and it stays so"
            break
print("to", step, flush=True)
"""


def test_sigterm_is_answered_by_all_ranks_alike_and_resume_goes_on(launch: Launch) -> None:  # noqa: F811
    process = launch.start(TRAINS, "-n", "2")
    launch.wait_for("up-*", 2, 60)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, err
    ends = [lines_of(out, rank) for rank in (0, 1)]
    assert ends[0] == ends[1] and ends[0][0] == "from 0"
    step = int(ends[0][1].split()[1])
    assert phalanx.checkpoint.latest(launch.folder / "saves").name == f"step-{step:09d}"
    again = launch.start(TRAINS, "-n", "1", "--resume", "auto")
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert out.splitlines() == [f"from {step}", f"to {step + 3}"]
    assert "has random states of 2 ranks, and this run has 1: new ones are derived from the recorded" in err


LOSES_ITS_LAST = """
import os, phalanx
real = os.fsync
def full(descriptor):
    raise OSError(28, "No space left on device")
os.fsync = full
phalanx.checkpoint.save("saves", step=8, extra=1, asynchronous=True)
print("the script has ended")
"""


def test_a_last_save_that_is_lost_is_told_by_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOSES_ITS_LAST)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "the script has ended" in done.stdout
    assert "CheckpointError: the checkpoint of step 8 could not be written to saves: No space left" in done.stderr


@pytest.mark.parametrize(("late", "folder"), [(0, "script.py/saves"), (0, "saves"), (1, "saves")])
def test_the_page_names_the_rank_that_could_not_write(launch: Launch, late: int, folder: str) -> None:  # noqa: F811
    """Whichever rank ends first, and whether rank 0 fails before the ranks exchange what they have, or after."""
    code = f"""
    import phalanx
    phalanx.init()
    def full(descriptor):
        raise OSError(28, "No space left on device")
    os.fsync = full
    try:
        phalanx.checkpoint.save("{folder}", step=1, extra=1)
    finally:
        time.sleep(0.4 * (rank == {late}))
    """
    done = launch.run(code, "-n", "2")
    page = done.stderr[done.stderr.index("phalanx: rank ") :]
    assert page.startswith("phalanx: rank 0 failed first: phalanx.checkpoint.failure.CheckpointError: [rank 0] the che")
    assert "CheckpointError: [rank 1] (rank 0) the checkpoint of step 1 could not be written" in page
    assert "Traceback of rank 0:" in page and ("OSError: [Errno 28]" in page or "NotADirectoryError" in page)


def test_a_file_that_must_not_grow_is_an_error_on_both_ranks(tmp_path: Path) -> None:
    def program(rank: int) -> str:
        model = nn.Linear(100, 100)
        phalanx.checkpoint.save(tmp_path, step=1, model=model)
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        with pytest.raises(CheckpointError, match=r"step 2 .* too large .EFBIG.; the one before, .*000001"):
            phalanx.checkpoint.save(tmp_path, step=2, model=model)
        with pytest.raises(CheckpointError, match=r"\[rank . step 3 could not|of step 3 could not be written"):
            phalanx.checkpoint.save("/proc/nowhere", step=3, model=model)
        return phalanx.checkpoint.load(tmp_path, model=model).path.name

    assert run(2, program, over="processes", timeout=60) == ["step-000000001"] * 2
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-000000001"]


def test_the_example_of_the_page_runs_and_resumes(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]

    def program(rank: int, epochs: str) -> tuple[int, int]:
        os.chdir(tmp_path)
        names: dict[str, Any] = {}
        exec(compile(code.replace("epoch, 2)", f"epoch, {epochs})"), "checkpoints.md", "exec"), names)
        return names["loaded"] and names["loaded"].step, names["step"]

    assert run(2, program, "1", over="processes", timeout=60) == [(None, 8)] * 2
    assert run(2, program, "2", over="processes", timeout=60, env={"PHALANX_RESUME": "auto"}) == [(8, 16)] * 2
    assert phalanx.checkpoint.latest(tmp_path / "runs" / "a").name == "step-000000016"


# -- phalanx.seed ------------------------------------------------------------------------------------------


class Noisy(Dataset):
    """Items that are drawn anew each time, from the three libraries."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> list[float]:
        return drawn()


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), torch.rand(1).item()]


def seeded_run(rank: int, wrap: str) -> dict[str, Any]:
    """What a script draws before and after it wraps its model."""
    phalanx.seed(2**40 + 7)
    model = nn.Linear(3, 3)
    halves = [list(half.indices) for half in random_split(range(10), [5, 5])]
    before = {"weights": model.weight.tolist(), "halves": halves, "drawn": drawn()}
    model = phalanx.DistributedDataParallel(model) if wrap == "phalanx" else TorchDDP(model)
    nn.Sequential(model)  # registers a wrapper in a module: nothing begins anew
    # Ranks of a test are started by a server, and would start their workers so: each would import torch anew.
    loader = DataLoader(Noisy(), num_workers=1, collate_fn=list, multiprocessing_context="fork")
    after = {
        "drawn": drawn(),
        "dropout": nn.functional.dropout(torch.ones(40)).tolist(),
        "workers": [item for batch in loader for item in batch],
        "again": drawn(),
    }
    phalanx.seed(5)  # wrapped already: alike up to the next forward
    before["second"] = drawn()
    nn.Linear(3, 3)(torch.ones(3))
    before["of another model"] = drawn()
    model(torch.ones(3))
    after["second"] = drawn()
    model(torch.ones(3))
    after["going on"] = drawn()
    phalanx.seed(5, per_rank=False)
    model(torch.ones(3))
    before["without streams"] = drawn()
    return {"before": before, "after": after}


def test_alike_up_to_the_wrap_and_each_with_its_own_stream_afterwards() -> None:
    first = run(2, seeded_run, "phalanx", over="processes", timeout=60)
    assert first[0]["before"] == first[1]["before"]
    for name, values in first[0]["after"].items():
        assert values != first[1]["after"][name], name
    assert run(2, seeded_run, "torch", over="processes", timeout=60) == first, "repeatable, with torch's class too"
    torch.manual_seed(2**40 + 7)
    assert nn.Linear(3, 3).weight.tolist() == first[0]["before"]["weights"], "the weights of a plain manual_seed"


@pytest.mark.full
def test_on_another_number_of_ranks_streams_are_derived_from_the_recorded_seed(tmp_path: Path) -> None:
    def saves(rank: int) -> list[float]:
        phalanx.seed(7)
        model = phalanx.DistributedDataParallel(nn.Linear(1, 1))
        phalanx.checkpoint.save(tmp_path, step=3, model=model)
        return drawn()

    def loads(rank: int) -> tuple[Any, list[float]]:
        phalanx.seed(8)
        model = nn.Linear(1, 1)
        loaded = phalanx.checkpoint.load(tmp_path, model=model)
        phalanx.DistributedDataParallel(model)  # after the load: its states stay
        return loaded.seed, drawn()

    first = run(2, saves, over="processes", timeout=60)
    same = run(2, loads, over="processes", timeout=60)
    assert same == [(7, first[0]), (7, first[1])]
    others = [run(1, loads, over="processes", timeout=60)[0] for _ in range(2)]
    assert others[0] == others[1] and others[0][0] == 7, "repeatable"
    assert others[0][1] not in first, "and another stream"
