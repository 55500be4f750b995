"""The end of the outermost backward, alone in one process, for a table of graph shapes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.reduce import backward


class Recorder:
    """A listener that arms from the hook of a leaf, as the reducer does, and notes what it sees."""

    def __init__(self, leaf: Tensor, log: list[str], name: str = "end", order: int = 0) -> None:
        self.order, self.name, self.log, self.leaf = order, name, log, leaf
        self.tasks: list[int] = []
        self.seen: list[float | None] = []
        self.fails = False
        self._handle = leaf.register_post_accumulate_grad_hook(self._fired)

    def _fired(self, leaf: Tensor) -> None:
        self.log.append("fired")
        self.tasks.append(backward.arm(self))

    def disarmed(self) -> None:
        self.log.append("disarmed")

    def backward_ended(self) -> None:
        self.log.append(self.name)
        grad = self.leaf.grad
        self.seen.append(None if grad is None else grad.sum().item())
        if self.fails:
            raise RuntimeError("what the listener raises")


def leaf(value: float = 2.0) -> Tensor:
    return torch.tensor([value], requires_grad=True)


@pytest.fixture(autouse=True)
def nothing_stays_armed():
    yield
    assert not backward._armed


# ------------------------------------------------------------------ the table


def plain(w: Tensor) -> None:
    (3 * w).sum().backward()


def used_twice(w: Tensor) -> None:
    (w * w).sum().backward()


def reentrant(w: Tensor) -> None:
    x = leaf()
    checkpoint(lambda t: t * w, x, use_reentrant=True).sum().backward()


def reentrant_twice(w: Tensor) -> None:
    x = leaf(1.0)
    for _ in range(2):
        x = checkpoint(lambda t: t * w, x, use_reentrant=True)
    x.sum().backward()


def reentrant_in_reentrant(w: Tensor) -> None:
    def inner(t: Tensor) -> Tensor:
        return t * w

    def outer(t: Tensor) -> Tensor:
        return checkpoint(inner, checkpoint(inner, t, use_reentrant=True), use_reentrant=True) * w

    checkpoint(outer, leaf(1.0), use_reentrant=True).sum().backward()


def reentrant_after_a_plain_use(w: Tensor) -> None:
    x = checkpoint(lambda t: t * w, leaf(1.0) * w, use_reentrant=True)
    x.sum().backward()


def plain_use_before_reentrant_in_backward(w: Tensor) -> None:
    x = checkpoint(lambda t: t * w, leaf(1.0), use_reentrant=True) * w
    x.sum().backward()


def not_reentrant_checkpoint(w: Tensor) -> None:
    checkpoint(lambda t: t * w, leaf(1.0), use_reentrant=False).sum().backward()


def nested_by_depth(depth: int) -> Callable[[Tensor], None]:
    def shape(w: Tensor) -> None:
        def body(t: Tensor, left: int) -> Tensor:
            return t * w if left == 0 else checkpoint(body, t, left - 1, use_reentrant=True)

        checkpoint(body, leaf(1.0), depth - 1, use_reentrant=True).sum().backward()

    return shape


class BackwardInside(torch.autograd.Function):
    """Runs a whole backward into another leaf while its own backward runs."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.w = w
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            (ctx.w * 2).sum().backward()
        return grad, None


def backward_in_a_custom_function(w: Tensor) -> None:
    BackwardInside.apply(leaf(), w).sum().backward()


