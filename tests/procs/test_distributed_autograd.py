"""Gradients that torch.distributed.autograd keeps in a context, of programs that train over RPC."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss

from phalanx import DistributedDataParallel
from phalanx.testing import WorldError, oracle, run

TOLERANT = {"rtol": 1e-5, "atol": 1e-6}
LOOPBACK = {"TP_SOCKET_IFNAME": "lo"}


Means = dict[str, Tensor | None]


def _in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(rank: int, step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 3, generator=generator), torch.randn(2, 2, generator=generator)


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return mse_loss(module(batch[0]), batch[1])


@contextmanager
def agent(rank: int, world: int, meeting: Path) -> Iterator[None]:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting}", rpc_timeout=20)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown(graceful=False)


def of_context(ddp: nn.Module, context: int) -> Means:
    found = {id(leaf): gradient for leaf, gradient in dist_autograd.get_gradients(context).items()}
    return {name.removeprefix("module."): found.get(id(p)) for name, p in ddp.named_parameters()}


def means(world: int, steps: int = 1) -> Means:
    return oracle.gradients(model(), loss, [[batch(rank, step) for step in range(steps)] for rank in range(world)])


@pytest.mark.parametrize(("world", "backend"), [(1, "phalanx"), (2, "phalanx"), (3, "phalanx"), (2, "gloo")])
def test_the_context_has_the_means_and_p_grad_is_left_alone(world: int, backend: str, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with agent(rank, world, tmp_path / "meeting"):
            ddp = DistributedDataParallel(model())
            for _ in range(2):
                with dist_autograd.context() as context:
                    dist_autograd.backward(context, [loss(ddp, batch(rank))])
                    oracle.assert_close(of_context(ddp, context), means(world), **TOLERANT)
                assert all(p.grad is None for p in ddp.parameters())
            torch.autograd.grad(loss(ddp, batch(rank)), list(ddp.parameters()))  # it synchronises nothing
            loss(ddp, batch(rank, 1)).backward()
            usual = oracle.gradients_of(ddp)
            oracle.assert_close(
                usual, oracle.gradients(model(), loss, [[batch(r, 1)] for r in range(world)]), **TOLERANT
            )
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [loss(ddp, batch(rank))])
                oracle.assert_close(of_context(ddp, context), means(world), **TOLERANT)
            oracle.assert_close(oracle.gradients_of(ddp), usual, rtol=0, atol=0)

    run(world, program, over="processes", backend=backend, env=LOOPBACK)


def test_a_forward_that_goes_through_another_process(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with agent(rank, 2, tmp_path / "meeting"):
            ddp = DistributedDataParallel(model())
            inputs, targets = batch(rank)
            with dist_autograd.context() as context:
                doubled = rpc.rpc_sync(f"worker{1 - rank}", torch.mul, args=(ddp(inputs), 2.0))
                dist_autograd.backward(context, [mse_loss(doubled, targets)])
                expected = oracle.gradients(
                    model(), lambda m, b: mse_loss(2.0 * m(b[0]), b[1]), [[batch(0)], [batch(1)]]
                )
                oracle.assert_close(of_context(ddp, context), expected, **TOLERANT)
                ddp._group.barrier().wait()

    run(2, program, over="processes", env=LOOPBACK)


def test_what_no_sync_leaves_in_the_context_is_synchronised_with_the_next(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with agent(rank, 2, tmp_path / "meeting"):
            ddp = DistributedDataParallel(model())
            with dist_autograd.context() as context:
                with ddp.no_sync():
                    dist_autograd.backward(context, [loss(ddp, batch(rank))])
                own = oracle.gradients(model(), loss, [[batch(rank)]])
                oracle.assert_close(of_context(ddp, context), own, **TOLERANT)
                dist_autograd.backward(context, [loss(ddp, batch(rank, 1))])
                oracle.assert_close(of_context(ddp, context), means(2, steps=2), **TOLERANT)

    run(2, program, over="processes", env=LOOPBACK)


def test_a_layer_that_stays_local(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with agent(rank, 2, tmp_path / "meeting"):
            ddp = DistributedDataParallel(model())
            with dist_autograd.context() as context:
                with ddp.no_sync("0.*"):
                    dist_autograd.backward(context, [loss(ddp, batch(rank))])
                own, mean = oracle.gradients(model(), loss, [[batch(rank)]]), means(2)
                expected = {name: own[name] if name.startswith("0.") else mean[name] for name in own}
                oracle.assert_close(of_context(ddp, context), expected, **TOLERANT)

    run(2, program, over="processes", env=LOOPBACK)


def test_a_communication_hook_and_sparse_gradients(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with agent(rank, 2, tmp_path / "meeting"):
            hooked = DistributedDataParallel(model())
            hooked.register_comm_hook(None, allreduce_hook)
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [loss(hooked, batch(rank))])
                oracle.assert_close(of_context(hooked, context), means(2), **TOLERANT)
            table = DistributedDataParallel(nn.Embedding(5, 2, sparse=True))
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [table(torch.tensor([rank, 4])).sum()])
                gradient = of_context(table, context)["weight"]
                assert gradient is not None and gradient.layout is torch.sparse_coo
                rows = [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
                assert gradient.to_dense().tolist() == rows

    run(2, program, over="processes", env=LOOPBACK)


def test_a_rank_out_of_data_is_followed(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with agent(rank, 2, tmp_path / "meeting"):
            ddp = DistributedDataParallel(model())
            with ddp.join():
                for step in range(1 + rank):
                    with dist_autograd.context() as context:
                        dist_autograd.backward(context, [loss(ddp, batch(rank, step))])
                        if step == 1:
                            own = oracle.gradients(model(), loss, [[batch(1, 1)]], divisor=2)
                            oracle.assert_close(of_context(ddp, context), own, **TOLERANT)

    run(2, program, over="processes", env=LOOPBACK)


def _weighed(ddp: DistributedDataParallel, rank: int) -> None:
    with dist_autograd.context() as context:
        try:
            dist_autograd.backward(context, [ddp.weigh(loss(ddp, batch(rank)), 2)])
        finally:  # it leaves nothing behind
            dist_autograd.backward(context, [loss(ddp, batch(rank))])


def _policy(ddp: DistributedDataParallel, rank: int) -> None:
    ddp.sync_policy("0.*", every=2)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [loss(ddp, batch(rank))])


def _skip(ddp: DistributedDataParallel, rank: int) -> None:
    with dist_autograd.context():
        ddp.skip()


def _unused_here(ddp: DistributedDataParallel, rank: int) -> None:
    inputs, _ = batch(rank)
    part = ddp.module[0] if rank == 0 else ddp.module
    with dist_autograd.context() as context:
        ddp(inputs)
        dist_autograd.backward(context, [part(inputs).sum()])


@pytest.mark.parametrize(("step", "said"), [
    (_weighed, "weigh() with torch.distributed.autograd"),
    (_policy, "sync_policy() with torch.distributed.autograd"),
    (_skip, "skip() with torch.distributed.autograd"),
    (_unused_here, "does not use parameter '2.weight' on this rank"),
])  # fmt: skip
def test_what_cannot_be_right_is_an_error(
    step: Callable[[DistributedDataParallel, int], None], said: str, tmp_path: Path
) -> None:
    def program(rank: int) -> None:
        with agent(rank, 2, tmp_path / "meeting"):
            step(DistributedDataParallel(model()), rank)

    with pytest.raises(WorldError) as raised:
        run(2, program, over="processes", env=LOOPBACK)
    assert said in str(raised.value)


def _forward_outside(ddp: DistributedDataParallel, rank: int) -> Means:
    value = loss(ddp, batch(rank))
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [value])
        return of_context(ddp, context)


def _evaluated_by_another_thread(ddp: DistributedDataParallel, rank: int) -> Means:
    with dist_autograd.context() as context:
        value = loss(ddp, batch(rank))
        _in_a_thread(lambda: ddp(batch(rank)[0]))
        dist_autograd.backward(context, [value])
        return of_context(ddp, context)


def _a_context_inside_of_another(ddp: DistributedDataParallel, rank: int) -> Means:
    inner: list[Means] = []

    def step() -> None:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [loss(ddp, batch(rank))])
            inner.append(of_context(ddp, context))

    with dist_autograd.context() as context:
        value = loss(ddp, batch(rank))
        _in_a_thread(step)
        dist_autograd.backward(context, [value])
        oracle.assert_close(inner[0], means(2), **TOLERANT)
        return of_context(ddp, context)


def _many_dead_contexts(ddp: DistributedDataParallel, rank: int) -> Means:
    for _ in range(300):
        with dist_autograd.context():
            pass
    return _forward_outside(ddp, rank)


def _without_the_wrapper(ddp: DistributedDataParallel, rank: int) -> Means:
    return _forward_outside(ddp.module, rank)


def _unfrozen_after_its_forward(ddp: DistributedDataParallel, rank: int) -> Means:
    last = ddp.module[2]
    last.requires_grad_(False)
    _forward_outside(ddp, rank)
    last.requires_grad_(True)
    return _forward_outside(ddp.module, rank)


@pytest.mark.parametrize("step", [
    _forward_outside, _evaluated_by_another_thread, _a_context_inside_of_another, _many_dead_contexts,
    _without_the_wrapper, _unfrozen_after_its_forward,
])  # fmt: skip
def test_the_context_is_that_of_the_backward(
    step: Callable[[DistributedDataParallel, int], Means], tmp_path: Path
) -> None:
    def program(rank: int) -> None:
        with agent(rank, 2, tmp_path / "meeting"):
            found = step(DistributedDataParallel(model()), rank)
            oracle.assert_close(found, means(2), **TOLERANT)

    run(2, program, over="processes", env=LOOPBACK)


def _difference(sent: Tensor, inputs: Tensor) -> Tensor:
    """Runs on the other rank, in the context of the caller."""
    with torch.no_grad():
        mine = vars(_difference)["model"](inputs)
    return sent - mine


def test_a_forward_in_the_context_of_another_worker(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with agent(rank, 2, tmp_path / "meeting"):
            ddp = DistributedDataParallel(model())
            vars(_difference)["model"] = ddp
            ddp._group.barrier().wait()
            inputs, _ = batch(rank)
            with dist_autograd.context() as context:
                sent = ddp(inputs)
                ddp._group.barrier().wait()
                got = rpc.rpc_sync(f"worker{1 - rank}", _difference, args=(sent, batch(1 - rank)[0]))
                dist_autograd.backward(context, [got.sum()])
                expected = oracle.gradients(model(), lambda m, b: m(b[0]).sum(), [[batch(0)], [batch(1)]])
                oracle.assert_close(of_context(ddp, context), expected, **TOLERANT)
                ddp._group.barrier().wait()

    run(2, program, over="processes", env=LOOPBACK)


class _Reentrant(torch.autograd.Function):
    """A part of the model whose gradients a plain backward() accumulates, inside the one of the context."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, part: nn.Module) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.part = part
        return part(inputs).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        with torch.enable_grad():
            inputs = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.part(inputs).backward(gradient)
        return inputs.grad, None


