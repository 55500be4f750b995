"""Communication hooks with torch's contract: hook(state, bucket) -> Future of the averaged buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from phalanx.errors import MisuseError
from phalanx.reduce.memory import Memory
from phalanx.reduce.plan import Bucket, Plan


class GradBucket:
    """One bucket of gradients, with the methods of torch.distributed.GradBucket."""

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        gradients: list[torch.Tensor],
        parameters: list[torch.Tensor],
        last: bool,
    ) -> None:
        self._index, self._buffer, self._gradients = index, buffer, gradients
        self._parameters, self._last = parameters, last

    def index(self) -> int:
        """Its place in the order of launches, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket as one flat tensor, before averaging."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients one by one, as contiguous views of the buffer with their parameters' shapes.

        As in torch, those of channels-last parameters have their elements in the order of memory.
        """
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of gradients()."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether it is the last bucket of this step."""
        return self._last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the buffer that later hooks of this step see."""
        self._buffer = tensor


class HookRunner:
    """Runs a user's hook on every bucket that some rank used, then puts the results in place."""

    def __init__(self, state: object, hook: Callable[[Any, Any], torch.futures.Future[Any]], rank: int) -> None:
        self.state, self.hook, self._rank = state, hook, rank
        self.name = getattr(hook, "__qualname__", type(hook).__qualname__)

    def run(
        self,
        plan: Plan,
        memory: Memory,
        parameters: Sequence[torch.nn.Parameter],
        views: Sequence[torch.Tensor],
        used: Sequence[int],
        scales: Sequence[float],
        takes: bool = True,
    ) -> None:
        """Launch all buckets in order, then wait for them in order; put the results in place if `takes`."""
        wanted = set(used)
        buckets = [bucket for bucket in plan.buckets if not wanted.isdisjoint(bucket.members)]
        # A hook averages over the ranks as torch's do; other weights go in beforehand.
        factor = scales[self._rank] * len(scales)
        launched: list[tuple[Bucket, torch.Tensor, torch.futures.Future[Any]]] = []
        for number, bucket in enumerate(buckets):
            # A copy: hooks resize their buffer (batched PowerSGD) and keep it, and the slot must allow neither.
            buffer = memory.own[bucket.region][bucket.start : bucket.stop].clone()
            if factor == 0.0:
                buffer.zero_()  # what a rank without a contribution has there may be anything, NaN too
            elif factor != 1.0:
                buffer.mul_(factor)
            starts = [plan.places[i][1] - bucket.start for i in bucket.members]
            gradients = [
                buffer[start : start + views[i].numel()].view(views[i].shape)
                for i, start in zip(bucket.members, starts, strict=True)
            ]
            given = GradBucket(
                number, buffer, gradients, [parameters[i] for i in bucket.members], number == len(buckets) - 1
            )
            launched.append((bucket, buffer, self._launch(given)))
        for bucket, buffer, future in launched:
            result = self._result(bucket, buffer, future.wait())
            if takes:
                self._place(plan, memory, bucket, wanted, result)

    def _launch(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        future = self.hook(self.state, bucket)
        if not isinstance(future, (torch.futures.Future, torch._C.Future)):
            raise MisuseError(
                f"the communication hook {self.name} returned {type(future).__name__} for bucket {bucket.index()}; "
                "callback must return a torch.futures.Future object",
                "return a future of the averaged tensor, e.g. "
                "dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0] / n)",
                self._rank,
            )  # fmt: skip
        return future

    def _result(self, bucket: Bucket, buffer: torch.Tensor, value: Any) -> torch.Tensor:
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor) or value.numel() != buffer.numel():
            what = f"a tensor of {value.numel()}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise MisuseError(
                f"the communication hook {self.name} gave {what} for bucket {bucket.index}, "
                f"which has {buffer.numel()} elements",
                "return a future whose value is one tensor with as many elements as bucket.buffer()", self._rank,
            )  # fmt: skip
        return value

    def _place(self, plan: Plan, memory: Memory, bucket: Bucket, wanted: set[int], result: torch.Tensor) -> None:
        flat = result.detach().reshape(-1)
        own = memory.own[bucket.region]
        for _, start, stop in plan.spans(i for i in bucket.members if i in wanted):
            own[start:stop].copy_(flat[start - bucket.start : stop - bucket.start])
