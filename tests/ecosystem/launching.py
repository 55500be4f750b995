"""Start a program on two ranks, under torchrun with torch's own classes or under `phalanx run --drop-in`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.commands import run_command

SCRIPTS = Path(__file__).parent / "scripts"
TORCH, DROP_IN, PHALANX = "torch", "drop-in", "phalanx"
_COMMANDS = {
    TORCH: ["torch.distributed.run", "--standalone", "--nproc-per-node"],
    DROP_IN: ["phalanx", "run", "--drop-in", "-n"],
    PHALANX: ["phalanx", "run", "-n"],
}
_GLOO_ABORTS = "terminate called without an active exception"
"""What a rank of torch's own says when it aborts at its end, which happens now and then."""
_ROOT = str(Path(__file__).parents[2])
_QUIET = {
    "ACCELERATE_USE_CPU": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": _ROOT,
}


def launch(
    under: str,
    program: Sequence[str],
    folder: Path,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> str:
    """Return what `program` (a script or `-m module`, and its arguments) writes on all ranks, without prefixes."""
    command = [sys.executable, "-m", *_COMMANDS[under], str(ranks), *program]
    surroundings = {**_QUIET, **(env or {})}
    try:
        written = run_command(command, folder, env=surroundings, timeout=timeout)
    except AssertionError as error:
        if under != TORCH or _GLOO_ABORTS not in str(error):
            raise
        written = run_command(command, folder, env=surroundings, timeout=timeout)
    return re.sub(r"(?m)^\[rank \d+\] ", "", written)


def losses(text: str) -> list[float]:
    """The numbers after the word loss, in order."""
    return [float(number) for number in re.findall(r"\bloss ([0-9.]+)", text)]
