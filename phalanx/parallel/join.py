"""join(): ranks that run out of data at different times.

A rank that leaves the block early follows the others (group/follow.py) until every rank has left: whatever
they call, it takes part in and contributes nothing, except gradients that it has accumulated and not
synchronised: those count in the next synchronised step. At the end every rank gets the model of a rank
that ran longest, and the gradients of the last step are on every rank already.

Objects with torch's join protocol (ZeroRedundancyOptimizer) may take part beside wrapped models: a rank
that has left runs their main hooks after every gradient synchronisation that it follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm
from torch.utils.hooks import RemovableHandle

from phalanx.errors import ExhaustedError, MisuseError
from phalanx.group.follow import Follower
from phalanx.group.ticket import Operation, State, Ticket
from phalanx.parallel.wrapped import Wrapped
from phalanx.reduce.roster import flush_leftovers


class Join(TorchJoin):
    """Let ranks finish at different times. Use as a context around the training loop, on every rank.

    `joinables` are wrapped models and other objects with torch's Joinable protocol, all on one process group.
    Keyword arguments are handed to the join hooks; `divide_by_initial_world_size` (default True) says
    whether gradients are divided by the world size or by the number of ranks still running. With `weigh`,
    they are divided by the items actually seen, whatever it says.

    `enable=False` does nothing at all; uneven inputs are then a RankMismatchError. With
    `throw_on_early_termination=True` every rank raises RuntimeError as soon as one runs out of data; over a
    group of another backend, at the next training forward.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        self._models = [each for each in joinables if isinstance(each, Wrapped)]
        if not self._models:
            super().__init__(list(joinables), enable, throw_on_early_termination, **kwargs)
            return
        self._enable, self._throw = enable, throw_on_early_termination
        self._whole = kwargs.get("divide_by_initial_world_size", True)
        self._group = self._models[0]._group
        self._core = self._group.core
        if any(model._group.core is not self._core for model in self._models):
            what = "join() over models on different process groups"
            raise MisuseError(what, "one join for each group", self._core.rank)
        foreign = [each for each in joinables if not isinstance(each, Wrapped)]
        self._hooks: list[JoinHook] = [each.join_hook(**kwargs) for each in foreign] if enable else []
        self._all = list(joinables)
        self._before: list[Any] = []
        self._questions: list[RemovableHandle] = []

    def __enter__(self) -> Join:
        if self._models and self._enable:
            if self._throw:
                self._ask_before_each_forward()
            else:
                self._refuse_what_cannot_be_followed()
            self._before = [each._join_config for each in self._all]
            for each in self._all:
                each._join_config = _JoinConfig(True, self._throw, is_first_joinable=False)
            reducers = [model._reducer for model in self._models]
            self._before.append((self._core.throws_when_joined, [(r.divisor, r.takes_when_joined) for r in reducers]))
            self._core.throws_when_joined = self._throw
            for model in self._models:
                model._reducer.divisor = self._core.size if self._whole else None
                model._reducer.takes_when_joined |= bool(self._hooks)
                model._logging.joined = True
        return self

    def _ask_before_each_forward(self) -> None:
        """Have a forward find out who is out of data before it calls what goes through a plain group of torch."""
        for model in self._models:
            if model.process_group is not self._group:
                self._questions.append(model.register_forward_pre_hook(self._ask))

    def _ask(self, model: Any, inputs: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self._core.exchange(b"", "a forward inside join()")

    def _refuse_what_cannot_be_followed(self) -> None:
        """A rank out of data sees only Phalanx's tickets, not what goes through a plain group of torch."""
        for model in self._models:
            if model.process_group is self._group:
                continue
            for name, layer in model.module.named_modules():
                if isinstance(layer, TorchSyncBatchNorm) and model.training:
                    raise MisuseError(
                        f"join() with {name or 'a model'}: {type(layer).__name__}, whose collectives go through a "
                        f"process group of backend {dist.get_backend(model.process_group)!r}, where a rank that is out "
                        "of data cannot follow them",
                        'torch.distributed.init_process_group("phalanx"), or phalanx.init()', self._core.rank,
                    )  # fmt: skip

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._models:
            super().__exit__(kind, error, at)
            return
        if not self._enable:
            return
        try:
            if isinstance(error, ExhaustedError):
                return  # every rank raises it: no failure of this one
            if error is not None:
                # Even if the caller catches it: nobody is to wait for this rank in a loop that it has left.
                self._group.announce_failure(error)
                return
            last = self._follow_to_the_end()
            for hook in self._hooks:
                hook.post_hook(last == self._core.rank)
            for model in self._models:
                model._authoritative_rank = last
                model._sync_final_model(last)
        finally:
            self._restore()

    def _restore(self) -> None:
        while self._questions:
            self._questions.pop().remove()
        throws, settings = self._before.pop()
        self._core.throws_when_joined = throws
        for model, setting in zip(self._models, settings, strict=True):
            model._reducer.divisor, model._reducer.takes_when_joined = setting
        for each, config in zip(self._all, self._before, strict=True):
            each._join_config = config

    def _follow_to_the_end(self) -> int:
        """Follow until every rank has left the block; return the highest of the ranks that left last."""
        self._group.drain()  # the user's asynchronous collectives come first, on every rank
        follower = Follower(self._core)
        followed = 0
        while True:
            tickets = follower.follow(partial(self._ticket, followed))
            active = [t for t in tickets if t.state is State.ACTIVE]
            if not active:
                flush_leftovers(self._core, tickets)
                if all(t.state is State.JOINED for t in tickets):
                    fewest = min(t.count for t in tickets)
                    return max(rank for rank, t in enumerate(tickets) if t.count == fewest)
            elif self._throw:
                raise ExhaustedError(f"Rank {self._core.rank} exhausted all inputs.")
            followed += 1
            if self._ends_a_step(tickets):
                for hook in self._hooks:
                    hook.main_hook()

    def _ends_a_step(self, tickets: Sequence[Ticket]) -> bool:
        """Whether those who run step their optimizers next; they do so too if all of them have skipped."""
        tag = self._models[0]._reducer.tag
        running = [t for t in tickets if t.state is not State.JOINED]
        active = [t for t in running if t.state is State.ACTIVE]
        return (active or running)[0].tag == tag and (not active or active[0].operation is Operation.GRADIENTS)

    def _ticket(self, followed: int) -> Ticket:
        reducers = [model._reducer for model in self._models]
        for reducer in reducers:
            reducer.notice_dropped()
        # Items of layers that this rank has not used count too.
        owing = [each for each in reducers if each.produced] or [each for each in reducers if each.weights.owes]
        if owing:
            return owing[0].following_ticket(State.JOINED, followed)
        return Ticket(Operation.FOLLOW, count=followed, state=State.JOINED)
