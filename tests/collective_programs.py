"""Programs for ranks that make every collective call and compare with torch's own arithmetic."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
COMPLEX = [torch.complex64, torch.complex128]
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, *EIGHT_BITS, torch.bool]
COUNTS = [0, 1, 300]


def values(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank gives: small numbers, different on every rank, exact in every dtype."""
    numbers = (torch.arange(count) * (rank + 2) + rank) % 4
    if dtype.is_complex:
        return torch.complex(numbers.double(), (3.0 - numbers).double()).to(dtype)
    return (numbers % 2 if dtype is torch.bool else numbers + 1).to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and bits are equal (dtypes without torch.equal included)."""
    one, other = one.detach().contiguous(), other.detach().contiguous()
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def summed(parts: list[Tensor]) -> Tensor:
    """The sum as it should be: in float32 for narrow floats, rounded once; or for bool."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        return torch.stack(parts).any(0)
    if dtype.is_floating_point and dtype.itemsize < 4:
        return functools.reduce(torch.add, [part.float() for part in parts]).to(dtype)
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return functools.reduce(torch.add, [part.to(torch.int64) for part in parts]).to(dtype)
    return functools.reduce(torch.add, parts)


def every_copy(rank: int, group: dist.ProcessGroup | None = None, dtypes: list[torch.dtype] = DTYPES) -> int:
    """Make every call that only copies; return how many were compared."""
    size, compared = dist.get_world_size(group), 0
    for dtype in dtypes:
        for count in COUNTS:
            given = [values(r, count, dtype) for r in range(size)]
            mine = given[rank]
            for root in (0, size - 1):
                got = mine.clone()
                dist.broadcast(got, group=group, group_src=root)
                assert same(got, given[root]), ("broadcast", dtype, count)

                parts = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
                dist.gather(mine, parts, group=group, group_dst=root)
                assert parts is None or all(map(same, parts, given)), ("gather", dtype, count)

                got = torch.empty_like(mine)
                dist.scatter(got, given if rank == root else None, group=group, group_src=root)
                assert same(got, mine), ("scatter", dtype, count)

            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(parts, mine, group=group)
            assert all(map(same, parts, given)), ("all_gather", dtype, count)

            whole = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(whole, mine, group=group)
            assert same(whole, torch.cat(given)), ("all_gather_into_tensor", dtype, count)

            parts = [torch.empty_like(mine) for _ in range(size)]
            dist.all_to_all(parts, [mine] * size, group=group)
            assert all(map(same, parts, given)), ("all_to_all", dtype, count)
            compared += 9
    return compared


def every_sum(rank: int, group: dist.ProcessGroup | None = None) -> int:
    """Make every call that adds; return how many were compared."""
    size, compared = dist.get_world_size(group), 0
    for dtype in [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]:
        for count in COUNTS:
            given = [values(r, count, dtype) for r in range(size)]
            mine, truth = given[rank], summed(given)
            got = mine.clone()
            dist.all_reduce(got, group=group)
            assert same(got, truth), ("all_reduce", dtype, count, got, truth)

            got = mine.clone()
            dist.reduce(got, group=group, group_dst=size - 1)
            assert same(got, truth if rank == size - 1 else mine), ("reduce", dtype, count)

            got = torch.empty_like(mine)
            dist.reduce_scatter(got, [mine] * size, group=group)
            assert same(got, truth), ("reduce_scatter", dtype, count)

            got = torch.empty_like(mine)
            dist.reduce_scatter_tensor(got, mine.repeat(size), group=group)
            assert same(got, truth), ("reduce_scatter_tensor", dtype, count)
            compared += 4
    return compared


_PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def every_reduction(rank: int, group: dist.ProcessGroup | None = None) -> int:
    """Make an all_reduce with every op that a dtype has; return how many were compared."""
    size, compared = dist.get_world_size(group), 0
    for dtype in [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.int16,
        torch.uint8,
        torch.bool,
    ]:
        given = [values(r, 100, dtype) for r in range(size)]
        for name, pairwise in _PAIRWISE.items():
            if dtype.is_floating_point and name.startswith("B"):
                continue
            got = given[rank].clone()
            dist.all_reduce(got, getattr(ReduceOp, name), group=group)
            if name == "SUM":
                truth = summed(given)
            elif name == "PRODUCT" and dtype is torch.bool:
                truth = torch.stack(given).all(0)
            else:
                truth = functools.reduce(pairwise, given)
            assert same(got, truth), (name, dtype, got, truth)
            compared += 1
        if dtype is not torch.bool:
            got = given[rank].clone()
            dist.all_reduce(got, ReduceOp.AVG, group=group)
            total = functools.reduce(torch.add, [part.double() for part in given]) / size
            truth = total.to(dtype) if dtype.is_floating_point else total.trunc().to(dtype)
            assert torch.allclose(got.double(), truth.double(), rtol=1e-6), ("AVG", dtype, got, truth)
            compared += 1
    return compared


