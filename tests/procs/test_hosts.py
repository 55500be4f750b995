"""Two hosts: network namespaces joined by a cable, two ranks in each, `phalanx run` on both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
import phalanx

phalanx.init()
rank = phalanx.rank()
torch.manual_seed(0)
ddp = phalanx.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
batch = torch.arange(8.0).view(2, 4) * (rank + 1)
ddp(batch).sum().backward()
first = ddp.module[2].weight.grad.tolist()
gathered = [None] * phalanx.world_size()
dist.all_gather_object(gathered, first)
steps = 0
with ddp.join():
    for _ in range(rank):
        ddp.zero_grad()
        ddp(batch).sum().backward()
        steps += 1
weights = [None] * phalanx.world_size()
dist.all_gather_object(weights, [p.sum().item() for p in ddp.parameters()])
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump({"transport": ddp.transport, "gathered": gathered, "weights": weights, "steps": steps}, file)
"""


KILLED = """
import os, signal, sys, time
import torch
from torch import nn
import phalanx
from phalanx.group.group import Group

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # survivors take their time
phalanx.init()
rank = phalanx.rank()
ddp = phalanx.DistributedDataParallel(nn.Sequential(*(nn.Linear(700, 700) for _ in range(3))))
fence = Group.fence_on_host

def dying(self):
    if rank == 3 and step == 20:
        with open(f"{sys.argv[1]}/killed", "w") as file:
            file.write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    fence(self)

Group.fence_on_host = dying
for step in range(1000):
    try:
        ddp(torch.ones(4, 700)).sum().backward()  # gradients of several pieces
    except phalanx.PeerLostError as error:
        with open(f"{sys.argv[1]}/{rank}.txt", "w") as file:
            file.write(f"{time.time()} {error}")
        time.sleep(4)
        raise
"""


def _ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces with the addresses 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("making network namespaces needs root and iproute2")
    mark = uuid.uuid4().hex[:6]
    names, cables = [f"ph-{mark}-a", f"ph-{mark}-b"], [f"v{mark}a", f"v{mark}b"]
    made = all(_ip("netns", "add", name) for name in names)
    made = made and _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
    for number, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
        made = made and _ip("link", "set", cable, "netns", name)
        made = made and _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", cable)
        made = made and _ip("-n", name, "link", "set", cable, "up") and _ip("-n", name, "link", "set", "lo", "up")
    try:
        if not made:
            pytest.skip("this machine does not allow network namespaces")
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name)


def start(hosts: list[str], program: str, folder: Path, port: int) -> list[subprocess.Popen[str]]:
    """Run a program with two ranks on each host."""
    file = folder / "train.py"
    file.write_text(program)
    launch = [sys.executable, "-m", "phalanx", "run", "-n", "2", "--nnodes", "2", "--master-addr", "10.77.0.1"]
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *launch, "--master-port", str(port), "--node-rank", str(node), str(file),
             str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node, host in enumerate(hosts)
    ]  # fmt: skip


def test_ranks_on_two_hosts_train_together_and_join(hosts: list[str], tmp_path: Path) -> None:
    runs = start(hosts, PROGRAM, tmp_path, 29761)
    said = [run.communicate(timeout=90)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(said)
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank, result in enumerate(results):
        assert result["transport"] == "shared memory and gloo"
        assert result["steps"] == rank
        assert result["gathered"] == [result["gathered"][0]] * 4
        assert result["weights"] == [results[0]["weights"][0]] * 4


def test_a_rank_killed_in_a_reduction_is_an_error_on_both_hosts_at_once(hosts: list[str], tmp_path: Path) -> None:
    runs = start(hosts, KILLED, tmp_path, 29762)
    said = [run.communicate(timeout=90)[0] for run in runs]
    assert all(run.returncode for run in runs), "\n".join(said)
    killed = float((tmp_path / "killed").read_text())
    for rank in range(3):  # rank 0 waits for data of rank 2, which lives
        told = (tmp_path / f"{rank}.txt").read_text()
        assert "rank 3" in told and float(told.split()[0]) - killed < 2
