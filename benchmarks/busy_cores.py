"""Measure training steps while other programs keep the cores busy, against torch's DDP with Gloo under torchrun.

    python benchmarks/busy_cores.py [--others 8] [--rounds 3]

Each round starts this script under torchrun and under `phalanx run --drop-in` in turn, on two ranks, beside `--others`
processes that never rest, each in a session of its own. Given is the mean step of each run in milliseconds, and the
ratio of the medians: where the scheduler decides, single runs differ by a factor of two. Takes ten minutes
with eight others.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

MODELS = {"linear": (nn.Linear(20, 10), 1500), "mnist": (nn.Sequential(
    nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
), 40)}  # fmt: skip
LAUNCHERS = {
    "torch": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "phalanx": ["phalanx", "run", "--drop-in", "-n", "2"],
}


def train(name: str) -> None:
    """One rank's part: time steps of a model, and have rank 0 say what they took."""
    dist.init_process_group("gloo")
    model, steps = MODELS[name]
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    inputs = torch.randn(32, 20) if name == "linear" else torch.randn(64, 1, 28, 28)
    labels = torch.randint(0, 10, (len(inputs),))
    for step in range(steps + 10):
        if step == 10:
            started = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"mean step {(time.perf_counter() - started) / steps * 1e3:.4f} ms", flush=True)
    dist.destroy_process_group()


@contextmanager
def others(count: int) -> Iterator[None]:
    """Keep `count` processes busy meanwhile."""
    code = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # they end with this process, whatever ends it
    busy = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def timed(launcher: str, name: str) -> float:
    """The mean step of one run in milliseconds."""
    command = [sys.executable, "-m", *LAUNCHERS[launcher], __file__, "--train", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(re.findall(r"mean step ([0-9.]+) ms", done.stdout)[0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--others", type=int, default=8, help="busy processes beside the two ranks")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", choices=MODELS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        train(given.train)
        return
    for name in MODELS:
        taken: dict[str, list[float]] = {launcher: [] for launcher in LAUNCHERS}
        with others(given.others):
            for _ in range(given.rounds):
                for launcher, values in taken.items():
                    values.append(timed(launcher, name))
        for launcher, values in taken.items():
            print(f"{name:7} {launcher:8}", *(f"{value:8.2f}" for value in values))
        ratio = statistics.median(taken["phalanx"]) / statistics.median(taken["torch"])
        print(f"{name:7} ratio of the medians {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
