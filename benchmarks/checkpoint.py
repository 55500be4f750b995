"""Measure what saving every 50 steps in the background costs the training of the residual network.

    python benchmarks/checkpoint.py [--rounds 5] [--steps 50] [--folder runs/bench-checkpoint]

Two ranks of one thread each, SGD with momentum: 41 MB a checkpoint. Blocks of steps with one asynchronous save
at their beginning and blocks without take turns; what is reported are medians over the rounds of the ratio of
a block to the one without beside it. Seconds are those of the slower rank. CPU time is that of both ranks,
the writing thread's included: on a host with other work it says more than the clock. Exits with 1 if the cost
by the clock is above the promise.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import phalanx
from phalanx.observe.bench_models import WORKLOADS
from phalanx.observe.bench_ranks import Ranks, measure_on_ranks

PROMISE = 0.02
WARM_UP_STEPS = 5


class Trainer:
    """The residual network on this rank, and its checkpoints."""

    def __init__(self, ranks: Ranks, folder: str) -> None:
        workload = WORKLOADS["resnet"]
        self._loss, self._batch = workload.loss, workload.batch(ranks.rank)
        self._model = phalanx.DistributedDataParallel(workload.build(0), process_group=ranks.group("phalanx"))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=workload.learning_rate, momentum=0.9)
        self._folder, self._saves = folder, 0

    def train(self, steps: int) -> None:
        inputs, targets = self._batch
        for _ in range(steps):
            self._optimizer.zero_grad()
            self._loss(self._model(inputs), targets).backward()
            self._optimizer.step()

    def save(self, asynchronous: bool) -> Any:
        self._saves += 1
        return phalanx.checkpoint.save(
            self._folder, step=self._saves, model=self._model, optimizer=self._optimizer, keep=1,
            asynchronous=asynchronous,
        )  # fmt: skip


def measure(ranks: Ranks, rounds: int, steps: int, folder: str) -> dict[str, list[float]]:
    """Return, for each round, seconds and CPU seconds of both kinds of blocks, and seconds of the calls."""
    trainer = Trainer(ranks, folder)
    trainer.train(WARM_UP_STEPS)
    trainer.save(asynchronous=True).wait()
    found: dict[str, list[float]] = {}
    for number in range(rounds):
        for saves in (False, True) if number % 2 else (True, False):
            ranks.start_line()
            began, cpu, called, handle = time.perf_counter(), time.process_time(), 0.0, None
            if saves:
                handle = trainer.save(asynchronous=True)
                called = time.perf_counter() - began
            trainer.train(steps)
            seconds, used = time.perf_counter() - began, time.process_time() - cpu
            if handle is not None:
                handle.wait()
            figures = {"seconds": ranks.slowest([seconds])[0], "cpu": sum_over(ranks, used)}
            figures |= {"call": ranks.slowest([called])[0]} if saves else {}
            for name, value in figures.items():
                found.setdefault(f"{name} {'with' if saves else 'without'}", []).append(value)
        ranks.start_line()
        began = time.perf_counter()
        trainer.save(asynchronous=False)
        found.setdefault("synchronous", []).append(ranks.slowest([time.perf_counter() - began])[0])
        ranks.say(f"round {number + 1} of {rounds}")
    return found


def sum_over(ranks: Ranks, seconds: float) -> float:
    """Add up over the ranks, in microseconds, which `gather` can carry."""
    return sum(row[0] for row in ranks.gather([int(seconds * 1e6)])) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what asynchronous saves cost.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--folder", default="runs/bench-checkpoint")
    given = parser.parse_args()
    try:
        found = measure_on_ranks(measure, (given.rounds, given.steps, str(Path(given.folder).absolute())), 2)
    finally:
        shutil.rmtree(given.folder, ignore_errors=True)
    costs = {
        name: median(w / wo for w, wo in zip(found[f"{name} with"], found[f"{name} without"], strict=True)) - 1
        for name in ("seconds", "cpu")
    }
    print(json.dumps(found))
    print(f"a step takes {median(found['seconds without']) / given.steps * 1e3:.1f} ms")
    print(f"the call of an asynchronous save {median(found['call with']) * 1e3:.1f} ms, "
          f"a synchronous save {median(found['synchronous']) * 1e3:.1f} ms")  # fmt: skip
    print(f"saving every {given.steps} steps costs {costs['seconds']:.2%} by the clock, {costs['cpu']:.2%} of CPU time "
          f"(promised: at most {PROMISE:.0%})")  # fmt: skip
    return 0 if costs["seconds"] <= PROMISE else 1


if __name__ == "__main__":
    sys.exit(main())
