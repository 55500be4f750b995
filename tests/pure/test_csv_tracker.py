"""The CSV writer: a column per key whenever it first comes, whole lines only, runs that are resumed."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx.errors import MisuseError
from phalanx.train.trackers.csv_file import CsvFile
from phalanx.train.trackers.identity import kept_identity
from phalanx.train.trackers.writer import Ending, Run


def rows(folder: Path) -> list[dict[str, str]]:
    """Return the lines of metrics.csv, without their empty cells."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{key: cell for key, cell in row.items() if cell} for row in csv.DictReader(file)]


keys = st.text(min_size=1, max_size=3).filter(lambda key: key.isprintable() and key != "step")
calls = st.lists(st.dictionaries(keys, st.floats(allow_nan=False), max_size=3), max_size=6)


@given(calls)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_was_logged_stands_there(tmp_path: Path, logged: list[dict[str, float]]) -> None:
    (tmp_path / "metrics.csv").unlink(missing_ok=True)
    writer = CsvFile(Run(tmp_path))
    for step, values in enumerate(logged):
        writer.write(values, step)
    writer.close(Ending.FINISHED)
    read = [{key: float(cell) for key, cell in row.items()} for row in rows(tmp_path)]
    assert read == [{"step": step, **values} for step, values in enumerate(logged)]


def test_each_line_is_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    writer = CsvFile(Run(tmp_path, {"lr": 0.1, "where": tmp_path}))
    writer.write({"loss": 0.1 + 0.2}, 1)
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,0.30000000000000004\n"
    writer.write({"accuracy": math.nan}, 2)
    assert (tmp_path / "metrics.csv").read_text() == "step,loss,accuracy\n1,0.30000000000000004,\n2,,nan\n"
    about = json.loads((tmp_path / "run.json").read_text())
    assert (about["status"], about["ended"]) == ("running", None)
    assert about["config"] == {"lr": 0.1, "where": str(tmp_path)}
    writer.close(Ending.KILLED)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["status"] == "killed" and about["ended"] >= about["began"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "run.json"]


def test_a_resumed_run_goes_on_behind_its_earlier_life(tmp_path: Path) -> None:
    first = CsvFile(Run(tmp_path))
    for step in range(5):
        first.write({"loss": float(step)}, step)
    first.close(Ending.KILLED)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("5")  # and then came the SIGKILL
    second = CsvFile(Run(tmp_path, purge_step=3))
    second.write({"accuracy": 0.5}, 3)
    second.close(Ending.FINISHED)
    assert rows(tmp_path) == [{"step": str(step), "loss": f"{step}.0"} for step in range(3)] + [
        {"step": "3", "accuracy": "0.5"}
    ]


@pytest.mark.parametrize("torn", ["4", "4,2", "4,2.5"])
def test_a_line_that_was_cut_off_by_a_sigkill_does_not_count(torn: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(f"step,loss,lr\n3,1.5,\n{torn}")
    writer = CsvFile(Run(tmp_path))
    writer.write({"loss": 2.5}, 4)
    writer.close(Ending.FINISHED)
    assert (tmp_path / "metrics.csv").read_text() == "step,loss,lr\n3,1.5,\n4,2.5,\n"


def test_somebody_elses_file_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("name,age\nAda,36\n")
    with pytest.raises(MisuseError, match="was not written by a tracker"):
        CsvFile(Run(tmp_path))
    assert (tmp_path / "metrics.csv").read_text() == "name,age\nAda,36\n"


def test_it_has_no_options(tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match=r"no options.*\['project'\]"):
        CsvFile(Run(tmp_path, options={"project": "digits"}))


def test_a_run_keeps_its_name_in_a_library(tmp_path: Path) -> None:
    names = iter("ab")
    assert [kept_identity(tmp_path / "x.id", lambda: next(names)) for _ in range(2)] == ["a", "a"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.id"]
