"""One rank of the fault campaign: a training run of named calls, one fault in it, and what the rank saw.

    batch  forward  backward  update  metric  gather  rate  wait
    next   buffers  gradients SGD     all_reduce all_gather broadcast barrier

A fault strikes on one rank, in one step, at one of these. Everything that a rank saw is in a file when it ends:
when it entered which call, what it raised and when. All clocks are the host's monotonic one.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from phalanx import DistributedDataParallel, rank_zero_only
from phalanx.errors import PeerError

SLOW_AFTER = 1.0
TIMEOUT = 2.5
"""Seconds: of the groups of runs that end with their timeout."""
CALLS = ("batch", "forward", "backward", "update", "metric", "gather", "rate", "wait")
UNTIL_CHECKED = 66
"""Synchronised steps in which every parameter's bytes have been compared."""


@dataclass(frozen=True)
class Case:
    """One run: which fault strikes where. `chance` seeds whatever else is drawn.

    With `lasts`, a rank that is stopped goes on only after the others' timeout.
    """

    pathology: str
    ranks: int
    rank: int
    step: int
    place: str
    chance: int
    steps: int = 8
    lasts: bool = False

    def __str__(self) -> str:
        lasting = ", until the timeout" if self.lasts else ""
        return f"{self.pathology} at {self.place}, rank {self.rank} of {self.ranks}, step {self.step}{lasting}"


class Witness(logging.Handler):
    """What one rank sees of a run, kept in `folder`; it also lets a rank that is held go on."""

    def __init__(self, rank: int, folder: Path, releases: bool) -> None:
        super().__init__(logging.WARNING)
        self.rank, self.folder, self.releases = rank, folder, releases
        self.entered: list[tuple[float, str, int]] = []
        self.reports: list[tuple[float, str]] = []

    def enter(self, call: str, step: int) -> None:
        """The rank is about to make `call`."""
        self.entered.append((time.monotonic(), call, step))

    def emit(self, record: logging.LogRecord) -> None:
        """Take a report down, and let the rank go on that it is about."""
        self.reports.append((time.monotonic(), record.getMessage()))
        if self.releases:
            self.let_go()

    def strike(self) -> None:
        """Put on record that the fault strikes now."""
        (self.folder / "fault").write_text(json.dumps([time.monotonic(), os.getpid()]))

    def hold(self) -> None:
        """Be late until that has been reported, or is overdue."""
        self.strike()
        until = time.monotonic() + SLOW_AFTER + 3.0
        while not (self.folder / "released").exists() and time.monotonic() < until:
            time.sleep(0.005)

    def let_go(self) -> None:
        """Let the rank that is held go on, stopped or not."""
        if not (self.folder / "fault").exists():
            return  # the report is about something else
        (self.folder / "released").touch()
        if (self.folder / "stopped").exists():
            os.kill(int((self.folder / "stopped").read_text()), signal.SIGCONT)

    def close_with(self, error: BaseException | None, caught: list[warnings.WarningMessage]) -> None:
        """Write down how the rank has ended."""
        said = {
            "at": time.monotonic(),
            "kind": type(error).__name__ if error is not None else "",
            "text": str(error) if error is not None else "",
            "fields": _fields(error),
            "entered": self.entered,
            "reports": self.reports,
            "warned": [getattr(each.message, "name", "") for each in caught],
        }
        part = self.folder / f"part-{self.rank}"
        part.write_text(json.dumps(said))
        part.rename(self.folder / f"seen-{self.rank}")


def _fields(error: BaseException | None) -> dict[str, Any]:
    names = ("peer", "calls", "missing", "odd", "groups", "parameter", "exception", "what", "detail", "report")
    fields = {name: getattr(error, name) for name in names if hasattr(error, name)}
    if isinstance(error, PeerError):
        fields["call"] = error.call
    return fields


class Break(torch.autograd.Function):
    """A place inside of backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, reached: Callable[[], None]) -> torch.Tensor:
        """As it is."""
        ctx.reached = reached
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As it is, and the place is reached."""
        ctx.reached()
        return grad, None


