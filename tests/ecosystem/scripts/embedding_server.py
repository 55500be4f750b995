"""The shape of training with a parameter server: embeddings live there, the dense part is wrapped on two trainers.

Each trainer has a table of its own on the server, so that the losses do not depend on who comes first.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.multiprocessing as mp
import torch.nn as nn
from torch.distributed import rpc
from torch.distributed.nn.api.remote_module import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

TRAINERS, ROWS, WIDTH, CLASSES = 2, 40, 8, 5
SERVER = TRAINERS


class Tagger(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table
        self.dense = DDP(nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES)))

    def forward(self, words, starts):
        return self.dense(self.table.forward(words, starts))


def batches(rank, steps):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        words = torch.randint(0, ROWS, (24,), generator=generator)
        yield words, torch.arange(0, 24, 4), torch.randint(0, CLASSES, (6,), generator=generator)


def train(rank, steps):
    torch.manual_seed(rank)
    table = RemoteModule(f"{SERVER}/cpu", nn.EmbeddingBag, args=(ROWS, WIDTH), kwargs={"mode": "sum"})
    rpc.rpc_sync(str(SERVER), reset, args=(table.module_rref,))
    model = Tagger(table)
    of_server = table.remote_parameters()
    own = [rpc.RRef(parameter) for parameter in model.dense.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, of_server + own, lr=0.1)
    criterion = nn.CrossEntropyLoss()
    for words, starts, target in batches(rank, steps):
        with dist_autograd.context() as context:
            loss = criterion(model(words, starts), target)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        if rank == 0:
            print(f"loss {loss.item():.9f}", flush=True)


def reset(module):
    with torch.no_grad():
        for parameter in module.local_value().parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))


def main(rank, port, group_port):
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://localhost:{port}")
    rpc.init_rpc(str(rank), rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options)
    if rank != SERVER:
        dist.init_process_group("gloo", init_method=f"tcp://localhost:{group_port}", rank=rank, world_size=TRAINERS)
        train(rank, steps=60)
    rpc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    mp.spawn(main, args=tuple(sys.argv[1:3]), nprocs=TRAINERS + 1, join=True)
