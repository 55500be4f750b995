"""One kit for every transport: what all of them must do, whatever they move data with."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import PeerLostError
from phalanx.group import ticket
from phalanx.group.accelerator import inner_group
from phalanx.group.arenas import make_arena
from phalanx.group.factory import transport_for
from phalanx.group.group import Group
from phalanx.group.ticket import Operation
from phalanx.testing import Ending, run
from phalanx.transport.backend import BackendGradients
from phalanx.transport.pieces import Cut
from phalanx.transport.protocol import Transport
from phalanx.transport.reductions import Reduction
from phalanx.transport.ring import GroupEndpoint, Ring
from phalanx.transport.shared_gradients import SharedGradients
from phalanx.transport.shm import SharedMemory, arena_bytes
from tests.collective_programs import COMPLEX, FLOATS, INTEGERS, same, summed, values

SLOT_BYTES = 4096  # so that a few thousand elements already go through in pieces
COUNTS = [0, 5, 3001]

Pair = tuple[Group, Transport]


def new_group(name: str) -> Group:
    """A further group of all ranks."""
    return Group(dist.group.WORLD.board, range(dist.get_world_size()), name, 10.0)


def shared_memory(name: str) -> Pair:
    core = new_group(name)
    return core, SharedMemory(
        core.rank, core.size, make_arena(core, arena_bytes(core.size, SLOT_BYTES)).memory, SLOT_BYTES
    )


def gloo(name: str) -> Pair:
    core = new_group(name)
    return core, transport_for(core, dist.PrefixStore(name, dist.group.WORLD.get_group_store()), "gloo")


def ring(name: str) -> Pair:
    core = new_group(name)
    return core, transport_for(core, dist.group.WORLD.get_group_store(), "ring")


def ring_over_gloo(name: str) -> Pair:
    core = new_group(name)
    store = dist.PrefixStore(name, dist.group.WORLD.get_group_store())
    group = inner_group("gloo", store, core.rank, core.size, dist.default_pg_timeout, core.members)
    return core, Ring(core.rank, core.size, GroupEndpoint(group))


TRANSPORTS = [shared_memory, gloo, ring]
each_transport = pytest.mark.parametrize("make", TRANSPORTS, ids=lambda make: make.__name__)
processes = functools.partial(run, over="processes")


def call(core: Group, move: Callable[..., None], *arguments: Any) -> None:
    """Run one collective; the ticket says nothing, since the kit makes no mistakes."""
    with core.collective(ticket.plain(Operation.EXCHANGE, 0, 0, 0, -1)) as fence:
        move(*arguments, fence)


# -- what they compute ------------------------------------------------------------------------------------


def reductions(rank: int, make: Callable[[str], Pair]) -> int:
    pair = make("sums")
    transport, size, compared = pair[1], dist.get_world_size(), 0
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]:
        for count in COUNTS:
            given = [values(r, count, dtype) for r in range(size)]
            mine, truth = given[rank], summed(given)
            for root in (-1, size - 1):
                got = mine.clone()
                call(pair[0], transport.reduce, got, Reduction.SUM, root)
                assert same(got, truth if root in (-1, rank) else mine), (dtype, count, root, got, truth)
            got, inputs = torch.empty_like(mine), [torch.roll(mine, r) for r in range(size)]
            call(pair[0], transport.reduce_scatter, got, inputs, Reduction.SUM)
            assert same(got, torch.roll(truth, rank)), (dtype, count, "reduce_scatter")
            compared += 3
    transport.close()
    return compared


def every_operation(rank: int, make: Callable[[str], Pair]) -> None:
    pair, size = make("kit"), dist.get_world_size()
    given = [torch.arange(1, 200) * (r + 3) % 17 + 1 for r in range(size)]
    truths = {
        Reduction.PRODUCT: functools.reduce(torch.mul, given),
        Reduction.MIN: functools.reduce(torch.minimum, given),
        Reduction.MAX: functools.reduce(torch.maximum, given),
        Reduction.BAND: functools.reduce(torch.bitwise_and, given),
        Reduction.BOR: functools.reduce(torch.bitwise_or, given),
        Reduction.BXOR: functools.reduce(torch.bitwise_xor, given),
        Reduction.AVG: torch.stack(given).sum(0) // size,
        Reduction.PREMUL_SUM: torch.stack(given).sum(0),
    }
    for dtype in (torch.int64, torch.int16, torch.float32, torch.bfloat16, torch.bool):
        for reduction, truth in truths.items():
            if dtype.is_floating_point and reduction in (
                Reduction.BAND,
                Reduction.BOR,
                Reduction.BXOR,
                Reduction.AVG,
            ):
                continue
            if dtype is torch.bool and reduction in (Reduction.AVG, Reduction.PREMUL_SUM):
                continue
            mine = (given[rank] % 2 if dtype is torch.bool else given[rank]).to(dtype, copy=True)
            want = truth.to(dtype)
            if dtype is torch.bool:
                bits = torch.stack([part % 2 for part in given])
                low, high = bits.min(0).values.bool(), bits.max(0).values.bool()
                want = {Reduction.MAX: high, Reduction.BOR: high, Reduction.BXOR: bits.sum(0) % 2 == 1}.get(
                    reduction, low
                )
            call(pair[0], pair[1].reduce, mine, reduction, -1)
            assert same(mine, want), (reduction, dtype, mine, want)
    thirds = torch.full((10,), float(rank + 1))
    call(pair[0], pair[1].reduce, thirds, Reduction.AVG, -1)
    assert thirds.eq((size + 1) / 2).all()
    pair[1].close()


def copies(rank: int, make: Callable[[str], Pair]) -> None:
    pair, size = make("kit"), dist.get_world_size()
    transport = pair[1]
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int16):
        for count in COUNTS:
            given = [values(r, count, dtype) for r in range(size)]
            bytes_each = count * dtype.itemsize
            outputs: list[Any] = [torch.empty_like(given[0]) for _ in range(size)]
            call(pair[0], transport.share, given[rank].clone(), outputs, bytes_each)
            assert all(map(same, outputs, given)), ("share", dtype, count)
            for root in range(size):
                got = torch.empty_like(given[0])
                wanted = [got if r == root and rank != root else None for r in range(size)]
                mine = given[root].clone() if rank == root else None
                call(pair[0], transport.share, mine, wanted, bytes_each)
                assert rank == root or same(got, given[root]), ("broadcast", dtype, count)
            # Rank i sends count + i + 2j elements to rank j, and nothing to rank 0 where i is 1.
            parts = [values(rank, count + rank + 2 * j, dtype) if (rank, j) != (1, 0) else None for j in range(size)]
            outputs = [torch.empty(count + i + 2 * rank, dtype=dtype) for i in range(size)]
            if rank == 0:
                outputs[1] = None
            largest = (count + 3 * (size - 1)) * dtype.itemsize
            call(pair[0], transport.route, parts, outputs, largest)
            for i, output in enumerate(outputs):
                assert output is None or same(output, values(i, count + i + 2 * rank, dtype)), (
                    "route",
                    dtype,
                    count,
                )
    transport.close()


@pytest.mark.parametrize("size", [2, 3])
@each_transport
def test_sums_of_every_dtype_and_copies_of_every_kind(make: Callable, size: int) -> None:
    def program(rank: int) -> int:
        copies(rank, make)
        return reductions(rank, make)

    assert processes(size, program) == [15 * len(COUNTS) * 3] * size


def test_a_ring_over_the_send_and_recv_of_another_backend() -> None:
    processes(2, copies, ring_over_gloo)
    processes(3, every_operation, ring_over_gloo)


@each_transport
def test_every_reduction(make: Callable) -> None:
    processes(3, every_operation, make)


@each_transport
def test_all_ranks_get_the_same_bits_and_the_same_again(make: Callable) -> None:
    def program(rank: int) -> list[bytes]:
        pair, got = make("kit"), []
        for _ in range(2):
            mine = torch.randn(3001, generator=torch.Generator().manual_seed(rank))
            call(pair[0], pair[1].reduce, mine, Reduction.SUM, -1)
            got.append(mine.numpy().tobytes())
        pair[1].close()
        return got

    everything = sum(processes(3, program), [])
    assert len(set(everything)) == 1


@each_transport
def test_half_precision_is_rounded_once(make: Callable) -> None:
    def program(rank: int) -> list[float]:
        pair = make("kit")
        one = torch.tensor([256.0 if rank == 0 else 1.0] * 5, dtype=torch.bfloat16)
        part, parts = one[:2].clone(), [one[:2].clone()] * 4
        call(pair[0], pair[1].reduce, one, Reduction.SUM, -1)
        call(pair[0], pair[1].reduce_scatter, part, parts, Reduction.SUM)
        pair[1].close()
        return [*one.tolist(), *part.tolist()]

    assert processes(4, program) == [[260.0] * 7] * 4


@each_transport
def test_two_in_flight_do_not_meet(make: Callable) -> None:
    def program(rank: int) -> None:
        pairs, wrong = [make("one"), make("two")], []

        def many(pair: Pair, unit: int) -> None:
            for step in range(30):
                mine = torch.full((2000 + unit,), float(unit * (rank + 1) + step))
                call(pair[0], pair[1].reduce, mine, Reduction.SUM, -1)
                if not mine.eq(unit * 3 + 2 * step).all():
                    wrong.append((unit, step, mine[0].item()))

        threads = [threading.Thread(target=many, args=(pair, 1000 * place)) for place, pair in enumerate(pairs, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong
        for _, transport in pairs:
            transport.close()

    processes(2, program)


@pytest.mark.parametrize("last_fence", [0, 1])
@pytest.mark.parametrize("make", [*TRANSPORTS, ring_over_gloo], ids=lambda make: make.__name__)
def test_a_peer_that_dies_in_the_middle_of_a_call_is_named(make: Callable, last_fence: int) -> None:
    def program(rank: int) -> float:
        pair = make("kit")
        data = torch.ones(200_000)
        call(pair[0], pair[1].reduce, data, Reduction.SUM, -1)

        class Deadly:
            """A fence that kills rank 1 before or after it passes for the first time."""

            def __init__(self, fence: Any) -> None:
                self._fence = fence

            @property
            def step(self) -> int:
                return self._fence.step

            def look_for_lost(self, *seconds: float) -> None:
                self._fence.look_for_lost(*seconds)

            def __call__(self) -> Any:
                if rank == 1 and last_fence == 0:
                    os._exit(5)
                answer = self._fence()
                if rank == 1:
                    os._exit(5)
                return answer

        began = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            call(pair[0], lambda fence: pair[1].reduce(data, Reduction.SUM, -1, Deadly(fence)))
        assert caught.value.peer == 1
        return time.monotonic() - began

    outcomes = processes(3, program, raises=False, timeout=20)
    assert [outcome.ending for outcome in outcomes] == [Ending.RETURNED, Ending.EXITED, Ending.RETURNED], outcomes
    assert outcomes[0].value < 2 and outcomes[2].value < 2


def test_a_call_that_raised_on_some_ranks_does_not_mix_the_slots_of_the_next() -> None:
    def program(rank: int) -> None:
        pair = shared_memory("kit")
        for step in range(4):
            with pytest.raises(RuntimeError):
                if rank == 0:  # posts into its slot before the tickets differ; the others never do
                    with pair[0].collective(ticket.plain(1, 1, 1, 9, -1)) as fence:
                        pair[1].reduce(torch.ones(9), Reduction.SUM, -1, fence)
                else:
                    pair[0].tickets(ticket.plain(Operation.BARRIER, 0, 0, 0, -1))
            got = torch.full((700,), rank + step + 1.0)
            call(pair[0], pair[1].reduce, got, Reduction.SUM, -1)
            assert got.eq(2 * step + 3).all(), (step, got[:3])

    processes(2, program)


# -- gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one piece", "pieces", "pieces and segments", "gloo", "ring"])
def test_gradients_are_scaled_sums_and_a_rank_of_weight_zero_is_not_read(kind: str) -> None:
    layout = [(torch.float32, 1001), (torch.bfloat16, 64)]
    cut = Cut() if kind == "one piece" else Cut(192, direct=2 if "segments" in kind else 3)

    def program(rank: int) -> list[list[float]]:
        if kind not in ("gloo", "ring"):
            core = dist.group.WORLD.core
            arena = make_arena(core, SharedGradients.bytes_needed(3, layout, cut))
            store: Any = SharedGradients(rank, 3, arena, layout, cut)
            assert len(store.pieces) == (1 if kind == "one piece" else 22)
            store.aside = True  # they are where the results go
        else:
            store = BackendGradients(dist.new_group([0, 1, 2], backend="phalanx", pg_options=kind), layout)
            core = dist.group.WORLD.core
        seen = []
        for scales in ([1 / 3] * 3, [0.25, 0.0, 0.75]):
            store.own[0].fill_(rank + 1.0)
            store.own[1].fill_(256.0 if rank == 0 else 1.0)
            if not scales[rank]:
                store.own[0].fill_(float("nan"))
            with core.collective(ticket.plain(Operation.GRADIENTS, 0, 0, 1, -1)) as fence:
                if kind not in ("gloo", "ring"):
                    store.begin(fence.step & 1)
                fence()
                store.reduce([(0, 0, 1000), (1, 3, 64)], scales, fence)
            seen.append([*store.own[0][[0, 999, 1000]].tolist(), *store.own[1][[2, 3, 63]].tolist()])
        return seen

    for rank, (mean, weighted) in enumerate(processes(3, program)):
        untouched = 256.0 if rank == 0 else 1.0
        assert mean == [2.0, 2.0, rank + 1.0, untouched, 86.0, 86.0]
        assert weighted[:2] == [2.5, 2.5] and weighted[3:] == [untouched, 65.0, 65.0]


def test_results_that_all_ranks_share_and_what_each_writes_to_its_own() -> None:
    layout, cut = [(torch.float32, 5000), (torch.bfloat16, 64)], Cut(1024, common=0)

    def program(rank: int) -> None:
        core = dist.group.WORLD.core
        store = SharedGradients(rank, 3, make_arena(core, SharedGradients.bytes_needed(3, layout, cut)), layout, cut)
        given = [torch.empty(count, dtype=dtype) for dtype, count in layout]

        def post(piece: int, turn: int, factor: float) -> None:
            for part in store.pieces[piece]:
                store.slot(turn, part).copy_(given[part.region][part.start : part.stop]).mul_(factor)

        def reduce(value: float, by_all: bool = True, takes: bool = True) -> bool:
            for each in given:
                each.fill_(value + rank)
            parted = b"\1" in core.exchange(bytes([store.must_part()]), "test")
            with core.collective(ticket.plain(Operation.GRADIENTS, 0, 0, 1, -1)) as fence:
                store.begin(fence.step & 1)
                fence()
                store.share(by_all, parted)
                store.reduce([(0, 0, 5000), (1, 3, 64)], [1 / 3] * 3, fence, takes)
            return store.shares

        def shows(value: float) -> bool:
            return store.own[0].eq(value).all().item() and store.own[1][3:].eq(value).all().item()

        store.post = post
        assert reduce(1.0) and shows(2.0) and store.own[1][:3].eq(0.0).all()
        kept = store.own[0][4000:]
        store.renew()
        assert reduce(2.0) and shows(3.0) and kept.eq(2.0).all()
        assert not reduce(3.0, by_all=False, takes=rank < 2)
        assert shows(4.0 if rank < 2 else 3.0)
        assert reduce(4.0) and shows(5.0)  # as if nothing had been between
        if rank == 1:
            store.own[0][4321] = 9.0
        assert store.own[0][4321] == (9.0 if rank == 1 else 5.0)
        assert not reduce(5.0) and shows(6.0) and not reduce(6.0) and shows(7.0)
        store.own[0].fill_(rank)
        dist.barrier()
        assert store.own[0].eq(rank).all()
        store.renew()
        assert not reduce(7.0) and shows(8.0)

    processes(3, program)


def test_in_pieces_the_mean_is_rounded_as_in_one() -> None:
    """Contributions are halved before they are added where that is exact; float16 has too few exponents for it."""
    dtypes, count = (torch.float32, torch.bfloat16, torch.float16), 100

    def program(rank: int) -> None:
        torch.manual_seed(rank)
        groups = {size: dist.new_group(list(range(size)), backend="phalanx") for size in (2, 4)}
        for size, dtype in itertools.product([size for size in groups if rank < size], dtypes):
            given = torch.randn(count).mul(1e-7 if dtype is torch.float16 else 1e-30).to(dtype)
            means = []
            for cut in (Cut(), Cut(64), Cut(64, direct=1)):
                core, layout = groups[size].core, [(dtype, count)]
                arena = make_arena(core, SharedGradients.bytes_needed(size, layout, cut))
                store = SharedGradients(rank, size, arena, layout, cut)
                store.own[0].copy_(given)
                store.aside = True
                with core.collective(ticket.plain(Operation.GRADIENTS, 0, 0, 1, -1)) as fence:
                    store.begin(fence.step & 1)
                    fence()
                    store.reduce([(0, 0, count)], [1 / size] * size, fence)
                means.append(store.own[0].clone())
            assert all(torch.equal(mean, means[0]) for mean in means), (size, dtype)

    processes(4, program)


# -- the ring --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ring_sends_the_fewest_messages_and_bytes_there_can_be(size: int) -> None:
    class Counting:
        """An endpoint that counts what it sends, and to whom."""

        def __init__(self, inner: Any) -> None:
            self.inner, self.sent = inner, []

        def send(self, peer: int, tensor: torch.Tensor, tag: int) -> Any:
            self.sent.append((peer, tensor.numel() * tensor.element_size()))
            return self.inner.send(peer, tensor, tag)

        def recv(self, peer: int, tensor: torch.Tensor, tag: int) -> None:
            self.inner.recv(peer, tensor, tag)

        def close(self) -> None:
            self.inner.close()

    def program(rank: int) -> list[tuple[int, int]]:
        core, transport = ring("kit")
        endpoint = Counting(transport._endpoint)
        counted = Ring(core.rank, core.size, endpoint)
        data = torch.ones(120_000)
        call(core, counted.reduce, data, Reduction.SUM, -1)
        assert data.eq(size).all()
        counted.close()
        return endpoint.sent

    for rank, sent in enumerate(processes(size, program)):
        assert sent == [((rank + 1) % size, 480_000 // size)] * (2 * size - 2)
