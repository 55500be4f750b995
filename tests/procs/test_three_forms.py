"""The example, the page and the benchmark of the three forms, as a person runs them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.commands import BIN, run_command
from tests.test_readme import blocks_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "three_forms.md").read_text()
FORMS = ["one process", "split over 2 devices", "DataParallel, 2 replicas", "DistributedDataParallel, {0} ranks",
         "one process, without BatchNorm", "pipeline of 2 ranks, times {1}"]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_example_says_that_the_forms_agree(ranks: int, tmp_path: Path) -> None:
    command = [str(BIN / "phalanx"), "run", "-n", str(ranks), str(ROOT / "examples" / "three_forms.py")]
    lines = [line.partition("] ")[2] for line in run_command(command, tmp_path).splitlines()]
    found = [re.fullmatch(r"(.+?) +\d+\.\d\d ms   loss (\d\.\d{6})   apart (\S+)", line) for line in lines[1:]]
    assert [match and match[1] for match in found] == [form.format(ranks, ranks // 2) for form in FORMS]
    assert all(match and float(match[3]) < 1e-4 for match in found)
    assert [match and match[2] for match in found][:4] == [found[0] and found[0][2]] * 4


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.full)])
def test_the_blocks_of_the_page_run(ranks: int, tmp_path: Path) -> None:
    codes = [block.code for block in blocks_of(PAGE)]
    assert len(codes) == 4 and PAGE.count("\n```") == 8
    (tmp_path / "page.py").write_text("\n".join(codes))
    start = [sys.executable] if ranks == 1 else [str(BIN / "phalanx"), "run", "-n", str(ranks)]
    run_command([*start, "page.py"], tmp_path)


@pytest.mark.full
def test_the_benchmark_measures_every_form(tmp_path: Path) -> None:
    command = [str(BIN / "phalanx"), "run", "-n", "2", str(ROOT / "benchmarks" / "three_forms.py")]
    said = run_command([*command, "--rounds", "2", "--json", "times.json"], tmp_path)
    results = json.loads((tmp_path / "times.json").read_text())
    assert set(results) == {"perceptron", "convolutions"}
    for times in results.values():
        assert len(times) == 6 and all(len(values) == 2 and min(values) > 0 for values in times.values())
        assert all(form in said for form in times)