def unusual_tensors(rank: int) -> None:
    """Tensors that are not plain memory: views, scalars, lazy conjugates, parameters, of inference."""
    size = dist.get_world_size()
    total = sum(range(1, size + 1))

    view = (torch.arange(12.0).view(3, 4) * (rank + 1)).t()
    dist.all_reduce(view)
    assert torch.equal(view, torch.arange(12.0).view(3, 4).t() * total) and not view.is_contiguous()

    strided = torch.full((10, 4), float(rank + 1))
    dist.all_reduce(strided[:, 1])
    assert strided[:, 1].eq(total).all() and strided[:, [0, 2, 3]].eq(rank + 1).all()

    outputs = [torch.zeros(3, 4).t() for _ in range(size)]
    dist.all_gather(outputs, view)
    assert all(torch.equal(output, view) for output in outputs)

    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    assert scalar.item() == total and scalar.dim() == 0

    conjugate = torch.complex(torch.ones(5), torch.full((5,), float(rank + 1))).conj()
    dist.group.WORLD.allreduce([conjugate]).wait()
    assert conjugate.is_conj() and conjugate.imag.eq(-total).all()
    negative = torch.complex(torch.zeros(1), torch.tensor([rank + 1.0])).conj().imag
    assert negative.is_neg()
    dist.all_reduce(negative)
    assert negative.item() == -total
    everybody = [torch.complex(torch.zeros(1), torch.zeros(1)).conj().imag for _ in range(size)]
    dist.all_gather(everybody, negative)
    assert all(each.is_neg() and each.item() == -total for each in everybody)

    parameter = torch.nn.Parameter(torch.full((3,), float(rank + 1)))
    dist.all_reduce(parameter)
    dist.broadcast(parameter, 0, async_op=True).wait()
    assert parameter.is_leaf and parameter.requires_grad and parameter.eq(total).all()

    with torch.inference_mode():
        result = torch.ones(1000) * (rank + 1)
        dist.all_reduce(result)
        assert result.eq(total).all()
        dist.all_reduce(result, async_op=True).wait()
    later = torch.ones(1000)
    dist.all_reduce(later)
    assert result.eq(total * size).all() and later.eq(size).all()

    sparse = torch.sparse_coo_tensor([[rank, size, size]], [1.0, 2.0, 3.0], (size + 1,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1.0] * size + [5.0 * size]


def sizes_and_splits(rank: int) -> None:
    """Tensors larger than the shared memory of a rank, uneven splits, coalesced calls."""
    size = dist.get_world_size()
    large = torch.arange(3_000_001, dtype=torch.float32) % 1000 * (rank + 1)
    truth = torch.arange(3_000_001, dtype=torch.float32) % 1000 * sum(range(1, size + 1))
    dist.all_reduce(large)
    assert torch.equal(large, truth)
    mine = torch.arange(1_500_000, dtype=torch.int64) + rank
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    assert all(torch.equal(part, mine - rank + r) for r, part in enumerate(parts))

    # Rank i sends i + j rows to rank j.
    sends, takes = [rank + j for j in range(size)], [i + rank for i in range(size)]
    given = (
        torch.repeat_interleave(torch.arange(size), torch.tensor(sends)).float().unsqueeze(1).repeat(1, 3) + 10 * rank
    )
    got = torch.empty(sum(takes), 3)
    dist.all_to_all_single(got, given, takes, sends)
    expected = torch.cat([torch.full((i + rank, 3), 10.0 * i + rank) for i in range(size)])
    assert torch.equal(got, expected), (got, expected)

    one, two = torch.full((3,), rank + 1.0), torch.full((2, 2), rank + 2.0)
    with dist._coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(two)
    assert one.eq(sum(range(1, size + 1))).all() and two.eq(sum(range(2, size + 2))).all()
    outputs = [torch.empty(size * 2), torch.empty(size * 3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(outputs[0], torch.full((2,), float(rank)))
        dist.all_gather_into_tensor(outputs[1], torch.full((3,), float(-rank)))
    manager.wait()
    ranks = torch.arange(float(size))
    assert torch.equal(outputs[0], ranks.repeat_interleave(2)) and torch.equal(outputs[1], -ranks.repeat_interleave(3))
    results = [torch.empty(2), torch.empty(1)]
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(results[0], torch.arange(2.0 * size))
        dist.reduce_scatter_tensor(results[1], torch.arange(1.0 * size))
    assert results[0].tolist() == [2 * rank * size, (2 * rank + 1) * size] and results[1].item() == rank * size


def objects(rank: int) -> None:
    """The object collectives and barriers."""
    size = dist.get_world_size()
    everybody = [None] * size
    dist.all_gather_object(everybody, {"rank": rank, "text": "x" * rank})
    assert everybody == [{"rank": r, "text": "x" * r} for r in range(size)]
    listed = [rank, "x"] if rank == 0 else [None, None]
    dist.broadcast_object_list(listed, 0)
    assert listed == [0, "x"]
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(("r", rank), gathered, 1)
    assert gathered is None or gathered == [("r", r) for r in range(size)]
    mine = [None]
    dist.scatter_object_list(mine, [str(r) for r in range(size)] if rank == 0 else None, 0)
    assert mine == [str(rank)]
    dist.barrier()


def asynchronous(rank: int) -> None:
    """Works: order, results, futures, and that a later synchronous call waits its turn."""
    size = dist.get_world_size()
    tensors = [torch.full((1000,), float(k)) for k in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    after = torch.ones(3)
    dist.all_reduce(after)  # queues behind the others, or ranks would disagree about the order
    assert all(work.is_completed() and work.is_success() for work in works)
    assert after.eq(size).all() and all(tensor.eq(k * size).all() for k, tensor in enumerate(tensors))
    assert works[3].wait() and works[3].result()[0] is tensors[3] and works[3].exception() is None

    first = torch.ones(2)
    future = dist.all_reduce(first, async_op=True).get_future()

    def again(done: torch.futures.Future) -> Tensor:
        total = done.value()[0] / size
        dist.all_reduce(total, async_op=True).wait()  # from whichever thread completes the future
        return total

    assert future.then(again).wait().eq(size).all()
    parts = [torch.empty(2) for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank)), async_op=True).wait()
    assert [part[0].item() for part in parts] == list(range(size))
    dist.barrier(async_op=True).wait()


def messages(rank: int) -> None:
    """Send and recv: tags in any order, any source, large ones crossing, a rank's own."""
    size = dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for tag in (1, 2, 3):
        dist.isend(torch.full((5,), 10.0 * rank + tag), right, tag=tag)
    for tag in (3, 1, 2):
        got = torch.empty(5)
        dist.recv(got, left, tag=tag)
        assert got.eq(10 * left + tag).all()

    large = torch.full((600_000,), float(rank))
    sent = dist.isend(large, right, tag=7)
    small = dist.isend(torch.full((1,), -1.0 - rank), right, tag=7)  # may not overtake
    dist.barrier()  # nor may the message hold up a collective
    one, two = torch.empty(600_000), torch.empty(1)
    first, second = dist.irecv(one, left, tag=7), dist.irecv(two, left, tag=7)
    second.wait()
    assert first.is_completed() and one.eq(left).all() and two.item() == -1 - left
    sent.wait(), small.wait()

    if rank:
        dist.send(torch.tensor([float(rank)]), 0, tag=9)
    else:
        got, sources = torch.empty(1), []
        for _ in range(size - 1):
            source = dist.recv(got, tag=9)
            assert got.item() == source
            sources.append(source)
        assert sorted(sources) == list(range(1, size))

    own = torch.empty(2, dtype=torch.bool)
    request = dist.irecv(own, rank)
    dist.isend(torch.tensor([True, False]), rank).wait()
    request.wait()
    assert own.tolist() == [True, False]

    given, taken = torch.full((2, 2), float(rank)).t(), torch.zeros(4, 2).t()[:, ::2]
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, given, right), dist.P2POp(dist.irecv, taken, left)]):
        work.wait()
    assert taken.eq(left).all()
    request = dist.irecv(got := torch.empty(1), left, tag=11)
    dist.send(torch.tensor([rank + 0.5]), right, tag=11)
    assert request.get_future().wait()[0] is got and got.item() == left + 0.5
    dist.barrier()


