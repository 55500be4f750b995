"""The shape of torch's DDP tutorial: the script spawns its own ranks, wraps a toy model, saves and loads."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim
from torch.nn.parallel import DistributedDataParallel as DDP

CHECKPOINT = os.path.join(tempfile.gettempdir(), f"model-{os.getppid()}.checkpoint")


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def train(ddp_model, optimizer, steps, rank):
    loss_fn = nn.MSELoss()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10, generator=generator))
        labels = torch.randn(20, 5, generator=generator)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"loss {loss.item():.9f}", flush=True)


def demo_basic(rank, world_size, port):
    setup(rank, world_size, port)
    torch.manual_seed(rank)  # different weights: wrapping makes them equal
    ddp_model = DDP(ToyModel())
    train(ddp_model, optim.SGD(ddp_model.parameters(), lr=0.01), 25, rank)
    cleanup()


def demo_checkpoint(rank, world_size, port):
    setup(rank, world_size, port)
    ddp_model = DDP(ToyModel())
    path = CHECKPOINT if rank == 0 else None
    path = _agreed(path)
    if rank == 0:
        torch.save(ddp_model.state_dict(), path)
    dist.barrier()
    ddp_model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    torch.manual_seed(7)
    for parameter in ddp_model.parameters():
        nn.init.normal_(parameter, std=0.1)
    train(ddp_model, optim.SGD(ddp_model.parameters(), lr=0.01, momentum=0.9), 25, rank)
    dist.barrier()
    if rank == 0:
        os.remove(path)
    cleanup()


def _agreed(path):
    paths = [path]
    dist.broadcast_object_list(paths, src=0)
    return paths[0]


def run_demo(demo_fn, world_size, port):
    mp.spawn(demo_fn, args=(world_size, port), nprocs=world_size, join=True)


if __name__ == "__main__":
    run_demo(demo_basic, 2, sys.argv[1])
    run_demo(demo_checkpoint, 2, sys.argv[2])
