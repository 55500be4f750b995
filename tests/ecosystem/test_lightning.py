"""Lightning's Trainer and Fabric: by our strategies and by the drop-in, against torch's DDP and one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ecosystem.launching import DROP_IN, PHALANX, SCRIPTS, TORCH, launch, losses

pytest.importorskip("lightning")
pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(900)]

SCRIPT = str(SCRIPTS / "lightning_programs.py")


@pytest.mark.parametrize("program", ["fit", "accumulate", "gan", "fabric"])
def test_losses_are_those_of_torch(program: str, tmp_path: Path) -> None:
    # The parts of a GAN take turns, for which torch needs to be told.
    strategy = "ddp_find_unused_parameters_true" if program == "gan" else "ddp"
    torch = losses(launch(TORCH, [SCRIPT, program, strategy, "4"], tmp_path))
    assert len(torch) >= 32
    assert losses(launch(DROP_IN, [SCRIPT, program, "ddp", "4"], tmp_path)) == pytest.approx(torch, rel=1e-5)
    assert losses(launch(PHALANX, [SCRIPT, program, "phalanx", "4"], tmp_path)) == pytest.approx(torch, rel=1e-5)


@pytest.mark.parametrize(("under", "strategy"), [(DROP_IN, "ddp"), (PHALANX, "phalanx")])
def test_sync_batchnorm_is_one_process(under: str, strategy: str, alone: list[float], tmp_path: Path) -> None:
    ours = losses(launch(under, [SCRIPT, "sync_batchnorm", strategy, "4"], tmp_path))
    assert ours == pytest.approx(alone, rel=1e-4)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process on batches twice the size."""
    folder = tmp_path_factory.mktemp("alone")
    found = losses(launch(PHALANX, [SCRIPT, "sync_batchnorm", "single", "8"], folder, ranks=1))
    assert len(found) >= 32
    return found
