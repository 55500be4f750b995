"""What people build from torch's own parts, each as a function of the rank that returns what training came to.

A case is run with torch's classes on gloo and with the drop-in, in processes of their own; both answer the same.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as dist_functional
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

Program = Callable[[int], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Make a function one of the cases."""
    PROGRAMS[function.__name__] = function
    return function


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    loss: Callable[[Tensor], Tensor] | None = None,
    steps: int = 4,
) -> list[float]:
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 4, generator=generator)
        value = loss(x) if loss is not None else F.mse_loss(model(x), x)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def plain(model: nn.Module, rank: int, loss: Callable[[Tensor], Tensor] | None = None) -> list[float]:
    return train(model, torch.optim.SGD(model.parameters(), 0.2, momentum=0.5), rank, loss)


# -- optimizers ------------------------------------------------------------------------------------------


@program
def zero_redundancy_optimizer(rank: int) -> Any:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05)
    losses = train(model, optimizer, rank)
    optimizer.consolidate_state_dict(to=0)
    return losses, len(optimizer.state_dict()["state"]) if rank == 0 else None


@program
def zero_redundancy_optimizer_under_join(rank: int) -> Any:
    """The same as SGD under join; in torch, a rank out of data updates its shard by the gradients of its last step."""
    found = []
    for optimizer_class in (ZeroRedundancyOptimizer, None):
        torch.manual_seed(11)
        model = DistributedDataParallel(network())
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        if optimizer_class is not None:
            optimizer = optimizer_class(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([model, optimizer] if optimizer_class is not None else [model]):
            train(model, optimizer, rank, steps=2 + 2 * rank)
        found.append([p.tolist() for p in model.parameters()])
    return found


@program
def post_local_sgd(rank: int) -> Any:
    model = DistributedDataParallel(network())
    state = PostLocalSGDState(process_group=None, subgroup=dist.new_subgroups(1)[0], start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    return train(model, optimizer, rank, steps=8), [p.tolist() for p in model.parameters()]


@program
def communication_hooks(rank: int) -> Any:
    found = []
    for hook in (default_hooks.fp16_compress_hook, annotated):
        model = DistributedDataParallel(network())
        model.register_comm_hook(None, hook)
        found.append(plain(model, rank))
    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return found, plain(model, rank)


def annotated(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda future: future.value()[0] / dist.get_world_size())


annotated.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


# -- what is done to the model ---------------------------------------------------------------------------


@program
def parametrized_layers(rank: int) -> Any:
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 8)),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        parametrizations.orthogonal(nn.Linear(8, 4)),
    )
    return plain(DistributedDataParallel(model), rank)


@program
def tied_weights(rank: int) -> Any:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    return plain(DistributedDataParallel(model), rank)