def sub_groups(rank: int) -> None:
    """Groups of some ranks, overlapping, made and destroyed in turn; all share the world's links."""
    size = dist.get_world_size()
    for _ in range(2):
        groups = [dist.new_group([r, (r + 1) % size]) for r in range(size)]
        for start, group in enumerate(groups):
            if rank in (start, (start + 1) % size):
                got = torch.full((50_000,), rank + 1.0)
                dist.all_reduce(got, group=group)
                assert got.eq(start + 1 + (start + 1) % size + 1).all()
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
    backwards = dist.new_group(list(range(size)), group_desc="all of us")
    assert backwards.group_desc == "all of us" and dist.get_backend(backwards) == "phalanx"
    for _ in range(2):  # twice the same name; rank 1 still has the first group when rank 0 makes the second
        if rank < 2:
            local = dist.new_group([0, 1], use_local_synchronization=True)
            got = torch.tensor([rank])
            dist.broadcast(got, 1, group=local)
            assert got.item() == 1
            if rank == 1 and size > 2:
                dist.recv(torch.empty(1), 2)  # reads what rank 0 sends to the second group, too
            dist.destroy_process_group(local)
        elif rank == 2:
            time.sleep(0.2)
            dist.send(torch.ones(1), 1)
    alone = [dist.new_group([r]) for r in range(size)][rank]
    got = torch.ones(3)
    dist.all_reduce(got, group=alone)
    assert got.eq(1).all()
    dist.barrier()