def backward_in_a_tensor_hook(w: Tensor) -> None:
    x = leaf() * 1.0

    def hook(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            (w * 5).sum().backward()
        return grad

    x.register_hook(hook)
    x.sum().backward()


def backward_in_another_leafs_hook(w: Tensor) -> None:
    x = leaf()

    def hook(_: Tensor) -> None:
        with torch.enable_grad():
            (w * 7).sum().backward()

    x.register_post_accumulate_grad_hook(hook)
    (x * 2).sum().backward()


def retained_graph(w: Tensor) -> None:
    (3 * w).sum().backward(retain_graph=True)


def created_graph(w: Tensor) -> None:
    (w**3).sum().backward(create_graph=True)
    w.grad = w.grad.detach()


def only_some_inputs(w: Tensor) -> None:
    (3 * w).sum().backward(inputs=[w])


SHAPES: dict[str, tuple[Callable[[Tensor], None], float]] = {
    "plain": (plain, 3.0),
    "used twice": (used_twice, 4.0),
    "reentrant checkpoint": (reentrant, 2.0),
    "one block twice under reentrant checkpoint": (reentrant_twice, 4.0),
    "reentrant inside reentrant": (reentrant_in_reentrant, 12.0),
    "reentrant, fed by a plain use": (reentrant_after_a_plain_use, 4.0),
    "plain use after reentrant": (plain_use_before_reentrant_in_backward, 4.0),
    "checkpoint that is not reentrant": (not_reentrant_checkpoint, 1.0),
    "5 deep": (nested_by_depth(5), 1.0),
    "70 deep, where autograd goes on in another thread": (nested_by_depth(70), 1.0),
    "a backward inside a custom function": (backward_in_a_custom_function, 2.0),
    "a backward inside a tensor hook": (backward_in_a_tensor_hook, 5.0),
    "a backward inside the hook of another leaf": (backward_in_another_leafs_hook, 7.0),
    "retain_graph": (retained_graph, 3.0),
    "create_graph": (created_graph, 12.0),
    "backward(inputs=...)": (only_some_inputs, 3.0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_end_comes_once_and_last_and_sees_the_whole_gradient(name: str):
    shape, gradient = SHAPES[name]
    w, log = leaf(), []
    recorder = Recorder(w, log)
    shape(w)
    assert log.count("end") == 1 and log[-1] == "end" and log[0] == "fired"
    assert recorder.seen == [gradient]


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_shape_again_ends_again(name: str):
    shape, gradient = SHAPES[name]
    w, log = leaf(), []
    recorder = Recorder(w, log)
    for _ in range(3):
        w.grad = None
        shape(w)
    assert recorder.seen == [gradient] * 3


# ------------------------------------------------------------------ what must not end, or not twice


def test_a_leaf_that_is_not_used_arms_nothing():
    log: list[str] = []
    Recorder(leaf(), log)
    plain(leaf())
    assert log == []


def test_grad_alone_arms_nothing():
    w, log = leaf(), []
    Recorder(w, log)
    torch.autograd.grad((3 * w).sum(), w)
    assert log == []


def test_grad_that_creates_a_graph_and_then_a_backward_end_once():
    w, log = leaf(), []
    recorder = Recorder(w, log)
    (slope,) = torch.autograd.grad((w**3).sum(), w, create_graph=True)
    assert log == []
    slope.sum().backward()
    assert log == ["fired", "end"] and recorder.seen == [12.0]


def test_two_backwards_on_one_graph_end_twice():
    w, log = leaf(), []
    recorder = Recorder(w, log)
    loss = (3 * w).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert recorder.seen == [3.0, 6.0]
    assert len(set(recorder.tasks)) == 2


def test_double_backward_ends_once_for_each_backward():
    w, log = leaf(), []
    recorder = Recorder(w, log)
    (w**3).sum().backward(create_graph=True)
    slope = w.grad
    w.grad = None
    slope.sum().backward()
    assert recorder.seen == [12.0, 12.0]


def test_outside_of_backward_there_is_no_task():
    assert backward.current_task() == -1


# ------------------------------------------------------------------ exceptions


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise ValueError("in the middle")


def raising(w: Tensor) -> None:
    """Accumulates into w first, then raises."""
    late = Fails.apply(leaf() * 1.0)
    ((w * 1.0).sum() + late.sum()).backward()


def raising_inside(w: Tensor) -> None:
    """The backward inside a checkpoint is over when the outer one raises."""
    x = Fails.apply(leaf() * 1.0)
    checkpoint(lambda t: t * w, x, use_reentrant=True).sum().backward()


def raising_in_the_inner(w: Tensor) -> None:
    checkpoint(lambda t: Fails.apply(t) * w, leaf(), use_reentrant=True).sum().backward()


@pytest.mark.parametrize("failing", [raising, raising_inside, raising_in_the_inner])
def test_a_backward_that_raised_has_no_end_and_the_next_one_has_one(failing: Callable[[Tensor], None]):
    w, log = leaf(), []
    recorder = Recorder(w, log)
    with pytest.raises(ValueError, match="in the middle"):
        failing(w)
    assert "end" not in log and log[-1] == "disarmed"
    w.grad = None
    plain(w)
    assert recorder.seen == [3.0]
    backward.forget(recorder)


def armed() -> set:
    return {known() for waiting in backward._armed.values() for known in waiting.values()}


def test_a_raised_backward_keeps_no_listener_alive():
    class Idle:
        order = 0

        def backward_ended(self) -> None:
            raise AssertionError("its backward has never ended")

        def disarmed(self) -> None:
            pass

    idle = [Idle()]

    def arm_and_raise(_: Tensor) -> None:
        backward.arm(idle[0])
        raise ValueError("in the middle")

    w = leaf()
    w.register_hook(arm_and_raise)
    with pytest.raises(ValueError, match="in the middle"):
        (3 * w).sum().backward()
    assert armed() == set(idle)
    idle.clear()
    gc.collect()
    assert not armed()


@pytest.mark.parametrize("failing", [raising, raising_inside, raising_in_the_inner])
def test_forget_drops_what_a_raised_backward_had_armed_for_one_listener(failing: Callable[[Tensor], None]):
    w, log = leaf(), []
    recorder, other = Recorder(w, log, "one", 0), Recorder(w, log, "two", 1)
    with pytest.raises(ValueError, match="in the middle"):
        failing(w)
    assert armed() == {recorder, other}
    backward.forget(recorder)
    assert armed() == {other}
    backward.forget(other)
    backward.forget(other)  # a second time does nothing


def test_what_a_listener_raises_comes_out_of_backward_and_the_next_one_works():
    w, log = leaf(), []
    recorder = Recorder(w, log)
    recorder.fails = True
    with pytest.raises(RuntimeError, match="what the listener raises"):
        plain(w)
    recorder.fails = False
    plain(w)
    assert recorder.seen == [3.0, 6.0]


# ------------------------------------------------------------------ several listeners


def test_all_end_in_order_of_construction_whatever_fires_first():
    for first in (0, 1):
        log: list[str] = []
        a, b = leaf(), leaf()
        Recorder(a, log, "first", 10)
        Recorder(b, log, "second", 11)
        x = (a, b)[first] * (a, b)[1 - first]
        checkpoint(lambda t, a=a: t * a, x, use_reentrant=True).sum().backward()
        assert log[-2:] == ["first", "second"]
        assert log.count("first") == log.count("second") == 1


def test_listeners_of_inner_and_outer_tasks_end_together():
    log: list[str] = []
    inner, outer = leaf(), leaf()
    Recorder(inner, log, "inner", 21)
    Recorder(outer, log, "outer", 20)
    x = outer * 1.0
    x = checkpoint(lambda t: t * inner, x, use_reentrant=True)
    x.sum().backward()
    assert log[-2:] == ["outer", "inner"]


def test_a_module_with_tied_weights_and_two_losses():
    w, log = leaf(), []
    recorder = Recorder(w, log)
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(torch.ones(1, 1))
    a, b = (layer(w[None]) * w).sum(), (w * 2).sum()
    torch.autograd.backward([a, b])
    assert recorder.seen == [6.0]
    assert log.count("end") == 1
