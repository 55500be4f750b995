"""Measure a training step of one model in each of the three forms of parallel training, and in one process.

    phalanx run -n 2 benchmarks/three_forms.py [--rounds 30] [--json FILE]

The forms take turns, one step each, so that whatever else the machine does meets all of them; medians are
printed, and the quartiles. All work on the same 64 items. One process, the split model and DataParallel run on
rank 0 with as many threads as there are ranks, while the others wait; DistributedDataParallel and the pipeline run on
all ranks with one thread each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

import phalanx
from phalanx import DataParallel, DistributedDataParallel

ITEMS, MICRO_BATCHES, WARM_UP = 64, 4, 3
Form = Callable[[], None]


def perceptron() -> tuple[nn.Sequential, Tensor]:
    """Many parameters for little arithmetic: 2.6 million, used once for each item."""
    layers = [layer for _ in range(10) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(ITEMS, 512)


def convolutions() -> tuple[nn.Sequential, Tensor]:
    """Few parameters for much arithmetic: 0.1 million, used 256 times for each item."""
    layers: list[nn.Module] = [nn.Conv2d(3, 48, 3, padding=1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(48, 48, 3, padding=1), nn.GroupNorm(4, 48), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.randn(ITEMS, 3, 16, 16)


MODELS = {"perceptron": perceptron, "convolutions": convolutions}


def step_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Form:
    """Forward, backward and update on these items."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def alone(step: Form, threads: int) -> Form:
    """The step on rank 0 alone, with that many threads."""

    def run() -> None:
        if phalanx.is_main():
            torch.set_num_threads(threads)
            step()
            torch.set_num_threads(1)

    return run


def pipeline(build: Callable[[], tuple[nn.Sequential, Tensor]], targets: Tensor) -> Form:
    """One stage on each rank."""
    rank, size = phalanx.rank(), phalanx.world_size()
    model, inputs = build()
    part = phalanx.pipeline_stages(model, size)[rank]
    schedule = ScheduleGPipe(PipelineStage(part, rank, size, torch.device("cpu")), MICRO_BATCHES, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*([inputs] if rank == 0 else []), **({"target": targets} if rank == size - 1 else {}))
        optimizer.step()

    return step


def forms(build: Callable[[], tuple[nn.Sequential, Tensor]]) -> dict[str, Form]:
    """One step of each form, by name."""
    rank, size = phalanx.rank(), phalanx.world_size()
    inputs, targets = build()[1], torch.randint(10, (ITEMS,))
    halves = inputs.chunk(size)[rank], targets.chunk(size)[rank]
    split = phalanx.split_over(build()[0], ["cpu"] * size)
    return {
        "one process, one thread": alone(step_of(build()[0], inputs, targets), 1),
        "one process": alone(step_of(build()[0], inputs, targets), size),
        "split over devices": alone(step_of(split, inputs, targets), size),
        "DataParallel": alone(step_of(DataParallel(build()[0], replicas=size), inputs, targets), size),
        "DistributedDataParallel": step_of(DistributedDataParallel(build()[0]), *halves),
        "pipeline": pipeline(build, targets),
    }


def measure(build: Callable[[], tuple[nn.Sequential, Tensor]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each form's steps, from the moment when all ranks are there until all are done."""
    found: dict[str, list[float]] = {}
    for number in range(WARM_UP + rounds):
        if number == 0:
            torch.manual_seed(0)
            steps = forms(build)
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            dist.barrier()
            if number >= WARM_UP:
                found.setdefault(name, []).append((time.perf_counter() - began) * 1000)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times there")
    options = parser.parse_args()
    phalanx.init()
    torch.set_num_threads(1)
    results = {name: measure(build, options.rounds) for name, build in MODELS.items()}
    if phalanx.is_main():
        for model, times in results.items():
            print(f"{model}, {ITEMS} items, {phalanx.world_size()} ranks, milliseconds per step")
            for form, values in times.items():
                low, median, high = statistics.quantiles(values, n=4)
                print(f"  {form:24} {median:8.2f}   ({low:.2f} to {high:.2f})")
        if options.json:
            options.json.write_text(json.dumps(results))
    phalanx.shutdown()


if __name__ == "__main__":
    main()
