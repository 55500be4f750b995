"""Judge results of `phalanx bench --json FILE` by the figures that Phalanx promises.

    phalanx bench --json two.json && phalanx bench -n 4 --what steps --json four.json
    python benchmarks/bars.py two.json four.json

Prints a line for each promise that the files allow to judge; exits with 1 if one is not kept, with
2 if there was nothing to judge. Promises are about 2 ranks, except that the cost of synchronisation
is also judged on 4.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = "phalanx"
MIB = 1 << 20
SYNC_TWO_RANKS = {"digits": 1 / 5, "deep": 1 / 3, "resnet": 1 / 3, "gpt": 1 / 3}
SYNC_FOUR_RANKS = 1 / 2
SPEEDUP_SMALL, SPEEDUP_LARGE = 8.0, 2.0  # up to 1 MiB; above
SPEEDUP_BUCKET = 6.0


@dataclass(frozen=True)
class Verdict:
    """One promise, what was found, and whether it was kept."""

    promise: str
    found: float
    kept: bool

    def __str__(self) -> str:
        return f"{'kept  ' if self.kept else 'BROKEN'}  {self.promise}: {self.found:.3g}"


def at_most(promise: str, found: float, limit: float) -> Verdict:
    """Return the verdict on `found` <= `limit`."""
    return Verdict(f"{promise} at most {limit:.3g}", found, found <= limit)


def at_least(promise: str, found: float, limit: float) -> Verdict:
    """Return the verdict on `found` >= `limit`."""
    return Verdict(f"{promise} at least {limit:.3g}", found, found >= limit)


def judge(results: dict[str, Any]) -> Iterator[Verdict]:
    """Yield the verdicts on one run's results. A ratio that noise left unknown counts as broken."""
    ranks = results["header"]["ranks"]
    for entry in results.get("steps", []):
        yield from _judge_step(entry, ranks)
    if ranks == 2:
        for entry in results.get("allreduce", []):
            limit = SPEEDUP_SMALL if entry["bytes"] <= MIB else SPEEDUP_LARGE
            yield from _judge_size(entry, "all-reduce", limit)
        for entry in results.get("buckets", []):
            yield from _judge_size(entry, "gradient bucket", SPEEDUP_BUCKET)
    for entry in results.get("memory", []):
        if OURS in entry["variants"] and "allowed_host_bytes" in entry:
            held = entry["variants"][OURS]["host_bytes"] / MIB
            allowed = entry["allowed_host_bytes"] / MIB
            yield at_most(f"{ranks} ranks, {entry['model']}: MiB held on the host", held, allowed)


def _judge_step(entry: dict[str, Any], ranks: int) -> Iterator[Verdict]:
    if OURS not in entry["step_seconds"]:
        return
    model = f"{ranks} ranks, {entry['model']}"
    sync = _median(entry["sync_ratio"][OURS], float("inf"))
    if ranks == 2:
        limit = SYNC_TWO_RANKS[entry["model"]]
        yield at_most(f"{model}: cost of synchronisation against torch", sync, limit)
        yield at_most(f"{model}: step against torch", _median(entry["step_ratio"][OURS], float("inf")), 1.0)
    if ranks == 4:
        yield at_most(f"{model}: cost of synchronisation against torch", sync, SYNC_FOUR_RANKS)


def _judge_size(entry: dict[str, Any], what: str, limit: float) -> Iterator[Verdict]:
    if OURS in entry["speedup"]:
        speedup = _median(entry["speedup"][OURS], 0.0)
        yield at_least(f"2 ranks, {what} of {entry['bytes']} bytes: times faster than Gloo", speedup, limit)


def _median(figure: dict[str, float] | None, unknown: float) -> float:
    return unknown if figure is None else figure["median"]


def main(files: list[str]) -> int:
    """Judge the files and return the exit code."""
    verdicts = [v for file in files for v in judge(json.loads(Path(file).read_text()))]
    for verdict in verdicts:
        print(verdict)
    if not verdicts:
        print("nothing to judge: give the JSON files of `phalanx bench` runs with Phalanx in them")
        return 2
    return 0 if all(v.kept for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
