"""Graph shapes, layer types and outputs: variations of cases 6 to 17 against one process on the whole batch."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.testing import generator, oracle, run
from tests.threads.small_models import Branches, ddp, filled, one, same_on_all, values, x_of

Loss = Callable[[nn.Module, Tensor], Tensor]


def compare(build: Callable[[], nn.Module], loss: Loss, batches: list[Any], steps: int = 2, **tolerance: float) -> None:
    """Train `steps` steps on one rank for each batch; every gradient of every step equals the oracle's."""

    def program(rank: int) -> list[oracle.Gradients]:
        model, seen = ddp(filled(build())), []
        for _ in range(steps):
            model.zero_grad()
            loss(model, batches[rank]).backward()
            seen.append(oracle.gradients_of(model))
        return seen

    expected = oracle.gradients(filled(build()), loss, [[batch] for batch in batches])
    for seen in run(len(batches), program):
        for gradients in seen:
            oracle.assert_close(gradients, expected, **tolerance)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=generator(seed))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


# ------------------------------------------------------------------ layer types and memory formats

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(3, 2, 3), (2, 3, 6)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), (3, 4)),
    "group norm": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4)), (2, 4, 5)),
    "scalar parameters": (lambda: nn.PReLU(), (3, 4)),
    "bilinear": (lambda: Both(nn.Bilinear(3, 3, 2)), (4, 3)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 3, 4)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (5, 4)),
}  # fmt: skip


class Both(nn.Module):
    """Gives a layer its input twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("n", [2, 3])
def test_layers_of_all_kinds(name: str, n: int):
    build, shape = LAYERS[name]
    compare(lambda: build().double(), squares, [noise(*shape, seed=rank) for rank in range(n)])


def test_recurrent_layers():
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(3, 4, num_layers=2, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0][-1]

    compare(lambda: Last().double(), squares, [noise(5, 2, 3, seed=rank) for rank in range(2)])


@pytest.mark.parametrize("kind", ["channels_last", "channels_last_3d", "transposed weight"])
def test_gradients_have_the_layout_of_their_parameters(kind: str):
    def build() -> nn.Module:
        if kind == "channels_last":
            return nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        if kind == "channels_last_3d":
            return nn.Conv3d(2, 3, 2).double().to(memory_format=torch.channels_last_3d)
        layer = nn.Linear(4, 3).double()
        layer.weight = nn.Parameter(torch.empty(4, 3, dtype=torch.float64).t())
        return layer

    shape = {"channels_last": (2, 3, 5, 5), "channels_last_3d": (2, 2, 4, 4, 4)}.get(kind, (5, 4))
    compare(build, squares, [noise(*shape, seed=rank) for rank in range(2)])

    def program(rank: int) -> bool:
        model = ddp(filled(build()))
        squares(model, noise(*shape, seed=rank)).backward()
        return all(p.grad.stride() == p.stride() for p in model.parameters())

    assert same_on_all(2, program)


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [(torch.float16, 2e-3, 2e-3), (torch.bfloat16, 1e-2, 1e-2), (torch.float64, 1e-10, 1e-12), (torch.complex64, 1e-5, 1e-6)],
    ids=str,
)
def test_parameters_of_other_types(dtype: torch.dtype, rtol: float, atol: float):
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).abs().double().square().mean()

    batches = [noise(6, 4, seed=rank, dtype=torch.float32).to(dtype) for rank in range(3)]
    compare(lambda: nn.Linear(4, 3, dtype=dtype), loss, batches, rtol=rtol, atol=atol)


def test_parameters_of_several_types_in_one_model():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)
            self.c, self.d = nn.Linear(4, 4, dtype=torch.complex128), nn.Linear(4, 4, dtype=torch.bfloat16)
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.a(x.float()).double())
            z = self.c(y.to(torch.complex128)).abs() + self.d(y.bfloat16()).double()
            return z + self.empty.sum()

    compare(Mixed, squares, [noise(3, 4, seed=rank) for rank in range(2)], rtol=2e-2, atol=2e-2)


# ------------------------------------------------------------------ outputs


@dataclass
class Data:
    loss: Tensor
    name: str


Pair = namedtuple("Pair", "a b")


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("_hidden",)

    def __init__(self, value: Any) -> None:
        self._hidden = value


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda y: {"y": y, "n": 1}, lambda out: out["y"]),
    "ordered dict in a list": (lambda y: [OrderedDict(y=y)], lambda out: out[0]["y"]),
    "tuple with None": (lambda y: (None, y), lambda out: out[1]),
    "named tuple": (lambda y: Pair("text", y), lambda out: out.b),
    "dataclass": (lambda y: Data(y, "text"), lambda out: out.loss),
    "plain object": (lambda y: Plain({"deep": [y]}), lambda out: out.value["deep"][0]),
    "object with slots": (Slotted, lambda out: out._hidden),
    "a closure": (lambda y: lambda: y, lambda out: out()),
    "a generator": (lambda y: (part for part in [y]), lambda out: next(out)),
    "a view": (lambda y: y.view(-1), lambda out: out),
}


class Returns(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.unused, self.wrap = one(bias=True), one(), wrap

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        return self.wrap(self.layer(x) * scale)


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_all_kinds(name: str):
    wrap, unwrap = OUTPUTS[name]

    def program(rank: int) -> list:
        model, seen = ddp(Returns(wrap)), []
        for _ in range(2):
            model.zero_grad()
            unwrap(model(x_of(rank), scale=2.0)).sum().backward()
            seen.append(values(model))
        return seen

    assert same_on_all(2, program) == [{"layer.weight": 3.0, "layer.bias": 2.0, "unused.weight": None}] * 2


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_sync_around_the_forward_alone_is_seen_through_every_output_whose_tensors_can_be_found(name: str):
    wrap, unwrap = OUTPUTS[name]
    if name in ("a closure", "a generator"):
        pytest.skip("no way to see into it: whether to synchronise is then decided in backward alone")

    def program(rank: int) -> tuple:
        model = ddp(Returns(wrap))
        with model.no_sync():
            loss = unwrap(model(x_of(rank))).sum()
        loss.backward()
        local = values(model)["layer.weight"]
        unwrap(model(x_of(rank))).sum().backward()
        return local, values(model)["layer.weight"]

    assert run(2, program) == [(1.0, 3.0), (2.0, 3.0)]


def test_an_output_that_is_an_input_or_needs_no_gradient():
    def program(rank: int) -> dict:
        model = ddp(Returns(lambda y: (y, y.detach(), torch.ones(2))))
        out, flat, constant = model(x_of(rank))
        (out * flat * constant.sum()).sum().backward()
        return values(model)

    # out = x + 1, gradient of the weight = x * (x + 1) * 2
    assert same_on_all(2, program)["layer.weight"] == (1 * 2 * 2 + 2 * 3 * 2) / 2


# ------------------------------------------------------------------ sharing, repetition, branches


class Tied(nn.Module):
    """One weight under two names, and one layer used several times."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.block = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(4, 4)
        self.head.weight = self.table.weight

    def forward(self, rows: Tensor) -> Tensor:
        x = self.table(rows)
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return self.head(x)


