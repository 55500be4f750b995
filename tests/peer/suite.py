"""Import torch's tests and prepare them: one class, ready to be run rank by rank.

The environment (`BACKEND`, `WORLD_SIZE`) is read when `distributed_test` is imported, and its
decorators decide then which tests skip themselves, so the gates are opened before that import.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.testing._internal import common_distributed, common_utils

from tests.peer import as_cpu, targets
from tests.peer.cases import Target, What

_TESTS = "torch.testing._internal.distributed.distributed_test"
# Sizes meant for GPUs: test, the number it uses, the number that suits two CPU cores.
_SMALLER = [("test_ddp_uneven_inputs", 1000, 30)]


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _open_gates() -> None:
    """Lift what makes tests skip themselves for want of a GPU or of ranks, or for being on Linux.

    What is then left to skip a test: another backend than gloo, a flaw that torch admits to, a
    world that is too small.
    """
    common_utils.IS_LINUX = False
    common_distributed.skip_if_no_gpu = _as_it_is
    common_distributed.skip_if_lt_x_gpu = lambda count, *, allow_cpu=False: _as_it_is
    common_distributed.skip_if_small_worldsize = _skip_below_three_ranks


def _skip_below_three_ranks(test: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for torch's gate, which asks for eight ranks where three suffice."""

    @functools.wraps(test)
    def wrapper(*args: Any) -> Any:
        if int(os.environ["WORLD_SIZE"]) < 3:
            raise unittest.SkipTest("needs three ranks")
        return test(*args)

    return wrapper


def _torchvision() -> types.ModuleType:
    """Stand in for torchvision, of which one test wants a model with nested BatchNorm layers."""
    block = nn.Sequential()
    block.add_module("bn1", nn.BatchNorm2d(2))
    model = nn.Sequential()
    model.add_module("layer1", nn.Sequential(block))
    module = types.ModuleType("torchvision")
    module.models = types.SimpleNamespace(resnet50=lambda: model)  # type: ignore[attr-defined]
    return module


def _shrink(base: type) -> None:
    for name, number, smaller in _SMALLER:
        function = inspect.unwrap(getattr(base, name))
        constants = tuple(smaller if c == number else c for c in function.__code__.co_consts)
        function.__code__ = function.__code__.replace(co_consts=constants)


def load(what: What, target: Target) -> type:
    """Return the class whose `_run(rank, test, file, pipe)` runs one rank of one test.

    It is to be called once in a process, before anything else imports torch's tests.
    """
    _open_gates()
    tests = importlib.import_module(_TESTS)
    tests.torchvision = getattr(tests, "torchvision", _torchvision())
    as_cpu.install(tests, common_distributed)
    targets.install(targets.of_torch(tests) if target is Target.TORCH else targets.of_phalanx(what, target), tests)
    base = tests.DistributedTest._DistTestBase
    _shrink(base)
    return type("PeerTest", (tests.TestDistBackend, base), {})


def set_init_method(url: str) -> None:
    """Say where the tests that start a second world meet; those that save and load want a file."""
    os.environ["INIT_METHOD"] = url
    sys.modules[_TESTS].INIT_METHOD = url
