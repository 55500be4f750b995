"""Which gradients stay local, for how long, and telling the user about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from phalanx.errors import MisuseError
from phalanx.parallel import buffers
from phalanx.parallel.wrapped import Wrapped
from phalanx.reduce.schedule import ALWAYS, NEVER, Every, matching
from phalanx.reduce.watch import Local

_ALL = "*"
_BUFFER_POLICIES = ("rank0", "mean", "local")
_NOTHING: Local = frozenset()


class Layers(Wrapped):
    """Mixed into DistributedDataParallel."""

    def _start_layers(self) -> None:
        self._buffer_policies: list[tuple[str, str]] = getattr(self, "_buffer_policies", [])
        self._patterns: tuple[str, ...] = ()
        self._local_cache: tuple[tuple[str, ...], Local, Local] = ((), _NOTHING, _NOTHING)

    @contextmanager
    def no_sync(self, *patterns: str) -> Iterator[None]:
        """Keep gradients local: of the whole model, or of the parameters whose names match a pattern.

        Patterns are shell-style (`"encoder.*"`; `"encoder"` means all of it). A backward stays local if it, or
        the forward it belongs to, ran in here. The next synchronised backward exchanges the sum of what has
        accumulated. Every rank must do the same. Raises MisuseError if a pattern matches nothing.
        """
        for pattern in patterns:
            self._matched(pattern)
        before, self._patterns = self._patterns, self._patterns + (patterns or (_ALL,))
        try:
            yield
        finally:
            self._patterns = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward synchronises; False inside no_sync(). Other libraries set it by hand."""
        return _ALL not in self._patterns

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._patterns = () if value else (_ALL,)

    def _local_now(self) -> Local:
        """The numbers of the parameters that a backward would keep local now."""
        if not self._patterns:
            return _NOTHING
        everything = self._reducer.everything
        if _ALL in self._patterns:
            return everything
        patterns, of, local = self._local_cache
        if patterns != self._patterns or of is not everything:
            names = [name for name, _ in self._reducer.named]
            local = frozenset().union(*(matching(names, pattern) for pattern in self._patterns))
            self._local_cache = (self._patterns, everything, local)
        return local

    def _matched(self, pattern: str) -> frozenset[int]:
        names = [name for name, _ in self._reducer.named]
        found = matching(names, pattern)
        if not found:
            raise MisuseError(
                f"the pattern {pattern!r} matches no parameter", f"one that matches some of {_some(names)}",
                self._group.core.rank,
            )  # fmt: skip
        return found

    def sync_policy(self, pattern: str, every: Every = ALWAYS) -> None:
        """Set how often the parameters matching `pattern` are synchronised, from the next step on.

        `every=k`: at every k-th synchronised step, with all that has accumulated; between, their gradients are
        held back, so that the optimizer leaves these parameters alone and all ranks stay equal. `"never"`:
        their gradients stay local and visible, and the parameters differ between ranks. `"always"` is the
        default. For a parameter that several policies match, the last one set counts. Every rank sets the same
        policies between the same two steps: a rank that has not is a RankMismatchError at the next one.
        """
        self._matched(pattern)
        self._reducer.watch.check_idle("sync_policy()", self._group.core.rank)
        if self._reducer.produced:
            held = ", ".join(self._reducer.named[index][0] for index in sorted(self._reducer.produced)[:3])
            raise MisuseError(
                f"sync_policy() while gradients are not synchronised ({held})",
                "change policies right after a step that synchronised everything", self._group.core.rank,
            )  # fmt: skip
        try:
            self._reducer.schedule.set(pattern, every)
        except ValueError as error:
            raise MisuseError(
                f"sync_policy({pattern!r}, {error})", f'a positive number, "{ALWAYS}" or "{NEVER}"',
                self._group.core.rank,
            ) from None  # fmt: skip
        self._reducer.weights.clear()

    def buffer_policy(self, pattern: str, policy: str) -> None:
        """Set how the buffers matching `pattern` are kept equal.

        `"rank0"` (torch's, and the default): rank 0's are copied to all ranks before each training forward.
        `"mean"`: averaged over the ranks that took part after each synchronised step (running statistics of
        BatchNorm); integers take the largest. `"local"`: left alone. For a buffer that several policies match,
        the last one set counts. Every rank sets the same policies between the same two steps.
        """
        names = list(self.named_module_buffers)
        if not names:
            raise MisuseError(
                f"the pattern {pattern!r} matches no buffer: the model has none to keep equal",
                "no buffer_policy() for this model", self._group.core.rank,
            )  # fmt: skip
        if not matching(names, pattern):
            raise MisuseError(
                f"the pattern {pattern!r} matches no buffer", f"one that matches some of {_some(names)}",
                self._group.core.rank,
            )  # fmt: skip
        if policy not in _BUFFER_POLICIES:
            raise MisuseError(
                f"buffer_policy({pattern!r}, {policy!r})", f"one of {', '.join(_BUFFER_POLICIES)}",
                self._group.core.rank,
            )  # fmt: skip
        self._buffer_policies = [*self._buffer_policies, (pattern, policy)]

    def _buffers_with(self, policy: str) -> list[torch.Tensor]:
        if not self._buffer_policies:
            return self.modules_buffers if policy == "rank0" else []
        found = []
        for name, buffer in self.named_module_buffers.items():
            chosen = [wanted for pattern, wanted in self._buffer_policies if matching([name], pattern)]
            if (chosen[-1] if chosen else "rank0") == policy:
                found.append(buffer)
        return found

    def _average_buffers(self) -> None:
        """After a synchronised step. A rank that only followed it contributes nothing."""
        averaged = self._buffers_with("mean")
        if averaged and self._reducer.runners:
            buffers.average(self._group, averaged, self._group.core.rank in self._reducer.runners)

    def explain(self, norms: bool = False) -> str:
        """Print and return, per parameter, whether its gradient is local or synchronised.

        One line each: name, bucket, state, the synchronisation since which it is so, and how many
        micro-steps it holds that no synchronisation has seen. With `norms`, the norm of the gradient as it is now
        on each rank: equal once it is synchronised. Not a collective without `norms`; with it, every rank calls.
        """
        reducer, statistics = self._reducer, self._reducer.statistics
        buckets = {}
        if not reducer.stale:
            buckets = {i: str(bucket.index) for bucket in reducer.plan.buckets for i in bucket.members}
        columns = self._gradient_norms() if norms else []
        heads = "".join(f"{f'rank {rank}':>12}" for rank in range(len(columns)))
        lines = [f"{'parameter':40} {'bucket':>6}{heads}  gradient"]
        for index, (name, parameter) in enumerate(reducer.named):
            steps, since = statistics.micro_steps.get(index, 0), statistics.synchronised_at(index)
            if index in reducer.produced:
                state = f"local, holds {max(steps, 1)} micro-steps since synchronisation {since}"
            elif not since:
                state = "none yet" if parameter.grad is None else "local, never synchronised"
            else:
                state = f"synchronised, at synchronisation {since} of {statistics.flushes}"
            if not parameter.requires_grad:
                state += " (frozen)"
            shown = "".join(f"{column[index]:>12}" for column in columns)
            lines.append(f"{name:40} {buckets.get(index, '-'):>6}{shown}  {state}")
        text = "\n".join(lines)
        print(text)
        return text

    def _gradient_norms(self) -> list[list[str]]:
        """The norms of all gradients of every rank, as text; `-` where there is none. A collective."""
        mine = [None if p.grad is None else _norm(p.grad) for p in self._reducer.parameters]
        shown = "\n".join("-" if norm is None else f"{norm:.5g}" for norm in mine)
        nothing = ["-"] * len(mine)
        said = self._group.exchange(shown.encode(), "ddp.explain(norms=True)")
        return [text.decode().split("\n") if text else nothing for text in said]


def _some(names: Sequence[str]) -> str:
    """Name the first few."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _norm(gradient: torch.Tensor) -> float:
    values = gradient.detach()
    values = values.coalesce().values() if values.is_sparse else values
    return float(values.to(torch.complex128 if values.is_complex() else torch.float64).norm())
