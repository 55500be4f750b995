"""Thousands of steps in which ranks are killed: the others build new groups in the same processes, and leak nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from phalanx.testing import warm_up
from tests.soak_program import Holdings, Plan, train

SERVER = multiprocessing.get_context("forkserver")
RANKS = 3
SETTLED = 2
"""Generations after which a process has all that it needs."""
GROWTH = 5 << 20


class Soak:
    """Starts ranks, and a new one for each that is killed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.generation = 0
        self.running = {rank: self._start(rank) for rank in range(plan.ranks)}

    def _start(self, rank: int) -> BaseProcess:
        process = SERVER.Process(target=train, args=(self.plan, rank, self.generation))
        process.start()
        return process

    def run(self, seconds: float) -> None:
        """Until every rank has come to its end."""
        until = time.monotonic() + seconds
        while self.running:
            wait([process.sentinel for process in self.running.values()], max(0.0, until - time.monotonic()))
            assert time.monotonic() < until, f"hangs in generation {self.generation}: {list(self.running)}"
            for rank, process in list(self.running.items()):
                code = process.exitcode
                if code == -9:
                    assert rank == self.plan.loss(self.generation)[0]
                    self.generation += 1
                    self.running[rank] = self._start(rank)
                elif code is not None:
                    assert code == 0, f"rank {rank} ends with {code}"
                    del self.running[rank]
                if code is not None:
                    process.close()

    def close(self) -> None:
        """End whatever is left."""
        for process in self.running.values():
            process.kill()
            process.join()


def soak(folder: Path, steps: int, every: tuple[int, int], seconds: float) -> tuple[int, list[list[Holdings]]]:
    """Train; return the number of losses, and what each process held at the beginning of each generation."""
    warm_up("pytest", "hypothesis")
    before = set(os.listdir("/dev/shm"))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = Soak(Plan(RANKS, steps, every, store.port, str(folder)))
    try:
        work.run(seconds)
    finally:
        work.close()
    assert set(os.listdir("/dev/shm")) <= before
    ours = psutil.Process().children(recursive=True)
    assert not [each for each in ours if each.status() == psutil.STATUS_ZOMBIE]
    ends = [json.loads((folder / f"end-{rank}").read_text()) for rank in range(RANKS)]
    assert ends == [ends[0]] * RANKS, "equal replicas"
    assert (ends[0]["step"], ends[0]["count"]) == (steps, -steps), "every step was made once"
    lives: dict[int, list[Holdings]] = {}
    for rank in range(RANKS):
        for line in (folder / f"holdings-{rank}").read_text().splitlines():
            noted = Holdings(**json.loads(line))
            lives.setdefault(noted.pid, []).append(noted)
    return work.generation, list(lives.values())


def check_flat(life: list[Holdings]) -> None:
    """A process that has lived through several losses holds what it held after the first ones."""
    if len(life) <= SETTLED:
        return
    first, last = life[SETTLED - 1], life[-1]
    assert last.descriptors == first.descriptors, life
    assert last.threads == first.threads, life
    assert last.resident - first.resident < GROWTH, life


def test_survivors_go_on_with_a_rank_that_replaces_the_lost_one(tmp_path: Path) -> None:
    losses, lives = soak(tmp_path, steps=60, every=(12, 20), seconds=60)
    assert losses >= 2
    for life in lives:
        check_flat(life)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ten_thousand_steps_and_a_loss_every_few_hundred(tmp_path: Path) -> None:
    losses, lives = soak(tmp_path, steps=10_000, every=(150, 300), seconds=420)
    longest = max(lives, key=len)
    slowest = max(each.seconds for life in lives for each in life)
    print(f"\n{losses} losses, told within {slowest:.3f} s; the process that has lived through {len(longest)}:")
    for each in longest:
        print(f"  {each.descriptors} descriptors, {each.threads} threads, {each.resident / 2**20:.1f} MiB")
    assert losses >= 30 and len(longest) >= 20 and slowest < 2
    for life in lives:
        check_flat(life)