def test_tied_weights_and_a_layer_used_three_times():
    batches = [torch.tensor([rank, 1, 5]) for rank in range(3)]
    compare(lambda: Tied().double(), lambda model, rows: model(rows).square().mean(), batches)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_rank_its_own_branch_or_none_of_them(n: int):
    def program(rank: int) -> list:
        model, seen = ddp(Branches()), []
        for step in range(4):
            model.zero_grad()
            way = ["a", "b", "ab", "ba"][(rank + step) % n]
            model(x_of(rank), way).sum().backward()
            seen.append(values(model))
        return seen

    expected = []
    for step in range(4):
        used = [["a", "b", "ab", "ba"][(rank + step) % n] for rank in range(n)]
        expected.append(
            {
                f"{name}.weight": pytest.approx(sum(rank + 1 for rank in range(n) if name in used[rank]) / n)
                if any(name in way for way in used) else None
                for name in "ab"
            }
        )  # fmt: skip
    assert same_on_all(n, program) == expected


class Blocks(nn.Module):
    """Blocks under checkpoints of either kind, in any nesting."""

    def __init__(self, reentrant: bool, nested: int) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.reentrant, self.nested = reentrant, nested

    def run_block(self, index: int, depth: int, x: Tensor) -> Tensor:
        if depth:
            x = checkpoint(self.run_block, index, depth - 1, x, use_reentrant=self.reentrant)
        return torch.tanh(self.blocks[index](x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for index in (0, 1, 0, 2):
            x = checkpoint(self.run_block, index, self.nested, x, use_reentrant=self.reentrant)
        return self.tail(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [0, 1, 2])
@pytest.mark.parametrize("n", [2, 3])
def test_blocks_used_several_times_under_nested_checkpoints(reentrant: bool, nested: int, n: int):
    compare(lambda: Blocks(reentrant, nested).double(), squares, [noise(2, 4, seed=rank) for rank in range(n)])


def test_a_checkpoint_around_the_wrapped_model():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True).square().mean()

    compare(lambda: nn.Linear(4, 4).double(), loss, [noise(3, 4, seed=rank) for rank in range(2)])


def test_a_backward_inside_a_hook_of_the_graph():
    """Its gradients are part of the same synchronisation: the outermost backward ends it."""

    def program(rank: int) -> list:
        model, seen = ddp(Branches()), []
        for _ in range(2):
            model.zero_grad()
            inner = model(x_of(rank), "b").sum()
            outer = model(x_of(rank), "a")

            def hook(grad: Tensor, inner: Tensor = inner) -> None:
                inner.backward()

            outer.register_hook(hook)
            outer.sum().backward()
            seen.append(values(model))
        return seen

    assert same_on_all(2, program) == [{"a.weight": 1.5, "b.weight": 1.5}] * 2


# ------------------------------------------------------------------ several forwards, backwards, wrappers


def test_three_forwards_with_backwards_in_reverse_order():
    def program(rank: int) -> list:
        model, seen = ddp(one()), []
        losses = [model((k + 1) * x_of(rank)).sum() for k in range(3)]
        for loss in reversed(losses):
            loss.backward()
            seen.append(values(model)["weight"])
        return seen

    assert same_on_all(3, program) == pytest.approx([6.0, 10.0, 12.0])


def test_retained_graph_with_zero_grad_in_between():
    def program(rank: int) -> list:
        model, seen = ddp(one()), []
        loss = model(x_of(rank)).sum()
        for set_to_none in (True, False, True):
            loss.backward(retain_graph=True)
            seen.append(values(model)["weight"])
            model.zero_grad(set_to_none=set_to_none)
        return seen

    assert same_on_all(2, program) == [1.5, 1.5, 1.5]


def test_one_output_feeds_two_losses():
    def program(rank: int) -> float:
        model = ddp(one())
        out = model(x_of(rank))
        torch.autograd.backward([out.sum(), 2 * out.sum()])
        return values(model)["weight"]

    assert same_on_all(2, program) == 4.5


def test_a_model_fed_with_the_output_of_another_in_one_backward():
    def program(rank: int) -> tuple:
        first, second = ddp(one()), ddp(one())
        second(3 * first(x_of(rank))).sum().backward()
        return values(first)["weight"], values(second)["weight"]

    assert same_on_all(2, program) == (4.5, 4.5)


def test_a_wrapped_model_used_with_its_output_as_its_input():
    def program(rank: int) -> float:
        model = ddp(one())
        model(model(x_of(rank))).sum().backward()
        return values(model)["weight"]

    assert same_on_all(2, program) == 3.0


def test_generator_and_discriminator():
    """Two wrappers; each loss goes through both, and the optimizer of one ignores the other's gradients."""

    def build() -> tuple[nn.Module, nn.Module]:
        return filled(nn.Linear(3, 4).double(), 1), filled(nn.Linear(4, 1).double(), 2)

    def steps(g: nn.Module, d: nn.Module, inputs: list[Tensor], sync: Callable[[nn.Module], None]) -> list:
        seen = []
        for x in inputs:
            d.zero_grad()
            d(g(x).detach()).square().mean().backward()
            sync(d)
            seen.append(oracle.gradients_of(d))
            g.zero_grad()
            for p in d.parameters():
                p.requires_grad_(False)
            (-d(g(x)).mean()).backward()
            for p in d.parameters():
                p.requires_grad_(True)
            sync(g)
            seen.append(oracle.gradients_of(g))
        return seen

    def program(rank: int) -> list:
        g, d = build()
        return steps(ddp(g), ddp(d), [noise(2, 3, seed=10 * step + rank) for step in range(3)], lambda _: None)

    results = run(2, program)
    alone = [steps(*build(), [noise(2, 3, seed=10 * step + rank) for step in range(3)], lambda _: None) for rank in range(2)]
    for seen in results:
        for number, gradients in enumerate(seen):
            mean = {name: (alone[0][number][name] + alone[1][number][name]) / 2 for name in gradients}
            oracle.assert_close(gradients, mean, rtol=1e-10)


def test_many_wrappers_in_one_loss():
    def program(rank: int) -> list:
        models = [ddp(one()) for _ in range(5)]
        sum(model((k + 1) * x_of(rank)).sum() for k, model in enumerate(models)).backward()
        return [values(model)["weight"] for model in models]

    assert same_on_all(3, program) == pytest.approx([2.0, 4.0, 6.0, 8.0, 10.0])


def test_a_wrapped_model_inside_a_module():
    def program(rank: int) -> dict:
        outer = nn.Sequential(one(), ddp(one()))
        outer(x_of(rank)).sum().backward()
        return values(outer)

    assert [v["1.module.weight"] for v in run(2, program)] == [1.5, 1.5]


# ------------------------------------------------------------------ derivatives


def test_grad_then_backward():
    def program(rank: int) -> dict:
        model = ddp(one(bias=True))
        x = x_of(rank).requires_grad_()
        out = model(x).sum()
        torch.autograd.grad(out, list(model.parameters()), retain_graph=True)
        assert set(values(model).values()) == {None}
        out.backward()
        return values(model)

    assert same_on_all(2, program) == {"weight": 1.5, "bias": 1.0}


def test_grad_on_one_rank_alone_is_no_collective():
    def program(rank: int) -> dict:
        model = ddp(one())
        if rank == 0:
            (local,) = torch.autograd.grad(model(x_of(rank)).sum(), model.module.weight)
            assert local.item() == 1.0
        model(x_of(rank)).sum().backward()
        return values(model)

    assert same_on_all(2, program, timeout=10) == {"weight": 1.5}


def test_backward_into_the_inputs_alone_leaves_the_parameters_alone():
    def program(rank: int) -> tuple:
        model = ddp(one(bias=True))
        x = x_of(rank).requires_grad_()
        if rank == 0:
            model(x).sum().backward(inputs=[x])
        assert set(values(model).values()) == {None}
        model(x_of(rank)).sum().backward(inputs=[model.module.weight])
        return values(model)["weight"], values(model)["bias"]

    assert same_on_all(2, program, timeout=10) == (1.5, None)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.square().mean() + slope.square().mean()


@pytest.mark.parametrize("n", [2, 3])
def test_gradient_penalty(n: int):
    compare(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double(),
        penalty, [noise(3, 4, seed=rank) for rank in range(n)],
    )  # fmt: skip


def test_a_backward_that_creates_a_graph_and_a_second_one_through_it():
    """The second goes through the local graph: the mean of what every rank has by itself."""

    def program(rank: int) -> tuple:
        model = ddp(one())
        (model(x_of(rank)) ** 3).sum().backward(create_graph=True)
        first = model.module.weight.grad
        value = first.detach().item()
        model.module.weight.grad = None
        first.sum().backward()
        second = values(model)["weight"]
        model.module.weight.grad = None
        return value, second

    # loss = (w x)^3: slope 3 w^2 x^3, its slope 6 w x^3; x = 1 | 2
    assert same_on_all(2, program) == (13.5, 27.0)


# ------------------------------------------------------------------ frozen, replaced, added


ORDERS = [("a", "b", ""), ("b", "a", "ab"), ("", "ab", "a"), ("ab", "", "b")]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_layers_frozen_and_unfrozen_in_any_order(order: tuple[str, ...], n: int):
    """`order[k]` is frozen in step k; c never is."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = one(), one(), one()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + self.c(x)

    def program(rank: int) -> list:
        plain, seen = Three(), []
        set_frozen(plain, order[0])
        model = ddp(plain)
        for frozen in order:
            set_frozen(plain, frozen)
            model.zero_grad()
            model(x_of(rank)).sum().backward()
            seen.append(values(model))
        return seen

    def set_frozen(module: nn.Module, frozen: str) -> None:
        for name in "abc":
            getattr(module, name).weight.requires_grad_(name not in frozen)

    mean = (n + 1) / 2
    expected = [{f"{name}.weight": None if name in frozen else mean for name in "abc"} for frozen in order]
    assert same_on_all(n, program) == expected


def test_a_layer_frozen_between_a_local_backward_and_the_synchronised_one():
    """What it has accumulated is synchronised all the same, and an unfrozen one beside it makes no difference."""

    def program(rank: int) -> dict:
        plain = Branches("ab")
        plain.b.weight.requires_grad_(False)
        model = ddp(plain)
        with model.no_sync():
            model(x_of(rank)).sum().backward()
        plain.a.weight.requires_grad_(False)
        plain.b.weight.requires_grad_(True)
        model(x_of(rank)).sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 1.5, "b.weight": 1.5}


def test_unfreezing_during_accumulation_keeps_what_has_accumulated():
    def program(rank: int) -> dict:
        plain = Branches("ab")
        plain.b.weight.requires_grad_(False)
        model = ddp(plain)
        with model.no_sync():
            model(x_of(rank)).sum().backward()
            plain.b.weight.requires_grad_(True)
            model(x_of(rank)).sum().backward()
        model(x_of(rank)).sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 4.5, "b.weight": 3.0}


def replace_weight(model: Branches) -> None:
    model.a.weight = nn.Parameter(torch.full((1, 1), 2.0))


def replace_layer(model: Branches) -> None:
    model.a = nn.Linear(1, 1, bias=True)
    nn.init.ones_(model.a.weight), nn.init.zeros_(model.a.bias)


def swap_tensors(model: Branches) -> None:
    torch.utils.swap_tensors(model.a.weight, nn.Parameter(torch.full((1, 1), 3.0)))


def add_layer(model: Branches) -> None:
    model.extra = one()
    model.a = nn.Sequential(model.a, model.extra)


def convert(model: Branches) -> None:
    model.double()


def norm_weight(model: Branches) -> None:
    nn.utils.parametrizations.weight_norm(model.a)


CHANGES = [replace_weight, replace_layer, swap_tensors, add_layer, convert, norm_weight]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("before", [False, True], ids=["before the first step", "between two steps"])
def test_parameters_replaced_or_added_after_wrapping(change: Callable[[Branches], None], before: bool):
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        dtype = next(model.parameters()).dtype
        return model(x.to(dtype), "ab").square().sum()

    def program(rank: int) -> oracle.Gradients:
        plain = Branches("ab")
        model = ddp(plain)
        if before:
            loss(model, x_of(rank)).backward()
            model.zero_grad()
        change(plain)
        loss(model, x_of(rank)).backward()
        assert oracle.gradients_of(model).keys() == oracle.gradients_of(plain).keys()
        return oracle.gradients_of(model)

    truth = Branches("ab")
    change(truth)
    expected = oracle.gradients(truth, loss, [[x_of(rank)] for rank in range(3)])
    for gradients in run(3, program):
        oracle.assert_close(gradients, expected)


def test_all_parameters_but_one_are_deleted():
    def program(rank: int) -> dict:
        plain = Branches("ab")
        model = ddp(plain)
        model(x_of(rank)).sum().backward()
        model.zero_grad()
        del plain.b
        model(x_of(rank), "a").sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 1.5}


def test_a_copy_of_the_inner_module_is_not_the_wrapped_one():
    def program(rank: int) -> tuple:
        model = ddp(one())
        twin = copy.deepcopy(model.module)
        if rank == 0:
            twin(x_of(rank)).sum().backward()  # no collective
        model(x_of(rank)).sum().backward()
        return values(model)["weight"], values(twin)["weight"]

    assert run(2, program, timeout=10) == [(1.5, 1.0), (1.5, None)]


# ------------------------------------------------------------------ sparse


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("bag", [False, True])
def test_sparse_embeddings_with_other_rows_on_each_rank(n: int, bag: bool):
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = nn.EmbeddingBag if bag else nn.Embedding
            self.table, self.head = kind(7, 3, sparse=True), nn.Linear(3, 2)

        def forward(self, rows: Tensor) -> Tensor:
            return self.head(self.table(rows))

    batches = [torch.tensor([[rank, rank, 6], [2, 3, rank]]) for rank in range(n)]

    def program(rank: int) -> oracle.Gradients:
        model = ddp(filled(Rows()))
        for _ in range(2):
            model.zero_grad()
            model(batches[rank]).square().mean().backward()
        assert model.module.table.weight.grad.is_sparse
        return oracle.gradients_of(model)

    expected = oracle.gradients(filled(Rows()), lambda model, rows: model(rows).square().mean(), [[b] for b in batches])
    for gradients in run(n, program):
        oracle.assert_close(gradients, expected)


def test_a_sparse_embedding_that_one_rank_alone_uses_and_accumulates():
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(3, 1, sparse=True), one()

        def forward(self, x: Tensor, rows: list[int]) -> Tensor:
            return self.layer(x).sum() + (self.table(torch.tensor(rows)).sum() if rows else 0)

    def program(rank: int) -> dict:
        model = ddp(Rows())
        with model.no_sync():
            model(x_of(rank), [1] if rank else []).backward()
        model(x_of(rank), [0, 1] if rank else []).backward()
        return values(model)

    assert same_on_all(2, program) == {"table.weight": [[0.5], [1.0], [0.0]], "layer.weight": 3.0}
