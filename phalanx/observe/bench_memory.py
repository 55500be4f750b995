"""Measure what training holds in memory: parameters, gradients and buckets, per rank and per host.

Each variant runs in processes of its own. Private memory is what belongs to one rank alone;
shared memory (a transport's arena) is counted once for the host, however many ranks map it. Both
come from /proc/self/smaps_rollup, as growth from before the model was built to after some steps,
with gradients alive and the allocator's free memory handed back to the kernel: what remains is
what training holds at its fullest, apart from activations, which no variant changes. The peak of
the resident set (activations included) is given for completeness: there, shared pages count in
every rank that has touched them.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.observe.bench_models import WORKLOADS, Workload, count_parameters
from phalanx.observe.bench_ranks import Ranks, measure_on_ranks
from phalanx.observe.bench_steps import Trainer
from phalanx.observe.bench_variants import LOCAL, VARIANTS, Variant

BASELINE = "torch-view"
STEPS = 4
PLAIN = VARIANTS[LOCAL]


def measure_memory(names: Sequence[str], variants: Sequence[Variant], size: int) -> list[dict[str, Any]]:
    """Measure the workloads `names` on `size` ranks, each variant apart; return a JSON entry for each.

    Linux only: reads /proc. An entry's `allowed_host_bytes` is what the baseline holds on the host
    plus one shared copy of the gradients.
    """
    return [_measure_workload(WORKLOADS[name], variants, size) for name in names]


def _measure_workload(workload: Workload, variants: Sequence[Variant], size: int) -> dict[str, Any]:
    held = {variant.name: measure_on_ranks(_measure_variant, (workload.name, variant), size) for variant in variants}
    model = workload.build(0)
    copy = sum(p.numel() * p.element_size() for p in model.parameters())
    entry: dict[str, Any] = {
        "model": workload.name,
        "parameters": count_parameters(model),
        "parameter_bytes": copy,
        "variants": held,
    }
    if BASELINE in held:
        entry["allowed_host_bytes"] = held[BASELINE]["host_bytes"] + copy
    return entry


def _measure_variant(ranks: Ranks, name: str, variant: Variant) -> dict[str, Any]:
    workload = WORKLOADS[name]
    ranks.say(f"memory: {name}, {variant.name}")
    _warm_libraries(ranks, workload)
    ranks.group(variant.backend)
    before = _settled(ranks)
    peak_known = _reset_peak()
    trainer = Trainer(workload, variant, ranks)
    for _ in range(STEPS):
        trainer.step()
    peak = _peak_rss()
    after = _settled(ranks)
    if not _gradients_alive(trainer.plain):
        raise RuntimeError(f"{variant.name} on {name}: no gradients after a step")
    grown = [after[key] - before[key] for key in ("Pss_Anon", "Pss_Shmem")]
    rows = ranks.gather([*grown, peak - before["Rss"]])
    private, shared = [row[0] for row in rows], sum(row[1] for row in rows)
    return {
        "private_bytes_per_rank": max(private),
        "shared_bytes_per_host": shared,
        "host_bytes": sum(private) + shared,
        "peak_rss_bytes_per_rank": max(row[2] for row in rows) if peak_known else None,
    }


def _warm_libraries(ranks: Ranks, workload: Workload) -> None:
    # The first step of a process loads kernels and fills caches; that is no variant's memory.
    trainer = Trainer(workload, PLAIN, ranks)
    for _ in range(STEPS):
        trainer.step()


def _gradients_alive(model: nn.Module) -> bool:
    return all(p.grad is not None for p in model.parameters())


def _settled(ranks: Ranks) -> dict[str, int]:
    """Return bytes by field of smaps_rollup, while every rank stands still. Collective."""
    gc.collect()
    _hand_back_free_memory()
    ranks.start_line()
    fields = _fields(Path("/proc/self/smaps_rollup"))
    ranks.start_line()
    return fields


def _hand_back_free_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc; musl keeps no such caches
    if trim is not None:
        trim(0)


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not permitted in some sandboxes
        return False
    return True


def _peak_rss() -> int:
    return _fields(Path("/proc/self/status"))["VmHWM"]


def _fields(path: Path) -> dict[str, int]:
    """Parse the `Name:  123 kB` lines of a file of /proc into bytes."""
    found = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found
