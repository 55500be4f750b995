"""Measure training steps of ranks on two hosts joined by a slow wire, against torch's DDP with Gloo.

    python benchmarks/two_hosts.py [--rate 1gbit] [--per-host 1] [--models resnet,gpt] [--rounds 8]

The hosts are network namespaces of this machine, made for the time of the measurement; that takes root. Each has
`--per-host` ranks, and what it sends is held to `--rate`. Local steps, torch's DDP and Phalanx take turns in the same
processes. Given are medians in milliseconds, and the ratio of the steps of Phalanx to those of torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx import DistributedDataParallel
from phalanx.observe.bench_models import WORKLOADS

NAMES = tuple(f"phalanx{os.getpid() % 10000}{side}" for side in "ab")  # of namespaces and of their interfaces
ADDRESSES = ("10.213.77.1", "10.213.77.2")
STEPS = 2  # timed in each round, after one that is not


def train(rank: int, size: int, names: list[str], rounds: int) -> None:
    """One rank's part: time all variants of all models, and have rank 0 print the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29500", rank=rank, world_size=size)
    group = dist.new_group(backend="phalanx")
    for name in names:
        workload = WORKLOADS[name]
        inputs, targets = workload.batch(rank)
        models = {
            "local": workload.build(1),
            "torch": TorchDDP(workload.build(1)),
            "phalanx": DistributedDataParallel(workload.build(1), process_group=group),
        }
        taken: dict[str, list[float]] = {variant: [] for variant in models}
        for _ in range(rounds):
            for variant, model in models.items():
                optimizer = torch.optim.SGD(model.parameters(), workload.learning_rate)
                dist.barrier()
                for step in range(STEPS + 1):
                    began = time.perf_counter()
                    optimizer.zero_grad()
                    workload.loss(model(inputs), targets).backward()
                    optimizer.step()
                    taken[variant] += [time.perf_counter() - began] if step else []
        if rank == 0:
            medians = {variant: statistics.median(seconds) * 1e3 for variant, seconds in taken.items()}
            figures = ", ".join(f"{variant} {median:.0f} ms" for variant, median in medians.items())
            print(f"{name}: {figures}; ratio {medians['phalanx'] / medians['torch']:.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def ip(*arguments: str) -> None:
    """Run one command of iproute2."""
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[None]:
    """Make two namespaces with one wire between them, and remove them at the end."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        first, second = NAMES
        ip("link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
            held = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", name, *held)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rate", default="1gbit", help="what each host can send, as tc writes it")
    parser.add_argument("--per-host", type=int, default=1, help="how many ranks each host has")
    parser.add_argument("--models", default="resnet,gpt", help=f"of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        train(given.rank, 2 * given.per_host, given.models.split(","), given.rounds)
        return
    with two_hosts(given.rate):
        ranks = []
        for rank in range(2 * given.per_host):
            name = NAMES[rank // given.per_host]
            part = [sys.executable, __file__, "--rank", str(rank), *sys.argv[1:]]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": name}
            ranks.append(subprocess.Popen(["ip", "netns", "exec", name, *part], env=environment))
        try:
            codes = [process.wait() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
