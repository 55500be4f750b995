"""`phalanx bench`: how long training steps and all-reduces take, and how much memory they hold.

Everything is measured against torch's own DDP over Gloo in the same run, because a figure alone
says more about the machine than about the code. The parts, one file each:

    bench_models      the four models            bench_steps      time of whole training steps
    bench_variants    what is compared           bench_allreduce  time of one collective by size
    bench_ranks       processes and groups       bench_buckets    time of reducing gradients by size
    bench_figures     medians, ratios (pure)     bench_memory     bytes held per rank and host
    bench_report      tables
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from phalanx.launch.cli import version
from phalanx.launch.spawn import SpawnError
from phalanx.observe.bench_allreduce import measure_allreduce
from phalanx.observe.bench_buckets import measure_buckets
from phalanx.observe.bench_memory import measure_memory
from phalanx.observe.bench_models import WORKLOADS, Workload
from phalanx.observe.bench_ranks import Ranks, measure_on_ranks
from phalanx.observe.bench_report import show
from phalanx.observe.bench_steps import measure_steps
from phalanx.observe.bench_variants import BASELINE, LOCAL, OURS, VARIANTS, Variant

KINDS = ("steps", "allreduce", "buckets", "memory")
MEMORY_MODELS = ("resnet", "gpt")  # below a million parameters the pages of everything else drown them
MAX_NORM = 0.1  # less than any of the models has, so that every step scales
PAGE = 120  # columns where the output is not a terminal
INTERRUPTED = 130  # the shell's code for a process that Ctrl-C ended


@dataclass(frozen=True)
class Plan:
    """What to measure: kinds of measurement, models, variants, on how many ranks."""

    ranks: int = 2
    kinds: tuple[str, ...] = KINDS
    models: tuple[str, ...] = tuple(WORKLOADS)
    memory_models: tuple[str, ...] = MEMORY_MODELS
    variants: tuple[Variant, ...] = (VARIANTS[LOCAL], VARIANTS[BASELINE], VARIANTS[OURS])
    memory_variants: tuple[Variant, ...] = (VARIANTS["torch-view"], VARIANTS[OURS])
    quick: bool = False
    clip: bool = False

    def workloads(self) -> list[Workload]:
        """Return what is trained to measure steps."""
        return [replace(WORKLOADS[name], max_norm=MAX_NORM if self.clip else None) for name in self.models]

    def backends(self) -> list[str]:
        """Return the backends of the variants, each once, in order."""
        return list(dict.fromkeys(v.backend for v in self.variants))


def main(argv: list[str]) -> int:
    """Run the command line `phalanx bench ARGV` and return its exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no directory {options.json.absolute().parent}")
    try:
        results = run(_plan(options))
    except KeyboardInterrupt:
        print("phalanx bench: interrupted; all ranks have ended", file=sys.stderr)
        return INTERRUPTED
    except SpawnError as error:  # the rank has printed its traceback
        print(f"phalanx bench: nothing is reported, {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    show(results, Console(width=None if sys.stdout.isatty() else PAGE))
    return 0


def run(plan: Plan) -> dict[str, Any]:
    """Measure what `plan` says and return it as JSON data: the header and an entry for each kind.

    Starts processes of its own; call it outside any process group.
    """
    results: dict[str, Any] = {"header": _facts(plan)}
    if {"steps", "allreduce", "buckets"} & set(plan.kinds):
        results |= measure_on_ranks(_measure_times, (plan,), plan.ranks)
    if "memory" in plan.kinds:
        results["memory"] = measure_memory(plan.memory_models, plan.memory_variants, plan.ranks)
    return results


def _measure_times(ranks: Ranks, plan: Plan) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if "steps" in plan.kinds:
        results["steps"] = measure_steps(ranks, plan.workloads(), plan.variants, plan.quick)
    if "allreduce" in plan.kinds:
        results["allreduce"] = measure_allreduce(ranks, plan.backends(), plan.quick)
    if "buckets" in plan.kinds:
        results["buckets"] = measure_buckets(ranks, plan.quick)
    return results


def _plan(options: argparse.Namespace) -> Plan:
    extra = ["torch-view"] if options.torch_only else options.variants
    variants = tuple(VARIANTS[name] for name in dict.fromkeys([LOCAL, BASELINE, *extra]))
    memory = ("torch-view",) if options.torch_only else ("torch-view", OURS)
    return Plan(
        ranks=options.ranks,
        kinds=tuple(kind for kind in options.what if not (options.torch_only and kind == "buckets")),
        models=tuple(options.models or WORKLOADS),
        memory_models=tuple(options.models or MEMORY_MODELS),
        variants=variants,
        memory_variants=tuple(VARIANTS[name] for name in memory),
        quick=options.quick,
        clip=options.clip,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx bench",
        description="Measure training steps, all-reduces and memory against torch DDP over Gloo.",
    )
    add = parser.add_argument
    add("-n", "--ranks", type=_positive, default=2, help="ranks on this host (default 2)")
    add(
        "--models",
        type=_names(WORKLOADS),
        metavar="A,B",
        help=f"models to train (default: {','.join(WORKLOADS)}; for memory {','.join(MEMORY_MODELS)})",
    )
    add(
        "--what",
        type=_names(KINDS),
        default=list(KINDS),
        metavar="A,B",
        help=f"kinds of measurement (default: {','.join(KINDS)})",
    )
    add(
        "--variants",
        type=_names(VARIANTS),
        default=[OURS],
        metavar="A,B",
        help=f"measured beside {LOCAL} and {BASELINE} (default: {OURS}; known: {','.join(VARIANTS)})",
    )
    add("--clip", action="store_true", help="clip gradients in each step")
    add("--quick", action="store_true", help="few rounds: to see that it runs, not for figures")
    add("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    add("--torch-only", action="store_true", help="leave Phalanx out: measure torch alone")
    return parser  # fmt: skip


def _names(known: Sequence[str] | dict[str, Any]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        wrong = [name for name in names if name not in known]
        if wrong or not names:
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(known)}")
        return names

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks (1 or more)")
    return int(text)


def _facts(plan: Plan) -> dict[str, Any]:
    return {
        "phalanx": version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "ranks": plan.ranks,
        "threads_per_rank": 1,
        "quick": plan.quick,
        "clip": plan.clip,
        "variants": {v.name: v.title for v in plan.variants},
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
