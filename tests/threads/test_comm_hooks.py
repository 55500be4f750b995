"""Communication hooks: torch's own, the user's, wrong ones; and the optimizers that overlap with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as overlap
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer, as_functional_optim

from phalanx import MisuseError
from phalanx.testing import generator, oracle, run
from tests.threads.small_models import Branches, ddp, filled, one, same_on_all, values, x_of

SHAPE = (6, 8)


def net() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(*SHAPE, generator=generator(100 * step + rank))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def averaging(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda f: f.value()[0] / dist.get_world_size())


def at_once(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer().div_(dist.get_world_size()))
    return future


AVERAGING = {"future": averaging, "at once": at_once, "torch's": default_hooks.allreduce_hook}


@pytest.mark.parametrize("hook", AVERAGING.values(), ids=AVERAGING)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("bucket_cap_mb", [25, 0.0001])
def test_an_averaging_hook_gives_the_same_gradients(hook, n: int, bucket_cap_mb: float):
    def program(rank: int) -> oracle.Gradients:
        model = ddp(net(), bucket_cap_mb=bucket_cap_mb)
        model.register_comm_hook(dist.group.WORLD, hook)
        for step in range(2):
            model.zero_grad()
            loss(model, batch(step, rank)).backward()
        return oracle.gradients_of(model)

    expected = oracle.gradients(net(), loss, [[batch(1, rank)] for rank in range(n)])
    for gradients in run(n, program):
        oracle.assert_close(gradients, expected, atol=1e-6)


def test_what_a_hook_sees_of_its_bucket():
    def program(rank: int) -> list:
        model, seen = ddp(net(), bucket_cap_mb=0.0001), []

        def hook(state: list, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            assert all(g.shape == p.shape for g, p in zip(bucket.gradients(), bucket.parameters(), strict=True))
            assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
            start = bucket.buffer().untyped_storage().data_ptr()
            assert all(g.untyped_storage().data_ptr() == start for g in bucket.gradients())
            state.append((bucket.index(), bucket.is_last(), [tuple(p.shape) for p in bucket.parameters()]))
            return at_once(None, bucket)

        model.register_comm_hook(seen, hook)
        loss(model, batch(0, rank)).backward()
        return seen

    seen = same_on_all(2, program)
    assert [index for index, _, _ in seen] == list(range(len(seen))) and len(seen) > 1
    assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
    assert sorted(shape for _, _, shapes in seen for shape in shapes) == [(4,), (4, 8), (8,), (8, 8)]


def test_gradients_of_channels_last_parameters_are_contiguous_for_hooks_as_in_torch():
    def program(rank: int) -> list:
        model = ddp(nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last))

        def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                assert gradient.view(gradient.shape[0], -1).shape[0] == parameter.shape[0]
            return at_once(None, bucket)

        def step() -> list:
            model.zero_grad()
            model(torch.arange(50.0).view(1, 2, 5, 5) * (rank + 1)).sum().backward()
            return [p.grad.tolist() for p in model.parameters()]

        plain = step()
        model.register_comm_hook(None, hook)
        assert step() == plain
        return plain

    same_on_all(2, program)


def test_hooks_and_unused_parameters():
    def program(rank: int) -> list:
        model, seen = ddp(Branches(), bucket_cap_mb=0.000001), []
        model.register_comm_hook(None, averaging)
        for ways in (("a", "a"), ("a", "b"), ("b", "b")):
            model.zero_grad()
            model(x_of(rank), ways[rank]).sum().backward()
            seen.append(values(model))
        return seen

    assert same_on_all(2, program) == [
        {"a.weight": 1.5, "b.weight": None},
        {"a.weight": 0.5, "b.weight": 1.0},
        {"a.weight": None, "b.weight": 1.5},
    ]


def test_hooks_with_no_sync_and_a_second_backward():
    def program(rank: int) -> list:
        model, seen = ddp(one()), []
        model.register_comm_hook(None, averaging)
        with model.no_sync():
            model(x_of(rank)).sum().backward()
        for _ in range(2):
            model(x_of(rank)).sum().backward()
            seen.append(values(model)["weight"])
        return seen

    assert same_on_all(2, program) == [3.0, 4.5]


def test_a_hook_may_be_replaced_and_removed():
    def program(rank: int) -> list:
        model, seen = ddp(one()), []

        def ten(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(torch.full_like(bucket.buffer(), 10.0))
            return future

        for change in (lambda: model.register_comm_hook(None, ten), lambda: model.register_comm_hook(None, averaging),
                       model.remove_comm_hook):  # fmt: skip
            change()
            model.zero_grad()
            model(x_of(rank)).sum().backward()
            seen.append(values(model)["weight"])
        return seen

    assert same_on_all(2, program) == [10.0, 1.5, 1.5]


def test_a_hook_may_resize_keep_and_overwrite_its_buffer():
    def program(rank: int) -> oracle.Gradients:
        model, kept = ddp(net(), bucket_cap_mb=0.0001), []

        def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            buffer = bucket.buffer()
            count = buffer.numel()
            dist.all_reduce(buffer)
            result = buffer.clone() / dist.get_world_size()
            buffer.resize_(count + 1000).fill_(float("nan"))
            kept.append(buffer)
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(result)
            buffer.resize_(count)
            return future

        model.register_comm_hook(None, hook)
        for step in range(2):
            model.zero_grad()
            loss(model, batch(step, rank)).backward()
            for buffer in kept:
                buffer.fill_(float("nan"))
        return oracle.gradients_of(model)

    expected = oracle.gradients(net(), loss, [[batch(1, rank)] for rank in range(2)])
    for gradients in run(2, program):
        oracle.assert_close(gradients, expected, atol=1e-6)


@pytest.mark.parametrize("kind", list(DDPCommHookType), ids=lambda kind: kind.name)
def test_all_of_torchs_hook_types_register_and_train(kind: DDPCommHookType):
    def program(rank: int) -> bool:
        model = ddp(net())
        register_ddp_comm_hook(kind, model)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for _ in range(4):
            optimizer.zero_grad()
            value = loss(model, batch(0, rank))
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses[-1] < losses[0]

    assert all(run(2, program))


def test_the_noop_hook_leaves_gradients_local():
    def program(rank: int) -> float:
        model = ddp(one())
        model.register_comm_hook(None, debugging_hooks.noop_hook)
        model(x_of(rank)).sum().backward()
        return values(model)["weight"]

    assert run(2, program) == [1.0, 2.0]


@pytest.mark.parametrize("wrapper", [default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper])
def test_compression_wrapped_around_another_hook(wrapper):
    def program(rank: int) -> float:
        model = ddp(one())
        model.register_comm_hook(None, wrapper(default_hooks.allreduce_hook))
        model(x_of(rank)).sum().backward()
        return values(model)["weight"]

    assert same_on_all(2, program) == 1.5


@pytest.mark.parametrize("rank_of_matrix", [1, 2])
def test_power_sgd_of_low_rank_converges_by_its_error_feedback(rank_of_matrix: int):
    def program(rank: int) -> tuple:
        model = ddp(net())
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank_of_matrix, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(30):
            optimizer.zero_grad()
            value = loss(model, batch(0, rank))
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses[-1] < 0.3 * losses[0], [p.tolist() for p in model.parameters()]

    assert same_on_all(2, program)[0]


def test_post_local_sgd():
    def program(rank: int) -> list:
        model = ddp(one())
        state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), averagers.PeriodicModelAverager(period=2, warmup_steps=2)
        )
        seen = []
        for _ in range(4):
            optimizer.zero_grad()
            model(x_of(rank)).sum().backward()
            seen.append(values(model)["weight"])
            optimizer.step()
        return seen

    one_rank, other = run(2, program)
    assert one_rank[:2] == other[:2] == [1.5, 1.5]
    assert (one_rank[2:], other[2:]) == ([1.0, 1.0], [2.0, 2.0])


def test_an_optimizer_that_steps_inside_the_hook():
    def program(rank: int) -> float:
        model = ddp(one())
        state = overlap._OptimizerHookState(as_functional_optim(torch.optim.SGD, lr=1.0))
        hook = overlap._hook_then_optimizer(default_hooks.allreduce_hook, state)
        model.register_comm_hook(None, hook)
        model(x_of(rank)).sum().backward()
        return model.module.weight.item()

    assert same_on_all(2, program) == -0.5


# ------------------------------------------------------------------ wrong hooks


def no_future(state: Any, bucket: dist.GradBucket) -> Tensor:
    return bucket.buffer()


def wrong_size(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(torch.zeros(7))
    return future


def no_tensor(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result("text")
    return future


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (no_future, "no_future returned Tensor.*callback must return a torch.futures.Future object"),
        (wrong_size, "wrong_size gave a tensor of 7"),
        (no_tensor, "no_tensor gave str"),
    ],
)
def test_a_hook_that_returns_something_else_is_an_error_on_every_rank(hook, text: str):
    def program(rank: int) -> None:
        model = ddp(one())
        model.register_comm_hook(None, hook)
        with pytest.raises(MisuseError, match=text):
            model(x_of(rank)).sum().backward()

    run(2, program, timeout=10)


def test_what_a_hook_raises_comes_out_of_backward_and_the_model_goes_on_without_it():
    def failing(state: Any, bucket: dist.GradBucket) -> None:
        raise ZeroDivisionError("inside the hook")

    def program(rank: int) -> float:
        model = ddp(one())
        model.register_comm_hook(None, failing)
        with pytest.raises(ZeroDivisionError):
            model(x_of(rank)).sum().backward()
        model.remove_comm_hook()
        model.zero_grad()
        model(x_of(rank)).sum().backward()
        return values(model)["weight"]

    assert same_on_all(2, program) == 1.5


def test_what_is_no_hook_is_refused_at_registration():
    def program(rank: int) -> None:
        model = ddp(one())

        def other_bucket(state: Any, bucket: int) -> torch.futures.Future[Tensor]: ...

        def other_result(state: Any, bucket: dist.GradBucket) -> int: ...

        # Annotations as objects, as in a file without `from __future__ import annotations`.
        other_bucket.__annotations__ = {"bucket": int}
        other_result.__annotations__ = {"return": int}
        with pytest.raises(TypeError, match="Communication hook must be callable."):
            model.register_comm_hook(None, 1)
        with pytest.raises(ValueError, match="bucket annotation should be dist.GradBucket."):
            model.register_comm_hook(None, other_bucket)
        with pytest.raises(ValueError, match="return annotation should be torch.futures.Future"):
            model.register_comm_hook(None, other_result)

    run(1, program)
