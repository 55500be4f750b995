"""What a wrapped model offers for uneven work: join, weights, accumulation, skipped steps."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import TypeVar, cast

import torch
from torch.distributed.algorithms.join import Joinable

from phalanx.errors import MisuseError
from phalanx.group.follow import Follower
from phalanx.group.ticket import Operation, State
from phalanx.parallel.epochs import pass_begins
from phalanx.parallel.join import Join
from phalanx.parallel.wrapped import Wrapped
from phalanx.reduce.distributed_autograd import current_context, refuse_with_contexts
from phalanx.reduce.roster import flush_leftovers
from phalanx.reduce.weighing import weigh

T = TypeVar("T")
_log = logging.getLogger("phalanx")


class Uneven(Wrapped):
    """Mixed into DistributedDataParallel."""

    _micro_steps = 0

    def weigh(self, loss: torch.Tensor, n: float) -> torch.Tensor:
        """Say that `loss` is a mean over `n` items of this rank (samples, tokens); return it to call backward on.

        The synchronised gradient is then the mean over all items of all ranks and of all micro-batches since
        the last synchronisation; do not divide the loss by the number of micro-batches. The value is left
        as it is, to be logged; `phalanx.mean(value, n)` gives the global figure. n = 0 is a rank without
        items: nothing of its loss counts, NaN included. An `n` that is no number, negative, NaN or infinite is a
        MisuseError.

        Every rank must weigh, or none: anything else is a RankMismatchError. Not a collective by itself.
        """
        items = _items(n, self._group.core.rank)
        # Weakly: the engine keeps the graph of a backward that raised, and with it what the graph holds.
        me, rank, local = weakref.ref(self._reducer), self._group.core.rank, self._local_now()

        def counted(n: float) -> float:
            reducer = me()
            if reducer is None:
                return 1.0  # the wrapper has been dropped, and with it all synchronisation
            reducer.watch.output_reached(local)
            try:
                reducer.notice_dropped()
                reducer.residue.check(reducer.parameters, reducer.weights)
                return reducer.weights.add(n)
            except ValueError as error:
                raise MisuseError(
                    str(error),
                    "one backward for each weighed loss, or the same n for all terms of a loss; and "
                    "optimizer.zero_grad() before the first micro-batch of a step",
                    rank,
                ) from None

        return weigh(loss, items, counted)

    @contextmanager
    def accumulate(self, every: int, last: bool = False) -> Iterator[bool]:
        """Accumulate gradients over `every` micro-batches; yields True on the one that synchronises.

        Put forward and backward inside. `last=True` says that this is the last micro-batch there is, so that
        a shorter round at the end of an epoch synchronises too; `micro_batches` says it by itself.
        """
        if every < 1:
            raise MisuseError(f"accumulate(every={every})", "a positive number", self._group.core.rank)
        self._micro_steps += 1
        if last or self._micro_steps >= every:
            self._micro_steps = 0
            yield True
        else:
            with self.no_sync():
                yield False

    def micro_batches(self, data: Iterable[T], every: int) -> Iterator[tuple[T, bool]]:
        """Iterate over `data` in rounds of `every`: (batch, whether its backward synchronises).

        The last round synchronises even if it is shorter. Step the optimizer after the backwards that do.
        """
        pass_begins(data)
        batches = iter(data)
        try:
            coming = next(batches)
        except StopIteration:
            return
        while True:
            batch, last = coming, False
            try:
                coming = next(batches)
            except StopIteration:
                last = True
            with self.accumulate(every, last) as syncs:
                yield batch, syncs
            if last:
                return

    def skip(self) -> None:
        """Give up this rank's part of the present step: the others complete theirs without it.

        Decided on this rank alone, before or after its forward, instead of its backward: a batch with NaN, a
        caught out-of-memory error, no valid sample. Afterwards this rank has the others' gradients, so that
        it steps its optimizer as they do; what it had accumulated before in this round still counts, unless a
        backward has raised half way through adding to it: then it is dropped, with a warning. If all ranks skip,
        gradients are as they were. In a micro-step that does not synchronise there is nothing more to do.

        Raises MisuseError in a context of torch.distributed.autograd, to which nothing can be added from here.
        """
        if current_context() is not None:
            refuse_with_contexts("skip()", self._group.core.rank)
        if self._reducer.forget_backward():
            self._reducer.drop_local()
            _log.warning(
                "[rank %d] skip(): a backward had raised half way through adding to accumulated gradients; all that "
                "this rank had accumulated since the last synchronised step is dropped", self._group.core.rank,
            )  # fmt: skip
        if self._local_now() >= self._reducer.everything:
            return
        self._follow_model()
        self._group.drain()  # the user's asynchronous collectives come first, on every rank
        follower, reducer = Follower(self._group.core), self._reducer
        if reducer.stale and not self.modules_buffers:  # else the others begin with the buffers, in their forward
            reducer.build()
        reducer.notice_dropped()
        if self._group.core.size == 1:
            if reducer.produced:
                reducer.flush(set())
            return
        while True:
            tickets = follower.follow(lambda: reducer.following_ticket(State.SKIPPING, 0))
            active = [t for t in tickets if t.state is State.ACTIVE]
            if not active:
                flush_leftovers(self._group.core, tickets)
                return
            if active[0].operation is Operation.GRADIENTS and active[0].tag == reducer.tag:
                if not reducer.schedule.coming:
                    return

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Let ranks run out of data at different times: `with ddp.join():` around the loop, on every rank.

        A rank that leaves the block follows the others' collectives until all have left, and contributes
        nothing but gradients that it has accumulated and not synchronised. True divides gradients by the
        initial world size, False by the ranks still running; weighed losses by the items seen. At the end all
        ranks have the same model. `enable=False` does nothing; see phalanx.Join for several models.
        """
        return Join(
            [cast(Joinable, self)], enable, throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )  # fmt: skip


def _items(n: float, rank: int) -> float:
    """A number of items, or a tensor or array that holds one, as a float; MisuseError for anything else."""
    try:
        if isinstance(n, torch.Tensor) and (n.numel() != 1 or n.is_complex()):
            raise TypeError
        negative, items = bool(n < 0), float(n)
    except (TypeError, ValueError, ArithmeticError):
        shape = f" of shape {tuple(n.shape)}" if isinstance(n, torch.Tensor) else ""
        wrong = f"n): this {type(n).__name__}{shape} is not a number of items"
    else:
        if isfinite(items) and not negative:
            return items
        wrong = f"n={items:g}): {'a negative number' if negative else 'not a finite number'} of items"
    raise MisuseError(
        f"weigh(loss, {wrong}",
        "ddp.weigh(loss, len(x)): as many items as the loss is a mean over, 0 where there are none",
        rank,
    )
