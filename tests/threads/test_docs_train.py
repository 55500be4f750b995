"""What docs/large_batch.md and docs/trackers.md show is run, and each row of the table of means is computed."""

from __future__ import annotations

import re
from math import nan
from pathlib import Path

import pytest

import phalanx
from phalanx.testing import run
from tests.test_readme import Block, blocks_of

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text() for name in ("large_batch.md", "trackers.md")}
BLOCKS = [block for text in PAGES.values() for block in blocks_of(text)]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_works(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert block.language == "python"
    monkeypatch.chdir(tmp_path)
    run(1, lambda rank: exec(compile(block.code, "block", "exec"), {}))


def test_every_mean_of_the_page(tmp_path: Path) -> None:
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGES["trackers.md"].partition("| rank 0 | rank 1 |")[2].partition("\n\n")[0].splitlines()[2:]
    ]
    assert len(table) == 6

    def program(rank: int) -> list[dict[str, float]]:
        with phalanx.tracker("csv", dir=tmp_path) as tracker:
            means = []
            for step, row in enumerate(table):
                values, n = re.fullmatch(r"`(.*)`(?:, n=(\d))?", row[rank]).groups()
                means.append(tracker.log(eval(values, {"nan": nan}), step, n=int(n or 1)))
            return means

    expected = [{key: float(value) for key, value in re.findall(r"(\w+) ([\d.]+)", row[2])} for row in table]
    assert run(2, program) == [expected, expected]
