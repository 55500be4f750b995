"""One model, one batch, three forms of parallel training, and one process: all of them agree.

    phalanx run -n 2 examples/three_forms.py
    phalanx run -n 4 examples/three_forms.py

Split over devices: blocks in different places of one process (here its CPU, named twice), or in the processes of
a pipeline. DataParallel: replicas in the threads of one process. DistributedDataParallel: a replica in each
process. Each form takes the same steps on the same items. A line says how far its parameters are from those of
one process at the end, and how long a step takes (the median); more than rounding apart is an error.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

import phalanx
from phalanx import DataParallel, DistributedDataParallel, SyncBatchNorm

STEPS, ITEMS, LEARNING_RATE, ROUNDING = 20, 64, 0.05, 1e-4
Step = Callable[[Tensor, Tensor], None]
say = phalanx.rank_zero_only(print)


def build() -> nn.Sequential:
    """The model, with the same parameters every time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(32, 256), nn.BatchNorm1d(256), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 8))


def synced(group: dist.ProcessGroup | None = None) -> nn.Sequential:
    """The model with statistics of the whole batch, however it is split: over the ranks of `group`, or all."""
    return SyncBatchNorm.convert_sync_batchnorm(build(), group)


def without_norm() -> nn.Sequential:
    """The model without BatchNorm: a pipeline computes micro-batch after micro-batch, never the whole batch."""
    return nn.Sequential(*(layer for layer in build() if not isinstance(layer, nn.BatchNorm1d)))


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """The whole batch of each step."""
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = torch.randn(ITEMS, 32, generator=random)
        yield inputs, inputs[:, :8].square()


def train(parameters: Iterable[Tensor], step: Step) -> float:
    """Train with `step`, which does forward and backward on a whole batch; return milliseconds per step."""
    optimizer, times = torch.optim.SGD(parameters, lr=LEARNING_RATE), []
    for inputs, targets in batches():
        began = time.perf_counter()
        optimizer.zero_grad()
        step(inputs, targets)
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def whole(model: nn.Module) -> Step:
    """A step of a model that takes the whole batch."""
    return lambda inputs, targets: mse_loss(model(inputs), targets).backward()


def share(model: nn.Module) -> Step:
    """A step of a model that takes this rank's share of the batch."""
    size, rank = phalanx.world_size(), phalanx.rank()
    return lambda inputs, targets: mse_loss(model(inputs.chunk(size)[rank]), targets.chunk(size)[rank]).backward()


def pipeline(replicas: int) -> tuple[nn.Module, float]:
    """Two stages on different ranks, `replicas` of each; return this rank's part of the model."""
    mesh = init_device_mesh("cpu", (2, replicas), mesh_dim_names=("stage", "replica"))
    index, replica = mesh.get_local_rank("stage"), mesh.get_local_rank("replica")
    part = phalanx.pipeline_stages(without_norm(), 2)[index]
    model = DistributedDataParallel(part, process_group=mesh.get_group("replica"))
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = Schedule1F1B(stage, 4, loss_fn=mse_loss)

    def step(inputs: Tensor, targets: Tensor) -> None:
        if index == 0:
            schedule.step(inputs.chunk(replicas)[replica])
        else:
            schedule.step(target=targets.chunk(replicas)[replica])

    return part, train(model.parameters(), step)


def report(form: str, milliseconds: float, model: nn.Module, truth: nn.Module) -> None:
    """Compare what this rank has of a model with the truth; every rank calls it."""
    expected = truth.state_dict()
    apart = torch.tensor(max((value - expected[name]).abs().max().item() for name, value in model.state_dict().items()))
    dist.all_reduce(apart, dist.ReduceOp.MAX)
    if apart > ROUNDING:
        raise SystemExit(f"{form}: the parameters are {apart:.1e} apart from those of one process")
    loss = mse_loss(truth.eval()(next(batches())[0]), next(batches())[1])
    say(f"{form:44} {milliseconds:7.2f} ms   loss {loss:.6f}   apart {apart:.1e}")


def in_one_process(form: str, model: nn.Module, step: Step, truth: nn.Module) -> None:
    """Rank 0 trains, with all cores, and the others wait; then all compare."""
    milliseconds, threads = 0.0, torch.get_num_threads()
    if phalanx.is_main():
        torch.set_num_threads(max(threads, phalanx.world_size()))
        milliseconds = train(model.parameters(), step)
        torch.set_num_threads(threads)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    report(form, milliseconds, model, truth)


def main() -> None:
    phalanx.init()
    ranks, alone = phalanx.world_size(), dist.new_group([0])
    say(f"{STEPS} steps on {ITEMS} items, {ranks} ranks")
    truth = build()
    in_one_process("one process", truth, whole(truth), truth)
    split = phalanx.split_over(build(), ["cpu", "cpu"])
    in_one_process("split over 2 devices", split, whole(split), truth)
    parallel = DataParallel(synced(alone), replicas=2)
    in_one_process("DataParallel, 2 replicas", parallel.module, whole(parallel), truth)
    ddp = DistributedDataParallel(synced())
    report(f"DistributedDataParallel, {ranks} ranks", train(ddp.parameters(), share(ddp)), ddp.module, truth)
    if ranks % 2 == 0:
        plain = without_norm()
        in_one_process("one process, without BatchNorm", plain, whole(plain), plain)
        part, milliseconds = pipeline(ranks // 2)
        report(f"pipeline of 2 ranks, times {ranks // 2}", milliseconds, part, plain)
    phalanx.shutdown()


if __name__ == "__main__":
    main()
