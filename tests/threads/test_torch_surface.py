"""Names of torch's DistributedDataParallel that other libraries call or override."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import DistributedDataParallel
from phalanx.testing import run


def one() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def x(rank: int) -> Tensor:
    return torch.tensor([[rank + 1.0]])


@pytest.mark.parametrize("given", [[], None], ids=["nothing", "outputs"])
def test_prepare_for_backward_overrules_the_forward(given: list[Tensor] | None) -> None:
    """Accelerate: forwards under no_sync(), and only the last backward synchronises."""

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(one())
        with ddp.no_sync():
            outputs = [ddp(x(rank)) for _ in range(2)]
        outputs[0].sum().backward()
        local = ddp.module.weight.grad.item()
        ddp.reducer.prepare_for_backward(outputs[1:] if given is None else given)
        outputs[1].sum().backward()
        return [local, ddp.module.weight.grad.item()]

    assert run(2, program) == [[1.0, 3.0], [2.0, 3.0]]


def test_prepare_for_backward_under_no_sync_changes_nothing() -> None:
    def program(rank: int) -> float:
        ddp = DistributedDataParallel(one())
        with ddp.no_sync():
            output = ddp(x(rank))
            ddp.reducer.prepare_for_backward([])
            output.sum().backward()
        return ddp.module.weight.grad.item()

    assert run(2, program) == [1.0, 2.0]


def test_the_parts_of_forward_can_be_overridden_and_called() -> None:
    class Redirected(DistributedDataParallel):
        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self.module(*inputs, **kwargs))

    class Doubled(DistributedDataParallel):
        def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return 2 * super()._run_ddp_forward(*inputs, **kwargs)

    def program(rank: int) -> list[float]:
        grads = []
        for cls in (Redirected, Doubled):
            ddp = cls(one())
            ddp(x(rank)).sum().backward()
            grads.append(ddp.module.weight.grad.item())
        return grads

    assert run(2, program) == [[1.5, 3.0]] * 2


def test_the_logger() -> None:
    def program(rank: int) -> list[Any]:
        ddp = DistributedDataParallel(one())
        ddp.logger.set_runtime_stats_and_log()
        ddp.logger.set_error_and_log("broken")
        data = ddp.logger._get_ddp_logging_data()
        return [data.strs_map["error"], data.ints_map["world_size"], ddp._get_ddp_logging_data()["error"]]

    assert run(2, program) == [["broken", 2, "broken"]] * 2


def test_the_logger_is_one_that_torchs_own_functions_take() -> None:
    def program(rank: int) -> list[Any]:
        ddp = DistributedDataParallel(one())
        with pytest.raises(RuntimeError, match="No support for sparse tensors"):
            dist._compute_bucket_assignment_by_size([torch.ones(2).to_sparse()], [400], logger=ddp.logger)
        data = ddp._get_ddp_logging_data()
        return [data["error"], data["has_error"], copy.deepcopy(ddp).logger is not ddp.logger]

    assert run(2, program) == [["No support for sparse tensors.", 1, True]] * 2


def test_buffers_by_their_older_names() -> None:
    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(nn.Sequential(one(), nn.BatchNorm1d(1)))
        buffer, seen = ddp.module[1].running_mean, []
        for sync in (ddp._sync_params, ddp._sync_buffers, lambda: ddp._sync_module_buffers(1)):
            buffer.fill_(rank + 5.0)
            sync()
            seen.append(buffer.item())
        return seen

    assert run(2, program) == [[5.0, 5.0, 6.0]] * 2


def test_another_process_group_from_now_on() -> None:
    """torchft calls _update_process_group when ranks come and go; hooks do not pile up."""

    def program(rank: int) -> list[float]:
        ddp, grads = DistributedDataParallel(one()), []
        for group in (dist.new_group([0]), dist.new_group([1]), dist.group.WORLD):
            if group is dist.GroupMember.NON_GROUP_MEMBER:
                continue
            ddp._update_process_group(group)
            ddp.zero_grad()
            ddp(x(rank)).sum().backward()
            grads.append(ddp.module.weight.grad.item())
        assert len(ddp.module.weight._post_accumulate_grad_hooks) == 1
        return grads

    assert run(2, program) == [[1.0, 1.5], [2.0, 1.5]]


def test_none_of_it_keeps_a_dropped_wrapper() -> None:
    def program(rank: int) -> bool:
        ddp = DistributedDataParallel(one())
        ddp.reducer.prepare_for_backward([])
        ddp(x(rank)).sum().backward()
        ddp.logger.set_runtime_stats_and_log()
        gone = weakref.ref(ddp)
        del ddp
        return gone() is None

    assert run(2, program) == [True, True]
