"""Metrics in a CSV file, and what else is known of the run beside it.

    metrics.csv   one line per call, a column `step` and one per key; empty where a call had no such key
    run.json      config, status (running, finished, failed, killed), when it began and ended

Each line is handed to the system at once, so that a SIGKILL loses none. A key that was not there before
makes a new column: the file is written anew with it, beside the old one, which it then replaces.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from phalanx.errors import MisuseError
from phalanx.train.trackers.averaging import STEP
from phalanx.train.trackers.writer import Ending, Run

_RUNNING = "running"


class CsvFile:
    """Writes metrics.csv and run.json into the run's folder; goes on with a metrics.csv that is there."""

    def __init__(self, run: Run) -> None:
        if run.options:
            raise MisuseError(f"the csv tracker has no options, and {sorted(run.options)} were given")
        self.path = run.folder / "metrics.csv"
        self._about = run.folder / "run.json"
        self._facts = {"config": dict(run.config), "status": _RUNNING, "began": _now(), "ended": None}
        self._columns, rows = self._earlier(run.purge_step)
        self._file = self._written_anew(rows)
        self._note()

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Add a line."""
        new = [key for key in values if key not in self._columns]
        if new:
            self._file.close()
            _, rows = self._earlier(None)
            self._columns += new
            self._file = self._written_anew(rows)
        row = {STEP: step, **values}
        self._lines(self._file).writerow([row.get(column, "") for column in self._columns])
        self._file.flush()

    def close(self, ending: Ending) -> None:
        """Write the status and close the file."""
        self._file.close()
        self._facts.update(status=ending.value, ended=_now())
        self._note()

    def _earlier(self, purge_step: int | None) -> tuple[list[str], list[dict[str, str]]]:
        """Return columns and rows of the file as it is, without a last line that was cut off."""
        if not self.path.exists():
            return [STEP], []
        text = self.path.read_text(encoding="utf-8")
        reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
        columns, rows = list(reader.fieldnames or [STEP]), list(reader)
        if columns[0] != STEP:
            raise MisuseError(f"{self.path} is there already, and was not written by a tracker", "another dir=")
        if purge_step is not None:
            rows = [row for row in rows if int(row[STEP]) < purge_step]
        return columns, rows

    def _written_anew(self, rows: list[dict[str, str]]) -> TextIO:
        """Write the file with the present columns, whole or not at all; return it, open for more lines."""
        part = self.path.with_suffix(".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            lines = self._lines(file)
            lines.writerow(self._columns)
            lines.writerows([row.get(column, "") for column in self._columns] for row in rows)
        os.replace(part, self.path)
        return self.path.open("a", newline="", encoding="utf-8")

    @staticmethod
    def _lines(file: TextIO) -> Any:
        return csv.writer(file, lineterminator="\n")

    def _note(self) -> None:
        _replace(self._about, json.dumps(self._facts, indent=2, default=str) + "\n")


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


make = CsvFile
