"""Every collective of torch.distributed through the process group, on real processes."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from phalanx.errors import CollectiveTimeoutError, MisuseError, PeerLostError, RankMismatchError
from phalanx.group import autoload
from phalanx.group.process_group import PhalanxProcessGroup, for_process_group
from phalanx.testing import Ending, run
from tests import collective_programs as programs

processes = functools.partial(run, over="processes")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_call_with_every_dtype(size: int) -> None:
    def program(rank: int) -> tuple[int, ...]:
        return programs.every_copy(rank), programs.every_sum(rank), programs.every_reduction(rank)

    assert processes(size, program) == [(9 * 17 * 3, 4 * 15 * 3, 3 * 5 + 3 * 8 + 7)] * size


@pytest.mark.parametrize("size", [2, 3])
def test_everything_else_that_one_can_call(size: int) -> None:
    def program(rank: int) -> None:
        for part in (
            programs.unusual_tensors, programs.sizes_and_splits, programs.objects, programs.asynchronous,
            programs.messages, programs.sub_groups,
        ):  # fmt: skip
            part(rank)

    processes(size, program)


def test_half_precision_is_added_in_float32_and_rounded_once() -> None:
    def program(rank: int) -> list[float]:
        got = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
        async_got, scattered = got.clone(), got.clone()
        dist.all_reduce(got)
        dist.all_reduce(async_got, async_op=True).wait()
        dist.reduce_scatter(scattered, [got.new_tensor([256.0 if rank == 0 else 1.0])] * 4)
        return [got.item(), async_got.item(), scattered.item()]

    assert processes(4, program) == [[260.0] * 3] * 4


# -- ranks that disagree ---------------------------------------------------------------------------------


def _uneven() -> list[int]:
    return [1, 5, *[0] * (dist.get_world_size() - 2)]


_DISAGREEMENTS: dict[str, tuple[Callable[[], object], Callable[[], object], list[str]]] = {
    "size": (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.all_reduce(torch.ones(8)),
        ["all_reduce(4 x float32, op=SUM)", "all_reduce(8 x float32, op=SUM)"],
    ),
    "dtype": (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int64)),
        ["4 x float32", "4 x int64"],
    ),
    "call": (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.broadcast(torch.ones(4), 0),
        ["all_reduce(4 x float32, op=SUM)", "broadcast(4 x float32, root=0)"],
    ),
    "op": (
        lambda: dist.all_reduce(torch.ones(4), ReduceOp.MAX),
        lambda: dist.all_reduce(torch.ones(4), ReduceOp.MIN),
        ["op=MAX", "op=MIN"],
    ),
    "root": (
        lambda: dist.reduce(torch.ones(4), 0),
        lambda: dist.reduce(torch.ones(4), 1),
        ["root=0", "root=1"],
    ),
    "order": (
        lambda: (dist.barrier(), dist.all_reduce(torch.ones(4))),
        lambda: (dist.all_reduce(torch.ones(4)), dist.barrier()),
        ["barrier()", "all_reduce(4 x float32, op=SUM)"],
    ),
    "asynchronous": (
        lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
        lambda: dist.all_reduce(torch.ones(5), async_op=True).get_future().wait(),
        ["all_reduce(4 x float32, op=SUM)", "all_reduce(5 x float32, op=SUM)"],
    ),
    "splits": (
        lambda: dist.all_to_all_single(torch.empty(6), torch.ones(6), None, _uneven()),
        lambda: dist.all_to_all_single(torch.empty(6), torch.ones(6)),
        ["all_to_all(sends [1, 5", "expects ["],
    ),
}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_disagree_are_all_told_at_once_and_can_go_on(size: int) -> None:
    def program(rank: int) -> list[tuple[str, float, str, bool]]:
        told = []
        for name, (most, last, _) in _DISAGREEMENTS.items():
            began = time.monotonic()
            with pytest.raises(RankMismatchError) as caught:
                (last if rank == size - 1 else most)()
            took = time.monotonic() - began
            after = torch.full((33,), rank + 1.0)
            dist.all_reduce(after)
            told.append((name, took, str(caught.value), bool(after.eq(sum(range(1, size + 1))).all())))
        return told

    for rank, told in enumerate(processes(size, program)):
        assert [name for name, *_ in told] == list(_DISAGREEMENTS)
        for name, took, text, right_after in told:
            assert took < 2 and right_after, (name, took)
            assert all(call in text for call in _DISAGREEMENTS[name][2]), text
            assert f"[rank {rank}]" in text and (name == "splits" or text.count("test_collectives.py:") == 2), text


def test_a_message_that_does_not_fit_is_the_receivers_error() -> None:
    def program(rank: int) -> str:
        if rank == 0:
            dist.send(torch.ones(4), 1)
            dist.send(torch.ones(6), 1)
            return ""
        texts = []
        for tensor in (torch.zeros(4, dtype=torch.int32), torch.zeros(9)):
            with pytest.raises(RankMismatchError) as caught:
                dist.recv(tensor, 0)
            assert tensor.eq(0).all()
            texts.append(str(caught.value))
        return "\n".join(texts)

    text = processes(2, program)[1]
    for piece in ("send(4 x float32, dst=1", "recv(4 x int32, src=0", "send(6 x float32", "recv(9 x float32"):
        assert piece in text


# -- ranks that are late, or gone --------------------------------------------------------------------------


def test_timeouts_name_who_is_missing() -> None:
    def program(rank: int) -> list[CollectiveTimeoutError]:
        group, caught = dist.group.WORLD, []
        if rank == 0:
            for call in (
                lambda: dist.barrier(timeout=timedelta(seconds=0.2)),
                lambda: group.recv([torch.ones(1)], 2).wait(timedelta(seconds=0.2)),
                lambda: group.monitored_barrier(timedelta(seconds=0.2)),
                lambda: group.monitored_barrier(timedelta(seconds=0.2), wait_all_ranks=True),
            ):  # fmt: skip
                with pytest.raises(CollectiveTimeoutError) as error:
                    call()
                caught.append(error.value)
        else:
            time.sleep(1.5)
        return caught

    barrier, recv, first, every = processes(3, program)[0]
    assert barrier.missing == [1, 2] and "barrier() at" in barrier.call
    assert recv.missing == [2] and recv.seconds == 0.2
    assert first.missing == [1] and "Rank 1 failed to pass monitoredBarrier in 200 ms" in str(first)
    assert every.missing == [1, 2] and "Ranks 1, 2 failed to pass monitoredBarrier in 200 ms" in str(every)


@pytest.mark.parametrize("how", ["sync", "async", "recv", "sub-group"])
def test_a_rank_that_dies_is_named(how: str) -> None:
    def program(rank: int) -> float:
        sub = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            time.sleep(0.2)
            os._exit(3)
        if rank == 2 and how in ("recv", "sub-group"):
            return 0.0
        calls = {
            "sync": lambda: dist.all_reduce(torch.ones(10)),
            "async": lambda: dist.all_reduce(torch.ones(10), async_op=True).wait(),
            "recv": lambda: dist.recv(torch.ones(10), 1),
            "sub-group": lambda: dist.all_reduce(torch.ones(10), group=sub),
        }
        began = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            calls[how]()
        assert caught.value.peer == 1
        return time.monotonic() - began

    outcomes = processes(3, program, raises=False)
    assert [outcome.ending for outcome in outcomes] == [Ending.RETURNED, Ending.EXITED, Ending.RETURNED], outcomes
    assert outcomes[0].value < 1.5 and outcomes[2].value < 1.5


# -- life ----------------------------------------------------------------------------------------------


def test_groups_come_and_go_and_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"

    def program(rank: int) -> list[tuple[int, int]]:
        held = []
        for method in (
            "env://",
            "env://",
            f"file://{path}",
            "env://",
        ):  # the launcher's store outlives the groups
            dist.init_process_group("phalanx", init_method=method, rank=rank, world_size=2)
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
            dist.isend(torch.ones(100_000), 1 - rank)
            dist.recv(torch.ones(100_000), 1 - rank)
            dist.barrier()
            dist.destroy_process_group()
            with pytest.raises(MisuseError, match="has been shut down"):
                group.barrier()
            del group
            gc.collect()
            held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        return held

    for held in processes(2, program, backend=None):
        assert len(set(held)) == 1 and held[0][1] == 1, held


def test_a_forked_child_is_told_that_it_is_no_rank() -> None:
    def program(rank: int) -> str:
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            texts = []
            for asynchronous in (False, True):
                try:
                    dist.all_reduce(torch.ones(1), async_op=asynchronous)
                except MisuseError as error:
                    texts.append(str(error))
            os.write(writer, "\n".join(texts).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with open(reader) as file:
            text = file.read()
        dist.all_reduce(torch.ones(1))
        return text

    for rank, text in enumerate(processes(2, program)):
        assert text.count(f"forked from rank {rank}") == 2, text


def test_a_world_of_one_has_every_call() -> None:
    def program(rank: int) -> None:
        assert dist.group.WORLD.core.links == []
        for part in (
            programs.every_copy,
            programs.every_sum,
            programs.every_reduction,
            programs.asynchronous,
        ):
            part(rank)

    processes(1, program)


def test_a_group_beside_one_of_gloo_is_made_once() -> None:
    def program(rank: int) -> None:
        world = dist.group.WORLD
        beside = for_process_group(world, "the test")
        assert for_process_group(world, "the test") is beside and for_process_group(beside, "") is beside
        got = torch.ones(3)
        beside.allreduce([got]).wait()
        dist.all_reduce(got)
        assert got.eq(9).all()
        pair = dist.new_group([0, 2], timeout=timedelta(seconds=77))
        if rank != 1:
            small = for_process_group(pair, "the test")
            assert small.size() == 2 and small.core.timeout == 77
            small.barrier().wait()
        ours = dist.new_group([0, 1, 2], backend="phalanx")
        assert isinstance(ours, PhalanxProcessGroup)
        dist.broadcast(got, 1, group=ours)
        del world, pair
        dist.destroy_process_group()
        gc.collect()
        assert beside.closed

    processes(3, program, backend="gloo")


def test_what_torch_builds_on_a_process_group() -> None:
    def program(rank: int) -> None:
        from torch.distributed import _functional_collectives as functional
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        world = dist.group.WORLD
        assert functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", world)).eq(2).all()
        gathered = functional.all_gather_into_tensor_coalesced([torch.ones(2), torch.ones(3)], world)
        assert [len(functional.wait_tensor(tensor)) for tensor in gathered] == [4, 6]
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        assert sharded.redistribute(mesh, [Replicate()]).to_local().tolist() == list(range(8))
        layer = torch.nn.Linear(4, 4)
        fully_shard(layer)
        layer(torch.ones(1, 4)).sum().backward()
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        for _ in range(2):
            ddp(torch.full((1, 3), float(rank))).sum().backward()
        assert ddp.module.weight.grad.eq(1).all()

    processes(2, program)


def test_the_backend_is_registered_beside_the_others_and_not_instead() -> None:
    before = dict(dist.Backend.default_device_backend_map)
    plugin = dist.Backend._plugins["PHALANX"]
    autoload.register()
    assert dist.Backend._plugins["PHALANX"] is plugin
    assert dist.Backend.default_device_backend_map == before and before["cpu"] == "gloo"


# -- bad input -----------------------------------------------------------------------------------------


def _ones(count: int) -> torch.Tensor:
    return torch.ones(count)


_REFUSED: list[tuple[Callable[[PhalanxProcessGroup], object], str]] = [
    (lambda g: g.broadcast([_ones(1)], 5), "invalid root rank: 5"),
    (lambda g: g.broadcast([_ones(1), _ones(1)], 0), "requires a single-element tensor list"),
    (lambda g: g.broadcast([_ones(2).to_sparse()], 0), "only supports dense tensors"),
    (lambda g: g.allgather([[_ones(1)]], [_ones(1)]), "invalid output tensor list at index 0"),
    (lambda g: g.allgather([[_ones(2), _ones(2)]], [_ones(1)]), "invalid tensor size at index 0"),
    (lambda g: g.allgather([[_ones(1), _ones(1).int()]], [_ones(1)]), "invalid tensor type at index 1"),
    (lambda g: g.gather([[_ones(1)]], [_ones(1)], 0), "Incorrect output list size 1"),
    (lambda g: g.gather([[_ones(1)]], [_ones(1)], 1), "requires empty output on non-root"),
    (lambda g: g.scatter([_ones(1)], [[_ones(1)]], 0), "Incorrect input list size 1"),
    (lambda g: g.allreduce_coalesced([]), "requires non-empty tensor list"),
    (lambda g: g.allreduce_coalesced([_ones(1), _ones(1).int()]), "tensors must all have the same type"),
    (
        lambda g: g.all_gather_single(_ones(3), _ones(1)),
        "output tensor size must be equal to world_size times",
    ),
    (lambda g: g.reduce_scatter_single(_ones(3), _ones(1)), "input tensor size must be equal to world_size"),
    (lambda g: g.all_to_all_single(_ones(3), _ones(3), [], []), "does not divide equally across group size"),
    (
        lambda g: g.all_to_all_single(_ones(3), _ones(3), [1, 1], [2, 1]),
        "Split sizes doesn't match total dim 0",
    ),
    (lambda g: g.send([_ones(1)], 1, -3), "Tag must be nonnegative"),
    (lambda g: g.allreduce([_ones(1)], ReduceOp.BAND), "ReduceOp.BAND of float32"),
    (lambda g: g.allreduce([_ones(2).to_sparse()], ReduceOp.MAX), "only works with ReduceOp.SUM"),
]


def test_arguments_that_cannot_be_right_are_refused_before_anything_moves() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            for call, text in _REFUSED:
                with pytest.raises(MisuseError) as caught:
                    call(dist.group.WORLD)
                assert text in str(caught.value), (text, str(caught.value))
                if "ReduceOp" not in text or "SUM" in text:
                    assert isinstance(caught.value, ValueError) or "Tag" in text
        dist.barrier()

    processes(2, program)
