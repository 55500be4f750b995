"""One rank of the soak: trains, loses another rank, builds a new group in the same process, goes on.

Before each step a rank keeps its state, and the one before that: when a rank is lost, some of the others may have
made the step and some not. The last step that all survivors have kept is where everybody goes on, the rank that
replaces the lost one included. `Net.count` has a gradient of one in every step, so it tells how many were made.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import random
import signal
import threading
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx.errors import PeerLostError


@dataclass(frozen=True)
class Plan:
    """What all ranks know: how many there are, how long to train, which rank is lost when."""

    ranks: int
    steps: int
    every: tuple[int, int]
    port: int
    folder: str
    any_rank: int = 8
    """In so many generations any rank may be lost; from then on rank 0 is not, to see what its process gathers."""

    def loss(self, generation: int) -> tuple[int, int, float]:
        """The rank that is lost, after how many steps of the generation, and how many seconds later than that."""
        chance = random.Random(generation)
        victim = chance.randrange(0 if generation < self.any_rank else 1, self.ranks)
        return victim, chance.randint(*self.every), chance.uniform(0, 0.004)


@dataclass(frozen=True)
class Holdings:
    """What a process has at one moment; sizes in bytes."""

    pid: int
    generation: int
    descriptors: int
    threads: int
    resident: int
    seconds: float
    """That it took to be told of the loss; 0 for a process that was started since."""

    @classmethod
    def now(cls, generation: int, seconds: float) -> Holdings:
        """Those of this process."""
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        return cls(os.getpid(), generation, descriptors, threads, resident, seconds)


class Net(nn.Module):
    """A model with a parameter that counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 64), nn.LayerNorm(64), nn.Linear(64, 4)
        self.count = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.head(self.norm(self.first(x).tanh())).square().mean() + self.count.sum()


class Trainer:
    """The state of one rank, which outlives its groups."""

    def __init__(self, plan: Plan, rank: int, generation: int) -> None:
        self.plan, self.rank, self.generation = plan, rank, generation
        self.store = dist.TCPStore("127.0.0.1", plan.port, is_master=False)
        torch.manual_seed(1)
        self.net = Net()
        slow = [parameter for name, parameter in self.net.named_parameters() if name != "count"]
        groups = [{"params": slow, "lr": 0.01, "momentum": 0.5}, {"params": [self.net.count], "lr": 1.0}]
        self.optimizer = torch.optim.SGD(groups)
        self.kept: deque[tuple[int, Any]] = deque(maxlen=2)
        self.step, self.seconds = 0, 0.0
        if generation == 0:
            self._keep()

    def run(self) -> dict[str, Any]:
        """Train to the end, through all losses."""
        while True:
            try:
                self._one_generation()
                return {"step": self.step, "count": self.net.count.item(), "sum": _sum(self.net)}
            except PeerLostError as error:
                self._lost(error)

    def _one_generation(self) -> None:
        plan = self.plan
        store = dist.PrefixStore(f"generation-{self.generation}", self.store)
        dist.init_process_group("phalanx", store=store, rank=self.rank, world_size=plan.ranks)
        pair = dist.new_group([0, 1])
        self._agree()
        ddp = phalanx.DistributedDataParallel(self.net)
        self._note()
        victim, after, late = plan.loss(self.generation)
        begun = self.step
        while self.step < plan.steps:
            if victim == self.rank and self.step == begun + after:
                _die_in(late, Path(plan.folder) / f"lost-{self.generation}")
            self._keep()
            batch = torch.linspace(-1, 1, 24).view(4, 6) + (self.step % 7) * 0.1 + self.rank
            self.optimizer.zero_grad()
            ddp(batch).backward()
            self.optimizer.step()
            if self.step % 8 == 0:
                work = dist.all_reduce(torch.ones(2), async_op=True)
                if self.rank < 2:
                    dist.broadcast(torch.ones(3), 0, group=pair)
                work.wait()
            self.step += 1
        dist.barrier()
        dist.destroy_process_group()

    def _agree(self) -> None:
        """Go on from the last state that all who have any have kept."""
        said: list[Any] = [None] * self.plan.ranks
        dist.all_gather_object(said, [step for step, _ in self.kept])
        common = set.intersection(*(set(steps) for steps in said if steps))
        step = max(common)
        giver = next(rank for rank, steps in enumerate(said) if step in steps)
        given = [dict(self.kept).get(step)]
        dist.broadcast_object_list(given, giver)
        self.net.load_state_dict(given[0]["net"])
        self.optimizer.load_state_dict(given[0]["optimizer"])
        self.step = step

    def _keep(self) -> None:
        state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.kept.append((self.step, copy.deepcopy(state)))

    def _lost(self, error: PeerLostError) -> None:
        """A rank is lost: it has to be the right one. Shut the group down."""
        victim = self.plan.loss(self.generation)[0]
        if error.peer != victim:
            raise AssertionError(f"rank {error.peer} is named, but rank {victim} was killed") from error
        lost = Path(self.plan.folder) / f"lost-{self.generation}"
        self.seconds = time.monotonic() - float(lost.read_text())
        dist.destroy_process_group()
        self.generation += 1

    def _note(self) -> None:
        noted = Holdings.now(self.generation, self.seconds)
        with open(Path(self.plan.folder) / f"holdings-{self.rank}", "a") as file:
            file.write(json.dumps(asdict(noted)) + "\n")


def _die_in(seconds: float, record: Path) -> None:
    def die() -> None:
        time.sleep(seconds)
        record.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def _sum(net: nn.Module) -> float:
    return sum(parameter.double().sum().item() for parameter in net.parameters())


def train(plan: Plan, rank: int, generation: int) -> None:
    """Run one rank from a generation on; writes how its training has ended."""
    torch.set_num_threads(1)
    said = Trainer(plan, rank, generation).run()
    (Path(plan.folder) / f"end-{rank}").write_text(json.dumps(said))