@program
def moving_average(rank: int) -> Any:
    model = DistributedDataParallel(nn.Sequential(network(), nn.BatchNorm1d(4)))
    averages = [AveragedModel(each, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for each in (model, model.module)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        train(model, optimizer, rank, steps=1)
        for average in averages:
            average.update_parameters(model if average is averages[0] else model.module)
    return [[p.tolist() for p in average.parameters()] for average in averages]


@program
def called_functionally(rank: int) -> Any:
    model = DistributedDataParallel(network())
    parameters = dict(model.named_parameters())
    return plain(model, rank, lambda x: functional_call(model, parameters, (x,)).square().mean())


@program
def penalty_on_gradients(rank: int) -> Any:
    model = DistributedDataParallel(network())

    def loss(x: Tensor) -> Tensor:
        x.requires_grad_()
        value = model(x).square().mean()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.square().sum()

    return plain(model, rank, loss)


@program
def adversarial_training(rank: int) -> Any:
    generator, critic = (DistributedDataParallel(network()) for _ in range(2))
    optimizers = [torch.optim.Adam(each.parameters(), 0.01) for each in (generator, critic)]
    noise, losses = torch.Generator().manual_seed(rank), []
    for _ in range(4):
        z = torch.randn(4, 4, generator=noise)
        fake = generator(z)
        told = (F.softplus(critic(fake.detach())) + F.softplus(-critic(z + 1))).mean()
        optimizers[1].zero_grad()
        told.backward()
        optimizers[1].step()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        optimizers[0].zero_grad()
        fooled = F.softplus(-critic(fake)).mean()
        fooled.backward()
        optimizers[0].step()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        losses += [told.item(), fooled.item()]
    return losses


# -- embeddings of all ranks -----------------------------------------------------------------------------


@program
def contrastive_loss(rank: int) -> Any:
    found = []
    for gather in (lambda x: torch.cat(dist_functional.all_gather(x)), gathered_functionally, gathered_by_object):
        model = DistributedDataParallel(network())

        def loss(x: Tensor, model: nn.Module = model, gather: Callable[[Tensor], Tensor] = gather) -> Tensor:
            mine = F.normalize(model(x), dim=1)
            everyone = gather(mine)
            return F.cross_entropy(mine @ everyone.t(), torch.arange(4) + 4 * rank)

        found.append(plain(model, rank, loss))
    return found


def gathered_functionally(x: Tensor) -> Tensor:
    return functional_collectives.all_gather_tensor_autograd(x, 0, dist.group.WORLD)


def gathered_by_object(x: Tensor) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x.detach())
    parts[dist.get_rank()] = x
    return torch.cat(parts)


# -- memory and precision --------------------------------------------------------------------------------


@program
def activation_checkpointing(rank: int) -> Any:
    found = []
    for reentrant in (False, True):
        model = network()
        ddp = DistributedDataParallel(Recomputed(model, reentrant), static_graph=reentrant)
        found.append(plain(ddp, rank))
    return found


class Recomputed(nn.Module):
    def __init__(self, inner: nn.Sequential, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner[0](x)
        return checkpoint(self.inner[1:], hidden, use_reentrant=self.reentrant)


@program
def autocast_and_grad_scaler(rank: int) -> Any:
    model = DistributedDataParallel(network())
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    generator, losses = torch.Generator().manual_seed(rank), []
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(4, 4, generator=generator)
        if step == 2 and rank == 1:
            x[0, 0] = float("inf")  # every rank must leave this step out
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(model(x).float(), torch.zeros(4, 4))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item() if loss.isfinite() else -1.0)
    return losses, scaler.get_scale(), [p.tolist() for p in model.parameters()]


# -- compilers -------------------------------------------------------------------------------------------


@program
def compiled(rank: int, backends: tuple[str, ...] = ("eager", "aot_eager", "inductor")) -> Any:
    found = []
    for backend in backends:
        model = DistributedDataParallel(network())
        found.append(plain(model, rank, mean_square(torch.compile(model, backend=backend))))
        model = DistributedDataParallel(torch.compile(network(), backend=backend))
        found.append(plain(model, rank, mean_square(model)))
        torch._dynamo.reset()
    return found


def mean_square(model: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


# -- meshes and checkpoints ------------------------------------------------------------------------------


@program
def inside_a_device_mesh(rank: int) -> Any:
    """The model is split over one dimension of a mesh, or sharded, and replicated over the other."""
    found = []
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = network()
    parallelize_module(model, mesh["shard"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found.append(plain(replicate(model, device_mesh=mesh["replicate"]), rank))
    model = fully_shard(network(), mesh=init_device_mesh("cpu", (2,)))
    found.append(plain(model, rank))
    found.append(plain(DistributedDataParallel(network(), device_mesh=mesh["replicate"]), rank))
    return found


@program
def replicated_composably(rank: int) -> Any:
    model = replicate(network())
    losses = plain(model, rank)
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4) * (rank + 1)).sum().backward()
    return losses, model[2].bias.grad.tolist()


@program
def distributed_checkpoint(rank: int) -> Any:
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    before = train(model, optimizer, rank)
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder[0])
    expected = train(model, optimizer, rank)
    fresh = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(fresh.parameters(), 0.05)
    state, moments = get_state_dict(fresh, optimizer)
    loaded = {"model": state, "optimizer": moments}
    dcp.load(loaded, checkpoint_id=folder[0])
    set_state_dict(fresh, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert train(fresh, optimizer, rank) == expected
    return before, expected, sorted(state), bool(list(Path(str(folder[0])).iterdir()))


# -- the wrapper itself ----------------------------------------------------------------------------------


@program
def subclasses(rank: int) -> Any:
    """As Lightning and fairscale do: override forward, or one of its three parts."""

    class Redirected(DistributedDataParallel):
        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self.module(*inputs, **kwargs))

    class Doubled(DistributedDataParallel):
        def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return 2 * super()._run_ddp_forward(*inputs, **kwargs)

    assert isinstance(Doubled(network()), torch.nn.parallel.DistributedDataParallel)
    return [plain(cls(network()), rank) for cls in (Redirected, Doubled)]


@program
def names_of_torch(rank: int) -> Any:
    model = DistributedDataParallel(nn.Sequential(network(), nn.BatchNorm1d(4)))
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    before = model.will_sync_module_buffers(), model.require_forward_param_sync, model.require_backward_grad_sync
    model.require_backward_grad_sync = False
    model(x).square().mean().backward()
    between = model.require_forward_param_sync
    output = model(x)
    model.require_backward_grad_sync = True
    model.reducer.prepare_for_backward([])
    output.square().mean().backward()  # synchronises, although its forward would not have
    model.logger.set_runtime_stats_and_log()
    data = model._get_ddp_logging_data()
    model._sync_buffers()
    names = (data["find_unused_parameters"], data["world_size"], data["backend_name"], data["module_name"])
    settings = model.find_unused_parameters, model.static_graph, model.device_ids, model.dim, model.broadcast_buffers
    DistributedDataParallel(network())._set_static_graph()
    ignored = network()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, ["0.weight"])
    local = plain(DistributedDataParallel(ignored), rank)
    return before, between, names, settings, model.module[0][0].weight.grad.tolist(), local, type(model).__name__


@program
def collectives_and_copies(rank: int) -> Any:
    model = DistributedDataParallel(network())
    twin = copy.deepcopy(model)
    total = functools.reduce(torch.add, (p.sum() for p in twin.parameters())).detach()
    group = dist.new_group([0, 1])
    dist.all_reduce(total, group=group)
    dist.monitored_barrier()
    return total.item(), dist.get_backend(), dist.get_backend(group), dist.get_backend_config(group), plain(twin, rank)
