"""torchmetrics over ranks with different numbers of items."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ecosystem.launching import DROP_IN, SCRIPTS, launch

pytest.importorskip("torchmetrics")
pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(300)]


def test_metrics_of_all_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    written = launch(DROP_IN, [str(SCRIPTS / "torchmetrics_uneven.py")], tmp_path)
    assert written.count("metrics agree") == 2
