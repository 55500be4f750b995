"""DataParallel in one process: the truth is the plain model on the whole batch."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
import warnings
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import DataParallel, DistributedDataParallel, MisuseError
from phalanx.testing import oracle, run
from tests.threads.small_models import filled, noise

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Record:
    x: Tensor
    name: str = "r"


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)).double()


class Calls(nn.Module):
    """A linear layer, with a forward of the test's own."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.body = forward

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.body(self, *arguments, **keywords)


class Lists(nn.Module):
    """Parameters in lists and dicts, a tied one, and one behind a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(3, 3, dtype=torch.float64) for _ in range(2)])
        self.named = nn.ParameterDict({"a": torch.randn(3, dtype=torch.float64)})
        self.first, self.second = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.second.weight = self.first.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3).double())

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.several:
            x = x @ matrix
        return self.normed(self.second(self.first(x + self.named["a"])))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(3, 4, num_layers=2, batch_first=True).double()
        self.embed = nn.Embedding(7, 3, sparse=True).double()

    def forward(self, words: Tensor) -> Tensor:
        return self.cell(self.embed(words))[0]


def squared(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (layers, noise(8, 4)),
        (layers, noise(7, 4)),
        (layers, noise(2, 4)),
        (layers, noise(1, 4)),
        (Lists, noise(6, 3)),
        (Recurrent, torch.arange(12).view(6, 2) % 7),
    ],
    ids=["divides", "does not divide", "fewer than replicas", "one", "lists and ties", "recurrent and sparse"],
)
def test_the_gradient_is_that_of_the_whole_batch(build: Callable[[], nn.Module], batch: Tensor) -> None:
    plain = filled(build())
    model = DataParallel(copy.deepcopy(plain), replicas=3)
    for _ in range(2):
        model.zero_grad()
        assert torch.allclose(model(batch), plain(batch))
        squared(model, batch).backward()
        oracle.assert_close(oracle.gradients_of(model), oracle.gradients(plain, squared, [[batch]]), rtol=1e-10)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_weight_that_a_hook_computes_is_each_replicas_own() -> None:
    plain, wrapped = (filled(nn.utils.weight_norm(nn.Linear(3, 2).double())) for _ in range(2))
    model, batch = DataParallel(wrapped, replicas=2), noise(5, 3)
    for _ in range(2):
        for each in (plain, model):
            squared(each, batch).backward()
    oracle.assert_close(oracle.gradients_of(model), oracle.gradients_of(plain), rtol=1e-10)


def test_gradients_add_up_and_hooks_see_their_sum_once() -> None:
    plain, batch = filled(layers()), noise(5, 4)
    model, seen = DataParallel(copy.deepcopy(plain), replicas=2), []
    model.module[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for _ in range(2):
        squared(model, batch).backward()
    truth = oracle.gradients(plain, squared, [[batch]])["0.weight"]
    assert torch.allclose(seen[0], truth) and torch.allclose(seen[1], 2 * truth) and len(seen) == 2


def test_a_parameter_that_no_replica_uses_has_no_gradient() -> None:
    model = DataParallel(Calls(lambda m, x: x @ m.layer.weight.t()), replicas=2)
    model(noise(4, 3)).sum().backward()
    assert model.module.layer.bias.grad is None and model.module.layer.weight.grad is not None


def test_second_derivatives_are_those_of_the_whole_batch() -> None:
    def penalty(model: nn.Module, batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(batch).pow(3).sum(), batch, create_graph=True)
        return gradient.square().sum()

    plain, batch = filled(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()), noise(5, 4)
    model = DataParallel(copy.deepcopy(plain), replicas=2)
    penalty(model, batch).backward()
    oracle.assert_close(oracle.gradients_of(model), oracle.gradients(plain, penalty, [[batch]]), rtol=1e-9)


def test_batch_norm_takes_each_part_for_itself_and_keeps_the_statistics_of_replica_0() -> None:
    model, batch = DataParallel(nn.BatchNorm1d(3, momentum=1.0).double(), replicas=2), noise(8, 3)
    output = model(batch)
    truths = [nn.BatchNorm1d(3).double()(part) for part in batch.chunk(2)]
    assert torch.allclose(output, torch.cat(truths))
    assert torch.allclose(model.running_mean, batch[:4].mean(0)) and model.num_batches_tracked == 1


def test_a_buffer_that_the_forward_replaces_is_kept_from_replica_0() -> None:
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + x.sum()
            return self.layer(x)

    model = DataParallel(Average(), replicas=2)
    for _ in range(2):
        model(torch.tensor([[1.0], [10.0]]))
    assert model.seen.item() == 2.0


# ------------------------------------------------------------------ inputs and outputs


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: Pair(x, [x]),
        lambda x: {"a": x, "b": (x, None)},
        lambda x: OrderedDict(a=x),
        lambda x: defaultdict(list, a=x),
        lambda x: Record(x),
        lambda x: [x, torch.tensor(2.0), "text", torch.max(x, 1)],
    ],
    ids=["namedtuple", "dict", "ordered", "defaultdict", "dataclass", "mixed"],
)
def test_nested_inputs_are_split_and_outputs_put_together(shape: Callable[[Tensor], Any]) -> None:
    got: list[Any] = []

    def forward(module: Calls, value: Any, *, flag: bool, other: Tensor) -> Any:
        got.append((value, flag, len(other)))
        return value if not isinstance(value, list) else value[0]

    x, value = noise(5, 3), shape(noise(5, 3))
    output = DataParallel(Calls(forward), replicas=2)(value, flag=True, other=x)
    assert sorted(size for _, _, size in got) == [2, 3] and all(flag for _, flag, _ in got)
    expected = value[0] if isinstance(value, list) else value
    assert type(output) is type(expected)
    assert str(output) == str(expected)


def test_a_number_becomes_one_for_each_replica() -> None:
    model = DataParallel(Calls(lambda m, x: (m.layer(x).mean(), None, "same", 3)), replicas=2)
    with pytest.warns(UserWarning, match="all input tensors were scalars"):
        output = model(noise(4, 3))
    assert output[0].shape == (2,) and output[1:] == (None, "same", 3)


def test_without_inputs_and_without_tensors() -> None:
    ones = torch.ones(2, 3, dtype=torch.float64)
    model = DataParallel(Calls(lambda m, n=1: m.layer(n * ones)), replicas=2)
    assert model().shape == (2, 2)  # one replica
    assert model(2).shape == (4, 2)  # one of each


def test_another_dimension() -> None:
    model = DataParallel(Calls(lambda m, x: m.layer(x)), replicas=2, dim=1)
    x = noise(4, 5, 3)
    assert torch.allclose(model(x), model.module(x))
    with pytest.raises(MisuseError, match=r"DataParallel\(dim=1\) cannot split argument 0, which is of size \[3\]"):
        model(noise(3))


def test_what_cannot_be_split_alike_is_an_error_and_not_dropped() -> None:
    model = DataParallel(Calls(lambda m, x, mask: m.layer(x) * mask), replicas=2)
    with pytest.raises(MisuseError, match=r"argument 'mask', of size \[1, 2\]: 1\n.*Instead: .*one size") as caught:
        model(noise(4, 3), mask=noise(1, 2))
    assert "argument 0, of size [4, 3]: 2" in str(caught.value)
    with pytest.raises(MisuseError, match=r"PackedSequence \(argument 0\['x'\]\)"):
        model({"x": nn.utils.rnn.pack_sequence([noise(3)])})


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda m, x: [x] * len(x), "a list with [0], [1], [2]"),
        (lambda m, x: len(x), "replica 0: 3; replica 1: 2"),
        (lambda m, x: {"out": x if len(x) == 3 else None}, "the output['out'] of its replicas"),
    ],
)
def test_outputs_that_differ_in_structure_are_an_error(forward: Callable[..., Any], words: str) -> None:
    with pytest.raises(MisuseError) as caught:
        DataParallel(Calls(forward), replicas=2)(noise(5, 3))
    assert words in str(caught.value)


# ------------------------------------------------------------------ threads


def test_a_replica_that_raises_is_named_and_its_error_kept() -> None:
    class MyError(ValueError):
        pass

    def forward(module: Calls, x: Tensor) -> Tensor:
        if len(x) == 2:
            raise MyError("too short")
        return module.layer(x)

    with pytest.raises(MyError, match="Caught MyError in replica 1 on device cpu: too short") as caught:
        DataParallel(Calls(forward), replicas=2)(noise(5, 3))
    assert isinstance(caught.value.__cause__, MyError) and str(caught.value.__cause__) == "too short"


def test_an_error_whose_type_takes_other_arguments_is_a_runtime_error() -> None:
    def forward(module: Calls, x: Tensor) -> Tensor:
        raise UnicodeDecodeError("utf-8", b"x", 0, 1, "odd")

    with pytest.raises(RuntimeError, match="Caught UnicodeDecodeError in replica . on device cpu: .*odd"):
        DataParallel(Calls(forward), replicas=2)(noise(4, 3))


def test_replicas_run_in_threads_with_the_settings_of_the_caller() -> None:
    seen: dict[str, tuple[Any, ...]] = {}

    def forward(module: Calls, x: Tensor) -> Tensor:
        y = module.layer(x.to(module.layer.weight.dtype))
        seen[threading.current_thread().name] = (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), y.dtype,
            torch.zeros(1).device.type,
        )  # fmt: skip
        return y

    model = DataParallel(Calls(forward).float(), replicas=2)

    def states(x: Tensor) -> set[tuple[Any, ...]]:
        seen.clear()
        model(x)
        assert sorted(seen) == ["replica 0", "replica 1"]
        return set(seen.values())

    x = torch.randn(4, 3)
    assert states(x) == {(True, False, False, torch.float32, "cpu")}
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert states(x) == {(False, False, True, torch.float16, "cpu")}
    with torch.inference_mode(), torch.device("meta"):
        assert states(x) == {(False, True, False, torch.float32, "meta")}


def test_replicas_share_the_threads_of_the_caller_and_give_them_back() -> None:
    seen: list[int] = []

    def forward(module: Calls, x: Tensor) -> Tensor:
        seen.append(torch.get_num_threads())
        return module.layer(x)

    before, model = torch.get_num_threads(), DataParallel(Calls(forward), replicas=2)
    try:
        torch.set_num_threads(6)
        model(noise(4, 3))
        new = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        new.start()
        new.join()
        assert seen == [3, 3, 6] and torch.get_num_threads() == 6
    finally:
        torch.set_num_threads(before)


def test_saved_tensors_hooks_of_the_caller_see_what_replicas_save() -> None:
    packed: list[Tensor] = []
    model = DataParallel(Calls(lambda m, x: m.layer(x).exp()), replicas=2)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        model(noise(4, 3)).sum().backward()
    assert {len(t) for t in packed if t.dim() == 2} >= {2} and len(packed) >= 4


def test_hooks_and_methods_put_on_a_module_act_on_its_replicas() -> None:
    model = layers()
    seen: list[int] = []
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(id(module)))
    plain_forward = type(model[2]).forward
    model[2].forward = lambda self, x: plain_forward(self, x)
    model[2].forward = model[2].forward.__get__(model[2])  # bound to the module, as other libraries do it
    used: list[Any] = []
    model[2].register_forward_pre_hook(lambda module, inputs: used.append(module.forward.__self__ is module))
    DataParallel(model, replicas=2)(noise(4, 4))
    assert len(set(seen)) == 2 and used == [True, True]


def test_parameters_can_be_listed_in_a_replica() -> None:
    def forward(module: Calls, x: Tensor) -> Tensor:
        return x.to(next(module.parameters()).dtype) @ dict(module.named_parameters())["layer.weight"].t()

    plain, batch = filled(Calls(forward)), torch.randn(4, 3)
    model = DataParallel(copy.deepcopy(plain), replicas=2)
    squared(model, batch).backward()
    oracle.assert_close(oracle.gradients_of(model), oracle.gradients(plain, squared, [[batch]]), rtol=1e-10)


def test_what_replicas_change_in_place_is_that_of_replica_0() -> None:
    def forward(module: Calls, x: Tensor) -> Tensor:
        with torch.no_grad():
            module.layer.bias.add_(1)
        return module.layer(x)

    model = DataParallel(Calls(forward), replicas=3)
    before = model.module.layer.bias.clone()
    model(noise(6, 3))
    assert torch.equal(model.module.layer.bias, before + 1)


# ------------------------------------------------------------------ the wrapper


def test_it_is_torchs_class_and_reaches_the_module() -> None:
    plain = layers()
    model = DataParallel(plain, device_ids=["cpu", "cpu"])
    assert isinstance(model, nn.DataParallel) and model.module is plain
    assert model.device_ids == [torch.device("cpu")] * 2 and model.output_device == torch.device("cpu")
    assert model.append == plain.append
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        model.nothing  # noqa: B018


def test_state_dicts_have_and_need_not_have_the_prefix() -> None:
    model, other = DataParallel(layers(), replicas=2), layers()
    assert set(model.state_dict()) == {"module." + name for name in other.state_dict()}
    model.load_state_dict(other.state_dict())
    oracle.assert_close(oracle.parameters_of(model), oracle.parameters_of(other))
    model.load_state_dict(DataParallel(layers(), replicas=2).state_dict())


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_work_on_their_own(twin_of: Callable[[Any], Any]) -> None:
    model, batch = DataParallel(filled(layers()), replicas=2), noise(5, 4)
    model(batch).sum().backward()
    twin = twin_of(model)
    twin.zero_grad()
    squared(twin, batch).backward()
    oracle.assert_close(oracle.gradients_of(twin), oracle.gradients(model.module, squared, [[batch]]), rtol=1e-10)


def test_without_an_accelerator_numbers_of_devices_mean_the_plain_module() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    for model in (DataParallel(layers()), DataParallel(layers(), device_ids=[0, 1])):
        assert model.device_ids == [] and model(noise(1, 4)).shape == (1, 2)


def test_misuse_is_an_error() -> None:
    for wrong in (DataParallel(layers(), replicas=2), nn.Sequential(DataParallel(layers(), replicas=2))):
        with pytest.raises(MisuseError, match="DataParallel of a DataParallel"):
            DataParallel(wrong, replicas=2)
    with pytest.raises(MisuseError, match="replicas=2 .on the device"):
        DataParallel(layers(), device_ids=["cpu"], replicas=2)
    with pytest.raises(RuntimeError, match="uninitialized parameters"):
        DataParallel(nn.LazyLinear(2), replicas=2)(noise(4, 3))
    moved = DataParallel(layers(), device_ids=["cpu", "cpu"])
    moved.module.to("meta")
    with pytest.raises(RuntimeError, match="found one of them on device: meta"):
        moved(noise(4, 4))


def test_neither_goes_inside_of_the_other() -> None:
    def program(rank: int) -> None:
        for name, module in (("its module", DataParallel(layers(), replicas=2)), ("0", None)):
            inside = module or nn.Sequential(DataParallel(layers(), replicas=2), nn.Linear(2, 2))
            with pytest.raises(MisuseError, match=rf"inside of a DistributedDataParallel \({name}\)"):
                DistributedDataParallel(inside)
        with pytest.raises(MisuseError, match=r"DataParallel of a DistributedDataParallel \(its module\)"):
            DataParallel(DistributedDataParallel(layers()), replicas=2)

    run(1, program)


def test_a_compiled_module_is_replicated_uncompiled_and_says_so() -> None:
    plain, batch = filled(layers()), noise(5, 4)
    compiled = copy.deepcopy(plain)
    compiled[0] = torch.compile(compiled[0], backend="eager")
    with pytest.warns(UserWarning, match="runs the replicas of a compiled module uncompiled"):
        model = DataParallel(compiled, replicas=2)
    squared(model, batch).backward()
    truth = oracle.gradients(plain, squared, [[batch]])
    assert torch.allclose(compiled[0]._orig_mod.weight.grad, truth["0.weight"])


def test_the_whole_can_be_compiled() -> None:
    plain, batch = filled(layers()), noise(5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = DataParallel(copy.deepcopy(plain), replicas=2)
        squared(torch.compile(model, backend="eager"), batch).backward()
    oracle.assert_close(oracle.gradients_of(model), oracle.gradients(plain, squared, [[batch]]), rtol=1e-10)


def test_a_scripted_module_is_replicated() -> None:
    plain, batch = filled(layers()), noise(5, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = DataParallel(torch.jit.script(copy.deepcopy(plain)), replicas=2)
    squared(model, batch).backward()
    oracle.assert_close(oracle.gradients_of(model), oracle.gradients(plain, squared, [[batch]]), rtol=1e-10)
