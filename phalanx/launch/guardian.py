"""A small process that ends what the ranks started when the launcher is killed.

The kernel kills a rank with its launcher (PR_SET_PDEATHSIG), but not the rank's own children, such as
data loader workers. The guardian is started before the first rank, holds one end of a pipe whose other
end only the launcher has. When that end closes unexpectedly, it kills the ranks' process groups and
removes the folder of the run.

The launcher forks it. A program that has called spawn() may have threads, whose locks a fork would copy: it starts
this file.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys

_ENTRY = struct.Struct("q")  # a process group begins (positive) or has ended (negative); 0: all is well


class Guardian:
    """The launcher's side: tell the guardian which process groups there are."""

    def __init__(self, run_dir: str, forks: bool) -> None:
        read_end, self._fd = os.pipe()
        self._popen: subprocess.Popen[bytes] | None = None
        if not forks:
            # Isolated, and without site: nothing of the user's is run there, and it starts in no time.
            argv = [sys.executable, "-I", "-S", __file__, str(read_end), run_dir]
            self._popen = subprocess.Popen(argv, pass_fds=[read_end])
        else:
            self._pid = os.fork()
            if self._pid == 0:
                _guard(read_end, run_dir)
        os.close(read_end)

    def began(self, group: int) -> None:
        """A rank's process group exists from now on."""
        self._tell(group)

    def ended(self, group: int) -> None:
        """A rank's process group is empty: its number may come to mean another one."""
        self._tell(-group)

    def dismiss(self) -> None:
        """The run has ended in order."""
        self._tell(0)
        os.close(self._fd)
        if self._popen is not None:
            self._popen.wait()
            return
        try:
            os.waitpid(self._pid, 0)
        except ChildProcessError:
            pass  # killed, and reaped with the ranks' orphans

    def _tell(self, entry: int) -> None:
        try:
            os.write(self._fd, _ENTRY.pack(entry))
        except BrokenPipeError:
            pass  # somebody has killed the guardian; the ranks themselves still die with us


def _guard(read_end: int, run_dir: str) -> None:
    """The guardian's whole life; never returns."""
    try:
        os.setsid()  # a signal to the launcher's group must not reach us
        for fd in map(int, os.listdir("/dev/fd")):
            if fd > 2 and fd != read_end:  # the ranks' pipes must close when the ranks end, not with us
                _close(fd)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        groups: set[int] = set()
        while entry := os.read(read_end, _ENTRY.size):
            (group,) = _ENTRY.unpack(entry)
            if group == 0:
                return
            groups.add(group) if group > 0 else groups.discard(-group)
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(run_dir, ignore_errors=True)
    finally:
        os._exit(0)


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass  # the descriptor that listed the others


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
