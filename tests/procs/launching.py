"""What the launcher's tests share: write a script, launch it, look at what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
RANK = "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n"
ENV = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
ENV["PYTHONPATH"] = str(ROOT)


class Launch:
    """Writes scripts and launches them; ends whatever is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen] = []

    def script(self, code: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(RANK + textwrap.dedent(code))
        return name

    def start(self, code: str, *options: str, args: Sequence[str] = (), **keywords: object) -> subprocess.Popen:
        command = [sys.executable, "-m", "phalanx", "run", *options, self.script(code), *args]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENV, **keywords}
        self._started.append(subprocess.Popen(command, cwd=self.folder, **streams))
        return self._started[-1]

    def run(
        self, code: str, *options: str, args: Sequence[str] = (), **keywords: object
    ) -> subprocess.CompletedProcess:
        process = self.start(code, *options, args=args, **keywords)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def wait_for(self, pattern: str, count: int, seconds: float = 10.0) -> list[Path]:
        """Wait for files that the ranks make to say how far they are."""
        until = time.monotonic() + seconds
        while len(found := list(self.folder.glob(pattern))) < count:
            assert time.monotonic() < until, f"only {found} of {count} {pattern}"
            time.sleep(0.02)
        return sorted(found)

    def pids(self, pattern: str, count: int) -> list[int]:
        """Process ids that are the contents of such files."""
        until = time.monotonic() + 5
        while True:
            texts = [path.read_text() for path in self.wait_for(pattern, count)]
            if all(texts):
                return [int(text) for text in texts]
            assert time.monotonic() < until
            time.sleep(0.02)

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launcher = Launch(tmp_path)
    yield launcher
    launcher.close()


def gone(pids: Sequence[int], seconds: float) -> bool:
    """Whether all these processes have ended within the time; a zombie has ended."""

    def running(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    until = time.monotonic() + seconds
    while any(map(running, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def lines_of(text: str, rank: int) -> list[str]:
    prefix = f"[rank {rank}] "
    return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]


MARK = "open(f'pid-{rank}', 'w').write(str(os.getpid()))\n"
