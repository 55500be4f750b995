"""Run a command as a person would, in a folder of one's own, and leave none of its processes behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

BIN = Path(sys.executable).parent


def run_command(
    command: Sequence[str],
    folder: Path,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 110,
) -> str:
    """Return what the command wrote to standard output; fail with all it wrote if it does not end well.

    The programs of this Python's environment come first in PATH.
    """
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        # Threads that spin at OpenMP's barriers get nowhere where others want the cores too.
        "OMP_WAIT_POLICY": "passive",
        **(env or {}),
    }
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            written, complaints = process.communicate(stdin, timeout)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"exit code {process.returncode}\n{written}{complaints}"
    return written
