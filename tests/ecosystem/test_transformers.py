"""transformers' Trainer on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ecosystem.launching import DROP_IN, SCRIPTS, TORCH, launch, losses

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(600)]


def test_losses_are_those_of_torch(tmp_path: Path) -> None:
    script = str(SCRIPTS / "transformers_trainer.py")
    torch, ours = (losses(launch(under, [script, under], tmp_path)) for under in (TORCH, DROP_IN))
    assert len(torch) >= 50 + 2 + 20
    assert ours == pytest.approx(torch, rel=1e-5)
