"""Measure what join(), weigh() and the checks that are always on add to a training step of the residual network.

    phalanx run -n 2 benchmarks/extras.py [--rounds 40] [--json FILE]

Each is a wrapped model of its own; they take turns, one step each, so that whatever else the machine does meets all
of them. Given are the median of a step, and the median over the rounds of what it takes more than the plain one, with
the quartiles, as a share of the plain step. `plain again` is a second plain model: what it differs by is noise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch.distributed as dist
from torch.optim import SGD

import phalanx
from phalanx import DistributedDataParallel
from phalanx.observe.bench_models import WORKLOADS

WARM_UP = 5
Step = Callable[[], None]


class Contender:
    """A wrapped residual network and its step, in a context that stays open for all steps."""

    def __init__(self, name: str, rank: int) -> None:
        workload = WORKLOADS["resnet"]
        self.name, self._loss = name, workload.loss
        self._ddp = DistributedDataParallel(workload.build(1))
        self._ddp.drift_check = name != "no drift check"
        self._optimizer = SGD(self._ddp.parameters(), workload.learning_rate, foreach=True)
        self._inputs, self._targets = workload.batch(3 + rank)

    def context(self) -> AbstractContextManager[object]:
        """What its loop stands in."""
        return self._ddp.join() if self.name == "join" else contextlib.nullcontext()

    def step(self) -> None:
        """One training step."""
        self._optimizer.zero_grad()
        loss = self._loss(self._ddp(self._inputs), self._targets)
        if self.name == "weigh":
            loss = self._ddp.weigh(loss, len(self._targets))
        loss.backward()
        self._optimizer.step()


NAMES = ("plain", "plain again", "join", "weigh", "no drift check")


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, by contender; of the slower rank. Collective."""
    contenders = [Contender(name, phalanx.rank()) for name in NAMES]
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    with contextlib.ExitStack() as stack:
        for each in contenders:
            stack.enter_context(each.context())
        for number in range(WARM_UP + rounds):
            turn = number % len(contenders)
            for each in contenders[turn:] + contenders[:turn]:
                dist.barrier()
                begin = time.perf_counter()
                each.step()
                if number >= WARM_UP:
                    seconds[each.name].append(time.perf_counter() - begin)
    for name, mine in seconds.items():
        everybody: list[list[float]] = [[] for _ in range(phalanx.world_size())]
        dist.all_gather_object(everybody, mine)
        seconds[name] = [max(times) for times in zip(*everybody, strict=True)]
    return seconds


def shares(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Quartiles of what each takes more than the plain step, as a share of it."""
    plain = seconds["plain"]
    median = statistics.median(plain)
    found = {}
    for name in NAMES[1:]:
        more = [(mine - theirs) / median for mine, theirs in zip(seconds[name], plain, strict=True)]
        found[name] = statistics.quantiles(more, n=4)
    return found


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    phalanx.init()
    seconds = measure(options.rounds)
    if not phalanx.is_main():
        return
    print(f"plain step: {statistics.median(seconds['plain']) * 1e3:.1f} ms")
    found = shares(seconds)
    for name, (low, middle, high) in found.items():
        print(f"{name:15} {100 * middle:+6.2f} %   [{100 * low:+.2f}, {100 * high:+.2f}]")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "shares": found}))


if __name__ == "__main__":
    main()
