"""What a trace sees of the model: forward, backward, optimizer steps, and the buckets of each synchronisation.

All of it by hooks that are there only while a trace is on: torch's hooks for all modules and optimizers,
and the list of calls that every reducer makes after a flush.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from phalanx.observe.recorder import Recorder, now
from phalanx.parallel.ddp import DistributedDataParallel
from phalanx.reduce.roster import reducers


class ModelEvents:
    """The hooks of one trace, from `begin` to `end`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handles: list[Any] = []
        self._attached: dict[int, tuple[weakref.ref[Any], Callable[[], None]]] = {}
        self._forwards: list[float] = []  # when those that still run began; one may call another
        self._steps: list[float] = []
        self._backward: float | None = None
        self._plans: set[str] = set()
        self._on = True

    def begin(self) -> None:
        """Put the hooks in place."""
        self._handles = [
            register_module_forward_pre_hook(self._forward_begins),
            register_module_forward_hook(self._forward_ended, always_call=True),
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ended),
        ]
        self._attach_to_reducers()

    def end(self) -> None:
        """Take them away. Those on outputs that are still alive do nothing any more."""
        self._on = False
        for handle in self._handles:
            handle.remove()
        for known, call in self._attached.values():
            reducer = known()
            if reducer is not None and call in reducer.after_flush:
                reducer.after_flush.remove(call)

    # -- forward and backward ------------------------------------------------------------------------

    def _forward_begins(self, module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            self._attach_to_reducers()  # a model that was wrapped since
            self._forwards.append(now())

    def _forward_ended(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not isinstance(module, DistributedDataParallel) or not self._forwards:
            return
        name = f"forward of {type(module.module).__name__}"
        self._recorder.add(name, "forward", self._forwards.pop(), now())
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None:
                leaf.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        if not self._on or self._backward is not None:
            return
        self._backward = now()
        Variable._execution_engine.queue_callback(_Ending(self._backward_ended))

    def _backward_ended(self, well: bool) -> None:
        began, self._backward = self._backward, None
        if self._on and began is not None and well:
            self._recorder.add("backward", "backward", began, now())

    # -- optimizers ----------------------------------------------------------------------------------

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._steps.append(now())

    def _step_ended(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._steps:
            self._recorder.add(f"{type(optimizer).__name__}.step", "optimizer", self._steps.pop(), now())

    # -- reducers ------------------------------------------------------------------------------------

    def _attach_to_reducers(self) -> None:
        for reducer in list(reducers):
            known = self._attached.get(id(reducer))
            if known is None or known[0]() is not reducer:
                ref = weakref.ref(reducer)
                call = _Flushed(self, ref)
                reducer.after_flush.append(call)
                self._attached[id(reducer)] = ref, call

    def flushed(self, reducer: Any) -> None:
        """Take down a synchronisation of a reducer's gradients, which is just over."""
        plan, statistics = reducer.plan, reducer.statistics
        name = f"{plan.fingerprint:016x}"[:8]
        if name not in self._plans:
            self._plans.add(name)
            self._describe(reducer, name)
        model = reducer.group.core.labels.get(reducer.tag & ~1, "a model")
        used = [reducer.statistics.synchronised_at(index) == statistics.flushes for index in range(len(reducer.named))]
        buckets = [bucket for bucket in plan.buckets if any(used[index] for index in bucket.members)]
        self._recorder.add(
            f"synchronise {model}", "gradients", statistics.last_started, statistics.last_ended, plan=name,
            buckets=[bucket.index for bucket in buckets], bytes=sum(_bytes(plan, bucket) for bucket in buckets),
            parameters=sum(used), communication_hook=getattr(reducer.comm_hook, "name", None),
        )  # fmt: skip

    def _describe(self, reducer: Any, plan_name: str) -> None:
        """One instant for each bucket of a plan, with all that is in it."""
        plan, at = reducer.plan, reducer.statistics.last_ended
        for bucket in plan.buckets:
            region = plan.regions[bucket.region]
            self._recorder.add(
                f"bucket {bucket.index} of plan {plan_name}", "bucket", at, None, bytes=_bytes(plan, bucket),
                dtype=region.dtype, device=region.device, parameters=[reducer.named[i][0] for i in bucket.members],
            )  # fmt: skip


class _Flushed:
    """What a reducer calls after a flush; it does not keep the reducer alive."""

    def __init__(self, events: ModelEvents, reducer: weakref.ref[Any]) -> None:
        self._events, self._reducer = events, reducer

    def __call__(self) -> None:
        reducer = self._reducer()
        if reducer is not None:
            self._events.flushed(reducer)


class _Ending:
    """The engine calls it when a backward ends, and drops it uncalled when the backward raises."""

    def __init__(self, ended: Callable[[bool], None]) -> None:
        self._ended, self._called = ended, False

    def __call__(self) -> None:
        self._called = True
        self._ended(True)

    def __del__(self) -> None:
        if not self._called:
            self._ended(False)


def _bytes(plan: Any, bucket: Any) -> int:
    size: int = getattr(torch, plan.regions[bucket.region].dtype).itemsize
    return int(bucket.stop - bucket.start) * size
