"""The shape of a SimCLR script: embeddings gathered from all ranks with gradients, accumulation, EMA, ZeRO."""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        self.projection = nn.utils.parametrizations.weight_norm(nn.Linear(32, 16))

    def forward(self, a, b):
        return [F.normalize(self.projection(self.backbone(x)), dim=-1) for x in (a, b)]


def nt_xent(a, b, temperature=0.2):
    a = torch.cat(dist_fn.all_gather(a))
    b = torch.cat(dist_fn.all_gather(b))
    logits = a @ b.t() / temperature
    labels = torch.arange(len(a))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def main():
    dist.init_process_group("cpu:gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(Encoder(), broadcast_buffers=False)
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3)
    generator = torch.Generator().manual_seed(rank)
    for step in range(50):
        last = step % 2 == 1
        with contextlib.nullcontext() if last else model.no_sync():
            x = torch.randn(8, 32, generator=generator)
            a, b = model(x, x + 0.1 * torch.randn(8, 32, generator=generator))
            loss = nt_xent(a, b) / 2
            loss.backward()
        if last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model.module)
        if rank == 0:
            print(f"step {step} loss {loss.item():.9f}", flush=True)
    total = sum(p.double().abs().sum() for p in ema.parameters())
    if rank == 0:
        print(f"ema loss {total.item():.9f}")
    optimizer.consolidate_state_dict(to=0)
    if int(os.environ["RANK"]) == 0:
        torch.save(optimizer.state_dict(), os.devnull)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
