"""Start the ranks of a measurement, give them their process groups, and bring the result home.

All ranks run on this host, with one torch thread each. The world is a Gloo group; a variant that
needs another backend gets a second group of the same ranks, so that all variants live in the same
processes. Results come back as JSON that rank 0 writes into a directory of the measurement's own.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.launch.spawn import spawn

TIMEOUT = timedelta(minutes=2)
MARGIN = 0.001  # seconds from the last rank's arrival at the start line to the start
SPIN = 0.0002  # the last part of a wait is spun away: a sleep may end this much late


@dataclass
class Ranks:
    """What a measurement sees of the world: its rank, and a process group for each backend."""

    rank: int
    size: int
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def group(self, backend: str) -> dist.ProcessGroup:
        """Return the group of `backend`, made at the first call. Collective: every rank, same order."""
        if backend not in self.groups:
            self.groups[backend] = dist.new_group(backend=backend)
        return self.groups[backend]

    def start_line(self) -> None:
        """Return on all ranks at the same moment. Collective.

        A barrier alone lets ranks go up to 0.1 ms apart, more than some steps cost. So the ranks
        agree on a moment of the host's monotonic clock a little after the last arrival.
        """
        moment = torch.tensor([time.monotonic() + MARGIN], dtype=torch.float64)
        dist.all_reduce(moment, dist.ReduceOp.MAX, group=self.group("gloo"))
        start = moment.item()
        time.sleep(max(0.0, start - time.monotonic() - SPIN))
        while time.monotonic() < start:
            pass

    def slowest(self, values: list[float]) -> list[float]:
        """Return, element by element, the largest value of any rank. Collective."""
        most = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group("gloo"))
        return most.tolist()

    def gather(self, values: list[int]) -> list[list[int]]:
        """Return the values of every rank, in rank order. Collective."""
        mine = torch.tensor(values, dtype=torch.int64)
        rows: list[Tensor] = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine, group=self.group("gloo"))
        return [row.tolist() for row in rows]

    def say(self, text: str) -> None:
        """Print a line of progress, on rank 0 only."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)


Measure = Callable[..., Any]


def measure_on_ranks(measure: Measure, args: tuple[Any, ...], size: int) -> Any:
    """Run `measure(ranks, *args)` on `size` new processes and return rank 0's result.

    The result must be JSON data. Raises SpawnError if a rank fails; KeyboardInterrupt passes, after
    the ranks have ended.
    """
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as directory:
        spawn(_run_rank, (size, directory, measure, args), size)
        return json.loads(Path(directory, "result.json").read_text())


def _run_rank(rank: int, size: int, directory: str, measure: Measure, args: tuple[Any, ...]) -> None:
    # Ctrl-C is passed on to the ranks: end without a traceback, and also inside a collective.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        ranks = Ranks(rank, size, {"gloo": cast(dist.ProcessGroup, dist.group.WORLD)})
        result = measure(ranks, *args)
        if rank == 0:
            Path(directory, "result.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
