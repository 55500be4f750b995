"""Trackers in a world: rank 0 writes the means of whatever the ranks have measured, and nobody waits in vain."""

from __future__ import annotations

import csv
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import phalanx
from phalanx.errors import MisuseError, PeerFailedError, RankMismatchError
from phalanx.testing import WorldError, run
from phalanx.train.trackers import tracker as tracker_module
from phalanx.train.trackers.writer import Ending, Run


class Recorder:
    """A writer that keeps what it is given. `made` has those of all ranks, which share it as threads do."""

    made: list[Recorder] = []

    def __init__(self, run: Run) -> None:
        self.run, self.lines, self.endings = run, [], []
        self.made.append(self)

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.lines.append((step, dict(values)))

    def close(self, ending: Ending) -> None:
        self.endings.append(ending.value)


@pytest.fixture(autouse=True)
def no_recorders() -> None:
    Recorder.made = []


def opened(tmp_path: Path, **arguments: Any) -> phalanx.tracker:
    return phalanx.tracker(Recorder, dir=tmp_path / "run", **arguments)


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_different_keys_on_different_ranks_are_averaged_over_those_that_gave_them(backend: str, tmp_path: Path) -> None:
    def program(rank: int) -> list[dict[str, float]]:
        with opened(tmp_path) as tracker:
            return [
                tracker.log({"loss": rank + 1.0, f"only {rank}": rank}, 1),
                tracker.log({} if rank else {"a": 1, "b": 2}, 2),
                tracker.log({}, 3),
                tracker.log({"loss": torch.tensor(rank + 1.0)}, 4, n=rank),
                tracker.log({"x": math.nan if rank == 1 else rank, "y": rank}, 5, n={"x": rank != 1}),
            ]

    got = run(3, program, backend=backend)
    assert (
        got[0]
        == got[1]
        == got[2]
        == [
            {"loss": 2.0, "only 0": 0.0, "only 1": 1.0, "only 2": 2.0},
            {"a": 1.0, "b": 2.0},
            {},
            {"loss": 8 / 3},
            {"x": 1.0, "y": 1.0},
        ]
    )
    (recorder,) = Recorder.made
    assert recorder.lines == list(enumerate(got[0], 1))
    assert recorder.endings == ["finished"]