class Net(nn.Module):
    """Layers of several sizes, a buffer, and places in forward and backward."""

    def __init__(self, wide: bool = False, double: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 5 if wide else 4)
        if double:
            self.head.double()
        self.in_forward: Callable[[], None] = _nothing
        self.in_backward: Callable[[], None] = _nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits."""
        hidden = self.norm(self.first(x).tanh())
        self.in_forward()
        reached = Break.apply(hidden, lambda: self.in_backward())
        return self.head(reached.to(self.head.weight.dtype))


def _nothing() -> None:
    """What happens at most places."""


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """One batch for each step; one of them may be late."""

    def __init__(self, steps: int, late: int, hold: Callable[[], None]) -> None:
        self.steps, self.late, self.hold = steps, late, hold

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.late:
            self.hold()
        return torch.linspace(-1, 1, 24).view(4, 6) + index / 10


class Training:
    """The run of one rank. `on_fault` has what strikes there: pathology -> method."""

    def __init__(self, rank: int, case: Case, witness: Witness) -> None:
        self.rank, self.case, self.witness = rank, case, witness
        self.random = random.Random(case.chance)
        self.is_faulty = rank == case.rank
        self.step = -1
        self.leaks = ExitStack()
        torch.manual_seed(1)
        self.witness.enter("wrap", -1)
        self._at("wrap", before=True)
        wrong = self.is_faulty and case.place == "wrap"
        net = Net(wide=wrong and case.pathology == "shape", double=wrong and case.pathology == "dtype")
        self.ddp = DistributedDataParallel(net, bucket_cap_mb=0.0003)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.5)
        self.batches = self._loader()
        self.values = {
            "metric": torch.ones(2), "gather": torch.ones(3, dtype=torch.int64), "rate": torch.ones(1)
        }  # fmt: skip
        self.inputs, self.loss = torch.zeros(0), torch.zeros(0)

    def run(self) -> None:
        """Train."""
        for step in range(self.case.steps):
            self.step = step
            for call in self._calls():
                self._at(call, before=True)
                self.witness.enter(call, self.step)
                getattr(self, call)()
        if self._strikes("rank 0 only", "after"):
            self.witness.enter("wait", self.step + 1)
            dist.barrier()
        self.witness.enter("end", self.case.steps)

    # -- the calls of a step ---------------------------------------------------------------------------

    def batch(self) -> None:
        """Get the next batch."""
        self.inputs = next(self.batches)

    def forward(self) -> None:
        """Compute the loss."""
        model = self.ddp.module
        model.in_forward = lambda: self._at("in forward")
        model.in_backward = lambda: self._at("in backward")
        self.loss = self.ddp(self.inputs).square().mean()

    def backward(self) -> None:
        """Have gradients, synchronised."""
        self.loss.backward()

    def update(self) -> None:
        """Step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def metric(self) -> None:
        """Sum what the ranks have measured."""
        dist.all_reduce(self._value("metric"))

    def gather(self) -> None:
        """Collect what the ranks have counted."""
        mine = self._value("gather")
        dist.all_gather([torch.empty_like(mine) for _ in range(self.case.ranks)], mine)

    def rate(self) -> None:
        """Take rank 0's learning rate."""
        dist.broadcast(self._value("rate"), 0)

    def wait(self) -> None:
        """Wait for all."""
        dist.barrier()

    def _value(self, call: str) -> torch.Tensor:
        value = self.values[call].clone()
        if self._strikes("dtype", call):
            return value.double()
        if self._strikes("shape", call):
            return torch.cat([value, value])
        return value

    def _loader(self) -> Iterator[torch.Tensor]:
        late = self.case.step if self.is_faulty and self.case.pathology == "data stall" else -1
        data = Batches(self.case.steps, late, self.witness.hold)
        if self.case.place == "iterator":
            return (data[index] for index in range(len(data)))
        workers: dict[str, Any] = {}
        if self.case.place == "worker":
            workers = {"num_workers": 1, "multiprocessing_context": "fork"}
        return iter(torch.utils.data.DataLoader(data, batch_size=None, **workers))

    # -- faults ----------------------------------------------------------------------------------------

    def _strikes(self, pathology: str, place: str) -> bool:
        case = self.case
        now = self.step == case.step or (place in ("wrap", "after") and self.step in (-1, case.steps - 1))
        return self.is_faulty and now and (case.pathology, case.place) == (pathology, place)

    def _calls(self) -> list[str]:
        """The calls of this step on this rank."""
        case, calls = self.case, list(CALLS)
        if case.place == "quiet":
            calls = calls[:4]
        if not self.is_faulty or self.step != case.step:
            return calls
        if case.pathology == "order":
            moved, _, before = case.place.partition(" before ")
            calls.remove(moved)
            calls.insert(calls.index(before), moved)
        elif case.pathology == "missing call":
            left_out = {"step": ("forward", "backward", "update"), "whole step": CALLS}.get(case.place, (case.place,))
            calls = [call for call in calls if call not in left_out]
        return calls

    def _at(self, place: str, before: bool = False) -> None:
        """A place is reached where faults may strike."""
        case = self.case
        if not self.is_faulty or self.step != (-1 if case.place == "wrap" else case.step):
            return
        if place == {"any time": "batch", "quiet": "forward", "some layers": "forward"}.get(case.place, case.place):
            act = getattr(self, "_do_" + case.pathology.replace(" ", "_"), None)
            if act is not None:
                act()
        if case.pathology in ("dtype", "shape") and place == "forward" and case.place in ("model", "buffers"):
            self._change_model()

    def _change_model(self) -> None:
        model = self.ddp.module
        double = self.case.pathology == "dtype"
        if self.case.place == "buffers":
            mean = model.norm.running_mean
            model.norm.running_mean = mean.double() if double else torch.zeros(17)
            if not double:
                model.norm.track_running_stats = False
        elif double:
            model.head.double()
        else:
            model.head = nn.Linear(16, 5)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)

    def _soon(self, act: Callable[[], None]) -> None:
        """Act now, or from another thread at some moment of the coming steps."""
        if self.case.place != "any time":
            act()
            return
        timer = threading.Timer(self.random.uniform(0, 0.02), act)
        timer.daemon = True
        timer.start()

    def _do_exception(self) -> None:
        self.witness.strike()
        raise ValueError(f"fault of rank {self.rank}")

    def _do_SIGKILL(self) -> None:
        self._soon(lambda: (self.witness.strike(), os.kill(os.getpid(), signal.SIGKILL)))

    def _do_SIGSTOP(self) -> None:
        def stop() -> None:
            (self.witness.folder / "stopped").write_text(str(os.getpid()))
            self.witness.strike()
            os.kill(os.getpid(), signal.SIGSTOP)

        self._soon(stop)

    def _do_slow_rank(self) -> None:
        self.witness.hold()

    def _do_bit_flip(self) -> None:
        parameter = self.random.choice([each for each in self.ddp.module.parameters() if each.abs().max() > 0.01])
        flat = parameter.detach().view(-1).numpy()
        # Not of a zero, whose lower bits drown in the next update. Not the highest bits: an overflow makes all
        # replicas NaN, and so equal, in the very next step.
        index = self.random.choice([i for i, value in enumerate(flat) if abs(value) > 0.01])
        flat.view("uint32")[index] ^= 1 << self.random.choice([*range(10, 27), 31])
        name = next(name for name, each in self.ddp.module.named_parameters() if each is parameter)
        (self.witness.folder / "flipped").write_text(name)
        self.witness.strike()

    def _do_leaked_no_sync(self) -> None:
        self.witness.strike()
        self.leaks.enter_context(self.ddp.no_sync(*(["head.*"] if self.case.place == "some layers" else [])))

    def _do_rank_0_only(self) -> None:
        """A call in code that only rank 0 runs, before that place."""
        self.witness.enter("extra", self.step)
        which = self.random.choice(["all_reduce", "barrier", "object", "only"])
        (self.witness.folder / "extra").write_text(which)
        if which == "all_reduce":
            dist.all_reduce(torch.ones(7))
        elif which == "barrier":
            dist.barrier()
        elif which == "object":
            dist.all_gather_object([None] * self.case.ranks, {"best": 1})
        else:
            rank_zero_only(dist.barrier)()


def train(rank: int, case: Case, folder: str) -> None:
    """Run one rank of `case`; what it saw is in `folder` when it ends."""
    witness, log = Witness(rank, Path(folder), not case.lasts), logging.getLogger("phalanx")
    log.addHandler(witness)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            Training(rank, case, witness).run()
        except BaseException as error:
            witness.close_with(error, caught)
            if case.lasts and rank != case.rank:
                atexit.register(_let_go_on, case, witness)
            raise
        witness.close_with(None, caught)


def _let_go_on(case: Case, witness: Witness) -> None:
    """A rank that was stopped until the others' timeout goes on when all of them have had their error."""
    until = time.monotonic() + 2.0
    while len(list(witness.folder.glob("seen-*"))) < case.ranks - 1 and time.monotonic() < until:
        time.sleep(0.01)
    witness.let_go()
