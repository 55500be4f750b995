"""`init` and its companions, in worlds of real processes over torch's own gloo backend."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.errors import CollectiveTimeoutError, MisuseError
from phalanx.group import world

ROOT = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT)}
SCRIPT = r"""
import os
import torch
import torch.distributed as dist
from phalanx.group import world

before = (world.rank(), world.world_size(), world.local_rank(), world.is_main())
for _ in range(2):
    world.init("gloo", timeout=60)
    world.init("gloo", timeout=60)
    total = torch.ones(2) * (world.rank() + 1)
    dist.all_reduce(total)
    inside = (world.rank(), world.world_size(), world.local_rank(), world.is_main())
    world.shutdown()
    world.shutdown()
said = (before == inside, inside, total.tolist(), torch.get_num_threads() >= 1)
os.write(1, (" ".join(map(str, said)) + "\n").encode())  # in one piece: torchrun's ranks share a pipe
world.init("gloo", timeout=60)  # left open: closed at exit
"""


def variables(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("launcher", ["phalanx", "torchrun"])
def test_two_ranks(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    start = {
        "phalanx": ["phalanx", "run", "-n", "2"],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }[launcher]
    command = [sys.executable, "-m", *start, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    lines = sorted(re.sub(r"^\[rank \d\] ", "", line) for line in done.stdout.splitlines())
    assert lines == [f"True ({rank}, 2, {rank}, {rank == 0}) [3.0, 3.0] True" for rank in range(2)]
    assert "destroy_process_group" not in done.stderr


def test_without_a_launcher_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    variables(monkeypatch)
    assert (world.rank(), world.world_size(), world.local_rank(), world.is_main()) == (0, 1, 0, True)
    world.init("gloo")
    try:
        dist.barrier()
        gathered: list[str | None] = [None]
        dist.all_gather_object(gathered, "only")
        assert gathered == ["only"] and world.world_size() == 1
    finally:
        world.shutdown()
    assert not dist.is_initialized()


def test_a_group_that_is_there_already_is_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    variables(monkeypatch, RANK="nonsense")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world.init("phalanx")
        assert dist.get_backend() == "gloo"
    finally:
        world.shutdown()


def test_a_name_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    variables(monkeypatch, RANK="1", WORLD_SIZE="2", MASTER_ADDR="no.such.host.invalid", MASTER_PORT="29511")
    began = time.monotonic()
    with pytest.raises(MisuseError, match=r"'no.such.host.invalid' \(MASTER_ADDR\) has no address"):
        world.init("gloo", timeout=1.0)
    assert time.monotonic() - began < 10


def test_a_rank_0_that_does_not_come_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables(
            monkeypatch,
            RANK="1",
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free.getsockname()[1]),
        )
        began = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="MASTER_ADDR, MASTER_PORT") as caught:
            world.init("gloo", timeout=1.0)
    assert caught.value.missing == [0] and caught.value.rank == 1
    assert time.monotonic() - began < 3


def test_a_port_in_use_is_named_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        variables(monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with pytest.raises(MisuseError, match=rf"port {port} \(MASTER_PORT\) is in use"):
            world.init("gloo", timeout=5.0)


def test_another_program_on_the_port_does_not_hold_the_other_ranks(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        env = {
            **ENV,
            "RANK": "1",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(other.getsockname()[1]),
        }
        code = "from phalanx.group import world; world.init('gloo', timeout=1.0)"
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "does not answer as a store" in done.stderr and "rank 0 has not arrived" in done.stderr


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    variables(monkeypatch)
    with pytest.raises(MisuseError, match="timeout=0"):
        world.init("gloo", timeout=0)
    variables(monkeypatch, RANK="0")
    with pytest.raises(MisuseError, match="WORLD_SIZE is not"):
        world.init("gloo")
