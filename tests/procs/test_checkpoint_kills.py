"""Processes that are stopped, killed and started again: the run ends bit by bit as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import phalanx
from phalanx.checkpoint import folder as disk
from phalanx.testing import run
from tests.checkpoint_program import Plan, check_items, check_restarts, lines, train


def program(rank: int, plan: Plan, notes: Path) -> str:
    return train(rank, plan, notes)


def start(plan: Plan, notes: Path, n: int = 2, **keywords: object) -> list:
    notes.mkdir(exist_ok=True)
    return run(n, program, plan, notes, over="processes", timeout=60, **keywords)


def test_stopped_and_resumed_it_ends_bitwise_equal(tmp_path: Path) -> None:
    expected = start(Plan(tmp_path / "saves"), tmp_path / "notes-undisturbed")
    assert expected[0] != expected[1], "rank 0's digest has the buffers"
    notes = tmp_path / "notes"
    for stop_at, asynchronous in ((4, True), (9, False), (None, True)):  # after a save, and at one
        found = start(Plan(tmp_path / "again", asynchronous=asynchronous, stop_at=stop_at), notes)
    assert found == expected
    assert [int(rest[0]) for word, *rest in lines(notes, 0) if word == "start"] == [0, 3, 9]
    check_items(notes, 4)


@pytest.mark.full
def test_on_other_numbers_of_ranks_each_item_is_had_once(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    for n, stop_at in ((2, 4), (1, 6), (2, None)):
        start(Plan(tmp_path / "saves", epochs=2, every=2, stop_at=stop_at), notes, n=n)
    check_restarts(notes)
    check_items(notes, 2)


class Killer:
    """Kills a rank, or both, some time after they have started, by the process id that they have written down."""

    def __init__(self, notes: Path, seconds: float, ranks: list[int]) -> None:
        self._notes, self._seconds, self._ranks = notes, seconds, ranks
        self._over = threading.Event()
        self.killed: list[int] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Killer:
        self._before = {rank: len(lines(self._notes, rank)) for rank in (0, 1)}
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        pids: dict[int, int] = {}
        while len(pids) < len(self._ranks) and not self._over.wait(0.002):
            for rank in self._ranks:
                new = lines(self._notes, rank)[self._before[rank] :]
                if new and new[0][0] == "pid":
                    pids[rank] = int(new[0][1])
        if self._over.wait(self._seconds):
            return
        for rank, pid in pids.items():
            try:
                os.kill(pid, signal.SIGKILL)
                self.killed.append(rank)
            except ProcessLookupError:
                pass  # it has just ended


def kill_again_and_again(folder: Path, kills: int, say: Callable[[str], None] = lambda text: None) -> None:
    """Kill runs at `kills` random moments, restarting each to its end; check all that is promised."""
    chance, done, history, lost, began = random.Random(kills), 0, 0, [], time.monotonic()
    expected = start(Plan(folder / "saves-undisturbed"), folder / "notes-undisturbed")
    longest = duration(folder / "notes-undisturbed")
    while done < kills:
        history += 1
        plan = Plan(folder / f"saves-{history}", asynchronous=history % 2 == 0)
        notes = folder / f"notes-{history}"
        notes.mkdir()
        ended = False
        while not ended:
            ranks = chance.choice([[0], [1], [0, 1]])
            seconds = chance.uniform(0.0, longest) if done < kills else 100.0
            with Killer(notes, seconds, ranks) as killer:
                outcomes = start(plan, notes, raises=False)
            found = [outcome.value for outcome in outcomes]
            ended = all(outcome.ok for outcome in outcomes)
            assert ended or killer.killed, "\n".join(outcome.text for outcome in outcomes)
            done += bool(killer.killed) and not ended
            for entry in disk.entries(plan.folder):
                assert not entry.fault, entry
                for name in entry.manifest.files:
                    disk.read(entry, name)
        assert found == expected
        check_restarts(notes)
        check_items(notes, plan.epochs)
        lost += losses(notes)
        # A rank killed in the end of its very last save leaves what the next save would remove.
        assert len([name for name in os.listdir(plan.folder) if name.endswith(".tmp")]) <= 1
        say(f"{done} kills, {history} runs, {time.monotonic() - began:.0f} s, most steps lost {max(lost, default=0)}")
    assert max(lost, default=0) <= 2 * Plan(folder).every


def duration(notes: Path) -> float:
    """Seconds that rank 0 has run for, of one run."""
    times = {word: float(rest[-1]) for word, *rest in lines(notes, 0) if word in ("pid", "end")}
    return times["end"] - times["pid"]


def losses(notes: Path) -> list[int]:
    """How many steps each restart has lost."""
    last, lost = 0, []
    for word, *rest in lines(notes, 0):
        if word == "start":
            lost.append(last - int(rest[0]))
        last = int(rest[0]) if word in ("start", "step") else last
    return lost


def test_killed_at_random_moments_it_loses_no_more_than_the_steps_since_the_last_save(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 3)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_killed_500_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    kill_again_and_again(tmp_path, 500, say)


def test_a_rank_that_dies_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    def dies(rank: int) -> None:
        phalanx.checkpoint.save(tmp_path, step=1)
        if rank == 1:
            os._exit(3)
        with pytest.raises(phalanx.PeerLostError):
            phalanx.checkpoint.save(tmp_path, step=2)

    outcomes = run(2, dies, over="processes", raises=False, timeout=60)
    assert outcomes[0].ok, outcomes[0].text
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-000000001"]
