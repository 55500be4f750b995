"""Show the benchmark's results as tables for people; the same data goes to `--json` for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from phalanx.observe.bench_figures import Spread
from phalanx.observe.bench_variants import BASELINE, LOCAL

UNKNOWN = "n/a"


def show(results: Mapping[str, Any], console: Console) -> None:
    """Print a header and one table for each kind of measurement that `results` holds."""
    console.print(_header(results["header"]))
    if results.get("steps"):
        console.print(_steps_table(results["steps"]))
    for kind, title in (("allreduce", "All-reduce of a tensor"), ("buckets", "Reduction of a gradient bucket")):
        if results.get(kind):
            console.print(_sizes_table(title, results[kind]))
    if results.get("memory"):
        console.print(_memory_table(results["memory"]))


def _header(header: Mapping[str, Any]) -> str:
    return (
        f"phalanx {header['phalanx']}, torch {header['torch']}, Python {header['python']}; "
        f"{header['cpu']}, {header['cores']} cores; {header['ranks']} ranks of "
        f"{header['threads_per_rank']} thread; load {header['load']:.2f} at the start"
        + ("; gradients are clipped in each step" if header["clip"] else "")
        + ("; quick run: the figures are rough" if header["quick"] else "")
    )


def _steps_table(entries: list[Mapping[str, Any]]) -> Table:
    table = Table(title=f"Training step: medians of rounds; ratios to {BASELINE} \\[quartiles]")
    for column in ("model", "parameters", "variant"):
        table.add_column(column)
    for column in ("step", "sync cost", "step ratio", "sync ratio", "off by"):
        table.add_column(column, justify="right")
    for entry in entries:
        for name, step in entry["step_seconds"].items():
            first = name == LOCAL
            table.add_row(
                entry["model"] if first else "",
                f"{entry['parameters']:,}" if first else "",
                name,
                _seconds(step),
                _seconds(entry["sync_seconds"].get(name)),
                _ratio(entry["step_ratio"].get(name)),
                _ratio(entry["sync_ratio"].get(name)),
                "" if first else f"{entry['difference_from_reference'][name]:.0e}",
            )
        table.add_section()
    return table


def _sizes_table(title: str, entries: list[Mapping[str, Any]]) -> Table:
    slower = next(iter(entries[0]["seconds"]))
    table = Table(title=f"{title}: medians of rounds,\ntimes faster than {slower} \\[quartiles]")
    backends, faster = list(entries[0]["seconds"]), list(entries[0]["speedup"])
    for column in ("size", *backends, *(f"{name} faster" for name in faster)):
        table.add_column(column, justify="right")
    for entry in entries:
        times = [_seconds(entry["seconds"][name]) for name in backends]
        table.add_row(_bytes(entry["bytes"]), *times, *(_ratio(entry["speedup"][n]) for n in faster))
    return table


def _memory_table(entries: list[Mapping[str, Any]]) -> Table:
    table = Table(title="Memory held after a step: parameters, gradients, buckets")
    for column in ("model", "variant"):
        table.add_column(column)
    for column in ("parameters", "private per rank", "shared per host", "host in all", "allowed", "peak RSS"):
        table.add_column(column, justify="right")
    for entry in entries:
        for place, (name, held) in enumerate(entry["variants"].items()):
            peak, allowed = held["peak_rss_bytes_per_rank"], entry.get("allowed_host_bytes")
            table.add_row(
                "" if place else entry["model"],
                name,
                "" if place else _bytes(entry["parameter_bytes"]),
                _bytes(held["private_bytes_per_rank"]),
                _bytes(held["shared_bytes_per_host"]),
                _bytes(held["host_bytes"]),
                UNKNOWN if allowed is None else _bytes(allowed),
                UNKNOWN if peak is None else _bytes(peak),
            )
        table.add_section()
    return table


def _seconds(figure: Spread | None) -> str:
    if figure is None:
        return ""
    value = figure["median"]
    if abs(value) < 1e-3:
        return f"{value * 1e6:.3g} us"
    return f"{value * 1e3:.4g} ms"


def _ratio(figure: Spread | None) -> str:
    if figure is None:
        return ""
    return f"{figure['median']:.3g} \\[{figure['q1']:.3g}, {figure['q3']:.3g}]"


def _bytes(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
