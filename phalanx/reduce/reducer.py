"""The reducer: makes the gradients of one model the mean over all ranks when backward ends.

One backward, seen from here:

    begins    the first sign of it: every parameter without a gradient is lent its zeroed place in shared
              memory (places.py)
    ended     the outermost backward is over (watch.py): synchronise, or keep the gradients local
    flush     tickets with the used-parameter bitmap; what some rank used is reduced; commit; parameters
              that nobody used get back the gradient they had

Ranks wait for one another at the end of backward, never earlier: a rank that waited for a bucket in the middle of its
backward could hold up a collective of another rank's backward (SyncBatchNorm) that it only reaches afterwards. What
travels over a wire is sent off while backward runs (early.py), without waiting; in shared memory nothing is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch

from phalanx.errors import InternalError
from phalanx.group import ticket
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.group.ticket import State, Ticket
from phalanx.reduce import early, sparse, weighing
from phalanx.reduce.agreement import contributions, factors_of, used_somewhere
from phalanx.reduce.bucket import HookRunner
from phalanx.reduce.distributed_autograd import Contexts, refuse_with_contexts, shown
from phalanx.reduce.model import compare_models, entries_of
from phalanx.reduce.monitor import Monitor
from phalanx.reduce.places import Places
from phalanx.reduce.plan import Plan, fingerprint, make_plan
from phalanx.reduce.residue import Residue
from phalanx.reduce.roster import reducers, serve_flushes
from phalanx.reduce.schedule import Round, Schedule
from phalanx.reduce.statistics import Statistics
from phalanx.reduce.tickets import Tickets
from phalanx.reduce.watch import Local, Watch, weakly
from phalanx.reduce.weights import Weights
from phalanx.transport.protocol import Fence

_NONE: Local = frozenset()


def _nothing() -> None:
    pass


class Reducer:
    """Synchronises the gradients of `named` parameters (all of which require one) over `group`.

    `sparse_names` are parameters that receive sparse gradients; `caps` are bucket sizes in bytes.
    `local_now()` gives, when a backward ends, the numbers of the parameters to keep local; for `frozen` and
    `unfrozen()` see adopt(). The reducer must be built before its first flush, and again when it is `stale`.
    """

    def __init__(
        self,
        group: PhalanxProcessGroup,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        sparse_names: frozenset[str],
        caps: Sequence[int],
        local_now: Callable[[], Local],
        frozen: Sequence[torch.nn.Parameter] = (),
        unfrozen: Callable[[], None] = _nothing,
    ) -> None:
        self.group, self.caps = group, tuple(caps)
        self.weights, self.residue, self.schedule, self.statistics = Weights(), Residue(), Schedule(), Statistics()
        self.divisor: int | None = None
        self.comm_hook: HookRunner | None = None
        self.takes_when_joined = False  # a rank out of data keeps its gradients, unless an optimizer needs the others'
        self.lend_places = True  # whether autograd accumulates straight into gradient memory
        self.before_end: Callable[[], None] = _nothing
        self.monitor = Monitor()
        self.on_build: Callable[[], None] = _nothing
        self.after_flush: list[Callable[[], None]] = []
        self.skippers: list[int] = []  # ranks that have skipped the step of the last flush; then those that have run it
        self.runners: list[int] = []
        self.stale = True
        self.produced: set[int] = set()  # not synchronised since they were produced
        self.named: list[tuple[str, torch.nn.Parameter]] = []
        self.watch = Watch(weakly(self.backward_begins), weakly(self._ended), unfrozen)
        self.contexts = Contexts(weakly(self.watch.leaf_reached))
        self._local_now, self._sparse_names, self._early = local_now, sparse_names, early.Late()
        self._places: Places | None = None
        self._number = self._tag = -1
        reducers.add(self)
        self.adopt(named, frozen)

    # -- parameters ----------------------------------------------------------------------------------

    def adopt(self, named: Sequence[tuple[str, torch.nn.Parameter]], frozen: Sequence[torch.nn.Parameter] = ()) -> None:
        """Take these parameters instead of the present ones; their places are made at the next flush.

        If one of `frozen` gets a gradient all the same, `unfrozen()` is called when that backward has ended.
        """
        pending = {id(self.named[index][1]) for index in self.produced}
        self.named = list(named)
        self.parameters = [parameter for _, parameter in named]
        self.produced = {index for index, parameter in enumerate(self.parameters) if id(parameter) in pending}
        self.everything = frozenset(range(len(named)))
        self.watch.put_on(self.parameters, frozen)
        self.contexts.watch(self.parameters, frozen)
        self.statistics.size = len(named)
        self.schedule.name([name for name, _ in named])
        self.stale = True

    def build(self) -> None:
        """Make the plan and the places. A collective: every rank, with the same parameters."""
        entries = entries_of(self.named, self._sparse_names)
        self._number = compare_models(self.group, entries, fingerprint(entries, self.caps), self._number)
        self._places = Places(self.group, make_plan(entries, self.caps), self.parameters, self._places)
        self._early = early.made_for(
            self.group, self._places, self.parameters, self.watch, weakly(self._may_begin_early), self._early
        )
        self._tag = (self.plan.fingerprint + 2 * self._number * 0x9E3779B97F4A7C15) % (1 << 63) & ~1
        self._sparse = [index for index, entry in enumerate(entries) if entry.sparse]
        self._tickets = Tickets(len(self.named), sum(entry.count for entry in entries), self._tag)
        serve_flushes(self, self._tag)
        size = self.group.core.size
        self._all_ranks, self._mean, self._whole = list(range(size)), [1.0 / size] * size, tuple(self.plan.whole())
        self.stale = False
        self.on_build()

    @property
    def plan(self) -> Plan:
        """The bucket plan."""
        return self.places.plan

    @property
    def places(self) -> Places:
        """Where the gradients are."""
        if self._places is None:
            raise InternalError("a reducer is used before it is built")
        return self._places

    # -- during backward -----------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Note the first sign of a backward: parameters without a gradient are lent their places."""
        self.monitor.begins()
        if self._places is not None and not self.stale and self.lend_places:
            emptied = self._places.lend()
            if self.produced:
                self.produced.difference_update(emptied)  # the user has dropped these
                self.weights.dropped(bool(self.produced))
        self._early.backward_begins()

    def _may_begin_early(self) -> bool:
        """Whether this backward is one of which all gradients are averaged as they are, as far as is known."""
        plain = self.divisor in (None, self.group.core.size) and self.comm_hook is None and not self.weights.weighed
        return plain and not (self.stale or self.schedule.policies or any(self.watch.forwards) or self._local_now())

    def forget_backward(self) -> bool:
        """Clean up after a backward that never ended (it raised). Called at every forward.

        Returns whether it has added to gradients that are not synchronised yet.
        """
        if not self.watch.running:
            return False
        fired = self.watch.abandon()
        self._take_back(fired)
        self.contexts.forget()
        self.weights.dropped(bool(self.produced))
        return not self.produced.isdisjoint(fired)

    def drop_local(self) -> None:
        """Drop the gradients that this rank has accumulated since the last flush, and their items."""
        for index in self.produced:
            self.parameters[index].grad = None
        self._forget_local()

    def notice_dropped(self) -> None:
        """Forget the items of gradients that the user has dropped, by zeroing them too."""
        if self.residue.is_dropped(self.weights):
            self._forget_local()

    def _forget_local(self) -> None:
        self.produced &= self.places.held_among(self.parameters)
        self.weights.drop_round(bool(self.produced))

    def _take_back(self, kept: Collection[int]) -> None:
        if self._places is not None:
            self._places.take_back(kept)

    def _ended(self, fired: frozenset[int], forwards: list[Local]) -> None:
        self.before_end()
        in_context = self.contexts.gradients(bool(fired), self.group.core.rank)
        if in_context is not None:
            self._ended_in_context(in_context, fired, forwards)
            if not fired:
                return
        if self._places is not None and not self.stale:
            untouched = self._places.untouched()  # a hook also runs when the gradient turned out undefined
            fired = fired - untouched if untouched else fired
        weighing.close_backward(self.weights, bool(fired), self.group.core.rank)
        if not fired and not (forwards and self.watch.is_accumulating()):
            self._take_back(_NONE)
            return
        local = self._local_in(forwards)
        if local or self.schedule.policies:
            self.statistics.accumulated(fired)
        if local and local >= self.everything:
            self._take_back(fired)
            self.produced |= fired
            self.residue.left(self.parameters, self.weights)
            self.monitor.kept_local()
            return
        if local and self.weights.weighed:
            self._take_back(fired)
            weighing.refuse_pattern(self.weights, self.group.core.rank)
        self.flush(fired, local)

    def _local_in(self, forwards: Sequence[Local]) -> Local:
        local = self._local_now()
        if forwards and (len(forwards) > 1 or forwards[0]):
            local |= frozenset.intersection(*forwards)
        return local

    def _ended_in_context(
        self, gradients: dict[int, torch.Tensor], fired: frozenset[int], forwards: Sequence[Local]
    ) -> None:
        """Synchronise what a backward of torch.distributed.autograd has left in its context; not what has `fired`."""
        self._take_back(fired)
        self.watch.take_in(gradients)
        weighing.close_backward(self.weights, True, self.group.core.rank)
        if call := "weigh()" if self.weights.weighed else "sync_policy()" if self.schedule.policies else "":
            self.weights.clear()
            refuse_with_contexts(call, self.group.core.rank)
        local = self._local_in(forwards)
        if local and local >= self.everything:
            self.monitor.kept_local()  # the context adds to it
            return
        pending, self.produced = self.produced, set()
        try:
            with shown(self.named, gradients, self.group.core.rank):
                self.flush({i for i in self.everything - local if id(self.parameters[i]) in gradients}, local)
        finally:
            self.produced = pending

    # -- synchronising -------------------------------------------------------------------------------

    def flush(self, fired: Collection[int], local: Local = _NONE, said: Sequence[Ticket] = ()) -> None:
        """Synchronise what has been produced since the last time, but for the parameters in `local`.

        A collective: every rank of the group, with the same `local`. `said` are the tickets of ranks that all
        follow: only what these have left counts then.
        """
        started = time.perf_counter()
        self.group.drain()  # the user's asynchronous collectives come first, on every rank
        if self.stale:
            self.build()
        places = self.places
        self.produced.update(fired)
        foreign = places.settle(self.produced, local)
        apart, begun = places.memory.must_part(bool(self.schedule.policies)), self._early.backward_ended()
        self._tickets.say(self.monitor.flushing(), apart, begun)
        rounds = self.schedule.due(self.everything, local)
        if self.weights.weighed:
            self.weights.enter(self.schedule.ledgers)
        shown: set[int] = set()
        usual = len(rounds.due) == 1 and not rounds.held
        for each in rounds.due:
            with self.group.core.collective(self._wire(each)) as fence:
                if self._posts:
                    places.post(fence.step, at_home=self.comm_hook is not None)
                got = fence()
                used, factors = self._agreed(ticket.of_followers(got, said) if said else got)
                self._reduce(used, factors, fence)
            if said:
                places.show(used)  # no backward has lent places
            self._complete(used, factors, foreign, each)
            if not (usual and len(used) == len(self.named)):
                shown.update(used)
                usual = False
        if usual:
            places.keep_all()
            self._early.learn()
        else:
            places.take_back(shown | self.produced)
            places.hold_back(rounds.held)
        self._over(started)

    def _over(self, started: float) -> None:
        self.weights.leave(bool(self.produced))
        self.statistics.flushed(started, self.plan)
        for call in self.after_flush:
            call()

    def _reduce(self, used: Sequence[int], factors: list[float], fence: Fence, takes: bool = True) -> None:
        self._tickets.say_begun((0, False))
        if self._early.reduce(factors[self.group.core.rank], fence):
            return
        if self.comm_hook is not None or (not self._posts and factors == [1.0]):
            return
        if not self._posts:
            self.places.post(0, at_home=True)
        spans = self._whole if len(used) == len(self.named) else self.plan.spans(used)
        self.places.memory.reduce(spans, factors, fence, takes)

    @property
    def _posts(self) -> bool:
        """Whether contributions are posted before it is known what comes of them; one rank alone waits for that."""
        return self.group.core.size > 1 or self.comm_hook is not None

    def _complete(
        self, used: Sequence[int], factors: list[float], foreign: Sequence[int], each: Round, takes: bool = True
    ) -> None:
        """What needs no common fence: communication hooks, sparse gradients, handing the results out."""
        places = self.places
        if self.comm_hook is not None:
            self.comm_hook.run(self.plan, places.memory, self.parameters, places.views, used, factors, takes)
        for index in self._sparse:
            if index in used:
                sparse.reduce(self.group, self.parameters[index], factors, takes)
        if takes and (len(used) != len(self.named) or places.held or places.hidden):
            places.held.difference_update(used)
            places.show(used)
        places.hand_out(used, foreign)
        if each.members is None:
            self.produced.clear()
        else:
            self.produced -= each.members
        self.weights.synchronised(each.ledger)
        self.statistics.synchronised(used, each.members)

    def _wire(self, each: Round) -> bytes:
        """The encoded ticket of a round; of the usual one, ready since the reducer was built."""
        weights, usual = self.weights, each.members is None and self.comm_hook is None
        if usual and not weights.weighed and len(self.produced) == len(self.named):
            return self._tickets.usual
        return self._ticket(each).encode()

    def _ticket(self, each: Round, state: State = State.ACTIVE, followed: int = 0) -> Ticket:
        return self._tickets.of_round(each, self.produced, self.weights, self.tag, state, followed)

    @property
    def tag(self) -> int:
        """What tells this reducer's flushes from all others; changes with the communication hook."""
        return self._tag ^ (1 if self.comm_hook is not None else 0)

    def _agreed(self, wires: list[bytes]) -> tuple[Sequence[int], list[float]]:
        """What the tickets of all ranks say: the parameters used somewhere, and each rank's factor."""
        if self.divisor in (None, len(wires)) and all(wire == self._tickets.usual for wire in wires):
            # The usual case, told by the bytes: every rank used every parameter, and nobody weighs.
            self.skippers, self.runners = [], self._all_ranks
            self.statistics.used_by(wires)
            self.places.memory.share(True)
            self._early.agree(*self._tickets.begun)
            return range(len(self.named)), self._mean
        heard = [ticket.decode(wire) for wire in wires]
        self.monitor.heard = [t.digest for t in heard]
        self.skippers = [rank for rank, t in enumerate(heard) if t.state is State.SKIPPING]
        self.runners = [rank for rank, t in enumerate(heard) if t.state is State.ACTIVE]
        self.places.memory.share(len(self.runners) == len(heard), any(t.apart for t in heard))
        self._early.agree(max(t.begun for t in heard), False)
        tickets = contributions(heard, self.tag)
        self.statistics.used_by([t.encode() for t in tickets])
        used = used_somewhere(tickets, ticket.round_members(heard), len(self.named))
        return used, factors_of(tickets, self.divisor, self.group.core.rank)

    # -- following -----------------------------------------------------------------------------------

    def following_ticket(self, state: State, followed: int) -> Ticket:
        """The ticket of this rank while it follows; gradients not synchronised yet go with it."""
        self.places.settle(self.produced, self._local_now())
        self.weights.enter(self.schedule.ledgers)
        self._tickets.say_begun((self._early.begun()[0], False))
        return self._ticket(Round(None, next(iter(self.schedule.coming), 0)), state, followed)

    def follow(self, got: list[bytes], fence: Fence) -> Callable[[], None]:
        """Take part in a flush of the other ranks, whose tickets are `got`; return what comes after it."""
        started, places = time.perf_counter(), self.places
        heard = [ticket.decode(wire) for wire in got]
        mask = ticket.round_members(heard)
        own = ticket.as_contribution(heard[self.group.core.rank], self.tag, mask)
        places.settle(self.produced, self._local_now())
        places.post(fence.step, at_home=self.comm_hook is not None)
        fence()  # where those in the flush have exchanged tickets
        used, factors = self._agreed(got)
        takes = own.state is not State.JOINED or self.takes_when_joined
        foreign = places.foreign_among(used) if takes else []
        self._reduce(used, factors, fence, takes)
        if takes:
            places.show(used)
        each = self.schedule.round_of(frozenset(ticket.members(mask)) if mask else None)
        return partial(self._followed, used, factors, foreign, each, started, takes)

    def _followed(
        self, used: Sequence[int], factors: list[float], foreign: Sequence[int], each: Round, began: float, takes: bool
    ) -> None:
        self._complete(used, factors, foreign, each, takes)
        if self.schedule.policies:
            local = self._local_now()
            self.schedule.followed(each, local)
            self.places.hold_back(self.schedule.held() - local)
        self._over(began)