def test_only_rank_zero_opens_anything_and_its_folder_counts(tmp_path: Path) -> None:
    def program(rank: int) -> Path:
        with phalanx.tracker("csv", Recorder, dir=tmp_path / str(rank), config={"lr": 0.1}) as tracker:
            return tracker.dir

    assert run(3, program) == [tmp_path / "0"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert [recorder.run for recorder in Recorder.made] == [Run(tmp_path / "0", {"lr": 0.1})]


def test_a_bad_value_on_one_rank_is_an_error_on_all_and_they_go_on_together(tmp_path: Path) -> None:
    def program(rank: int) -> str:
        with opened(tmp_path) as tracker:
            with pytest.raises(MisuseError) as wrong:
                tracker.log({"loss": torch.ones(2) if rank == 1 else 1.0}, 1)
            assert (wrong.value.rank, wrong.value.peer) == (rank, None if rank == 1 else 1)
            tracker.log({"loss": 1.0}, 2)
            return str(wrong.value)

    texts = run(2, program)
    for rank, text in enumerate(texts):
        assert text.startswith(f"[rank {rank}] tracker.log(...) on rank 1: loss is a Tensor of shape (2,)")
    assert Recorder.made[0].lines == [(2, {"loss": 1.0})]


def test_other_steps_or_another_call_are_a_mismatch_on_all(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with opened(tmp_path) as tracker:
            with pytest.raises(RankMismatchError, match=r"rank 1 in tracker\.log\(\.\.\., step=1\)"):
                tracker.log({"loss": 1.0}, rank)
            with pytest.raises(RankMismatchError):
                if rank == 0:
                    tracker.log({"loss": 1.0}, 2)
                else:
                    phalanx.mean(1.0)

    run(2, program)
    assert Recorder.made[0].lines == []


def test_without_averaging_it_is_rank_zeros_own_affair(tmp_path: Path) -> None:
    def program(rank: int) -> dict[str, float] | None:
        with opened(tmp_path) as tracker:
            only = phalanx.rank_zero_only(lambda: tracker.log({"loss": 5.0}, 1, average=False))()
            if rank == 1:
                assert tracker.log({"loss": 7.0}, 9, average=False) == {"loss": 7.0}
            with pytest.raises(MisuseError, match="only rank 0 runs"):
                phalanx.rank_zero_only(lambda: tracker.log({"loss": 5.0}, 1))() or no_collective(rank)
            return only

    assert run(2, program) == [{"loss": 5.0}, None]
    assert Recorder.made[0].lines == [(1, {"loss": 5.0})]


def no_collective(rank: int) -> None:
    if rank:
        raise MisuseError("which only rank 0 runs")


def test_a_rank_that_has_left_join_takes_no_part(tmp_path: Path) -> None:
    def program(rank: int) -> dict[str, float]:
        ddp = phalanx.DistributedDataParallel(torch.nn.Linear(1, 1))
        with opened(tmp_path) as tracker:
            got = {}
            with ddp.join():
                for _ in range(1 + rank):
                    ddp(torch.ones(1, 1)).sum().backward()
                    got = tracker.log({"rank": rank}, 1)
            return got

    assert run(2, program) == [{"rank": 0.5}, {"rank": 1.0}]


# --- errors of opening -------------------------------------------------------------------------------


def test_an_unknown_kind_is_refused() -> None:
    for arguments in (("tensorbord",), ("csv", "tensorbord")):
        with pytest.raises(MisuseError, match="of kind 'tensorbord'\nInstead: phalanx.tracker"):
            phalanx.tracker(*arguments, dir="x")
    with pytest.raises(MisuseError, match="without a kind"):
        phalanx.tracker(dir="x")
    with pytest.raises(MisuseError, match="of kind 'wandbee'"):
        phalanx.tracker("csv", dir="x", options={"wandbee": {}})


def test_a_library_that_is_missing_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_such(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="wandb.sdk")

    monkeypatch.setattr(tracker_module, "import_module", no_such)

    def program(rank: int) -> None:
        phalanx.tracker(Recorder, "wandb", dir=tmp_path)

    with pytest.raises(WorldError) as failed:
        run(2, program)
    first, second = failed.value.errors[0], failed.value.errors[1]
    assert isinstance(first, MisuseError) and "needs wandb" in str(first)
    assert first.instead == "pip install 'phalanx-ddp[wandb]'"
    assert isinstance(second, PeerFailedError) and "pip install 'phalanx-ddp[wandb]'" in str(second)
    assert [recorder.endings for recorder in Recorder.made] == [["failed"]]  # what was open already


# --- endings -----------------------------------------------------------------------------------------


def test_it_is_finished_once_and_then_no_more_is_logged(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        tracker = opened(tmp_path)
        tracker.finish("failed")
        tracker.finish()
        with pytest.raises(MisuseError, match="after the tracker was finished"):
            tracker.log({"loss": 1.0}, 1)

    run(2, program)
    assert Recorder.made[0].endings == ["failed"]


def test_the_end_of_a_block_tells_how(tmp_path: Path) -> None:
    for error, ending in ((ValueError, "failed"), (KeyboardInterrupt, "killed"), (SystemExit, "finished")):
        with pytest.raises(error), opened(tmp_path):
            raise error
        assert Recorder.made[-1].endings == [ending]


def test_shutdown_finishes_what_is_of_its_world_only(tmp_path: Path) -> None:
    closed, seen = threading.Event(), threading.Event()

    def program(rank: int) -> list[list[str]]:
        opened(tmp_path)
        dist.barrier()
        if rank == 1:
            phalanx.shutdown()  # of this rank, which has no tracker of its own
            closed.set()
            seen.wait(10)
            return []
        closed.wait(10)
        before = list(Recorder.made[0].endings)
        seen.set()
        phalanx.shutdown()
        return [before, Recorder.made[0].endings]

    assert run(2, program) == [[[], ["finished"]], []]


def test_every_writer_is_closed_though_the_first_cannot_be(tmp_path: Path) -> None:
    class Broken(Recorder):
        def close(self, ending: Ending) -> None:
            raise OSError("no space left")

    tracker = phalanx.tracker(Broken, Recorder, dir=tmp_path)
    with pytest.raises(OSError, match="no space left"):
        tracker.finish()
    assert Recorder.made[1].endings == ["finished"]


# --- TensorBoard and CSV, for real -------------------------------------------------------------------


def test_tensorboard_and_csv_say_the_same(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with phalanx.tracker("tensorboard", "csv", dir=tmp_path, config={"lr": 0.1}) as tracker:
            for step in range(4):
                tracker.log({"loss": step + rank, f"rank {rank}": rank}, step)

    run(2, program)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(step, step + 0.5) for step in range(4)]
    assert [e.value for e in events.Scalars("rank 1")] == [1.0] * 4
    assert '"lr": 0.1' in text_of(events, "config") and text_of(events, "status") == "finished"
    with (tmp_path / "metrics.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["loss"]) for line in lines] == [0.5, 1.5, 2.5, 3.5]
    assert [line["rank 0"] for line in lines] == ["0.0"] * 4


def test_a_resumed_run_takes_back_what_it_will_log_again(tmp_path: Path) -> None:
    for first, value in ((0, 1.0), (2, 2.0)):
        with phalanx.tracker("tensorboard", dir=tmp_path, purge_step=first) as tracker:
            for step in range(first, 4):
                tracker.log({"loss": value}, step)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [e.value for e in events.Scalars("loss")] == [1.0, 1.0, 2.0, 2.0]


def text_of(events: EventAccumulator, name: str) -> str:
    return events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()