class _Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, inputs: Tensor) -> Tensor:
        first, _, last = self.layers
        return _Reentrant.apply(first(inputs), last)


def test_a_backward_in_a_backward_accumulates_in_p_grad(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with agent(rank, 2, tmp_path / "meeting"):
            ddp = DistributedDataParallel(_Parts())
            expected = oracle.gradients(
                model(), lambda m, b: mse_loss(m[2](m[0](b[0])), b[1]), [[batch(0)], [batch(1)]]
            )
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [loss(ddp, batch(rank))])
                kept = of_context(ddp, context)
            shown = {name: p.grad for name, p in ddp.module.named_parameters()}
            for name in expected:
                there, elsewhere = (kept, shown) if name.startswith("0.") else (shown, kept)
                assert elsewhere[f"layers.{name}"] is None
                oracle.assert_close({name: there[f"layers.{name}"]}, {name: expected[name]}, **TOLERANT)

    run(2, program, over="processes", env=LOOPBACK)


def test_a_backward_that_raises_is_forgotten(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        def refuse(_: Tensor) -> None:
            raise ValueError("not this one")

        with agent(rank, 2, tmp_path / "meeting"):
            ddp = DistributedDataParallel(model())
            with dist_autograd.context() as context:
                value = loss(ddp, batch(rank))
                handle = next(ddp.parameters()).register_hook(refuse)
                with pytest.raises(RuntimeError, match="Error on Node"):
                    dist_autograd.backward(context, [value])
                handle.remove()
            loss(ddp, batch(rank)).backward()
            oracle.assert_close(oracle.gradients_of(ddp), means(2), **TOLERANT)

    run(2, program, over="processes", env=LOOPBACK)


def test_layers_are_frozen_and_unfrozen_and_a_dropped_model_is_gone(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with agent(rank, 2, tmp_path / "meeting"):
            ddp = DistributedDataParallel(model())
            first = ddp.module[0].weight
            for wanted in (False, True, False, True):
                first.requires_grad_(wanted)
                with dist_autograd.context() as context:
                    dist_autograd.backward(context, [loss(ddp, batch(rank))])
                    expected = means(2)
                    expected["0.weight"] = expected["0.weight"] if wanted else None
                    oracle.assert_close(of_context(ddp, context), expected, **TOLERANT)
            gone = [weakref.ref(ddp), weakref.ref(first)]
            del ddp, first
            gc.collect()
            assert [ref() for ref in gone] == [None, None]

    run(2, program, over="processes", env=LOOPBACK)
