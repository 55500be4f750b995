"""Scripts as people port them from tutorials, unchanged under torchrun and under `phalanx run --drop-in`.

Both runs have the same 50 and more losses: for two ranks the sums are even the same to the last bit.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.commands import run_command
from tests.ecosystem.launching import DROP_IN, SCRIPTS, TORCH, launch, losses

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", ["classify", "char_gpt", "contrastive"])
def test_a_launched_script(name: str, tmp_path: Path) -> None:
    compare([launch(under, [str(SCRIPTS / f"{name}.py")], fresh(tmp_path, under)) for under in (TORCH, DROP_IN)])


def test_a_job_that_resumes_from_its_snapshot(tmp_path: Path) -> None:
    texts = []
    for under in (TORCH, DROP_IN):
        folder = fresh(tmp_path, under)
        texts.append("")
        for epochs in ("4", "8"):
            texts[-1] += launch(under, [str(SCRIPTS / "elastic_snapshot.py"), epochs, "1", "16"], folder)
    compare(texts)


@pytest.mark.parametrize("name", ["spawn_tutorial", "embedding_server"])
def test_a_script_that_spawns_its_ranks(name: str, tmp_path: Path) -> None:
    with ExitStack() as held:
        ports = [str(free_port(held)) for _ in range(4)]
    script = str(SCRIPTS / f"{name}.py")
    torch = run_command(["python", script, *ports[:2]], fresh(tmp_path, TORCH), timeout=300)
    ours = run_command(
        ["python", script, *ports[2:]], fresh(tmp_path, DROP_IN), env={"PHALANX_DROPIN": "1"}, timeout=300
    )
    compare([torch, ours])


def compare(texts: list[str]) -> None:
    torch, ours = map(losses, texts)
    assert len(torch) >= 50
    assert ours == pytest.approx(torch, rel=1e-6)


def fresh(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made


def free_port(held: ExitStack) -> int:
    opened = held.enter_context(socket.socket())
    opened.bind(("localhost", 0))
    return opened.getsockname()[1]
