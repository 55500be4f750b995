"""A small process that ends what the ranks started when the launcher is killed.

The kernel kills a rank with its launcher (PR_SET_PDEATHSIG), but not the rank's own children, such as
data loader workers. The guardian is started before the first rank, holds one end of a pipe whose other
end only the launcher has. When that end closes unexpectedly, it kills the ranks' process groups and
removes the folder of the run.

It is this file, started: a program that has called spawn() may have threads, whose locks a fork would copy.
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

    def __init__(self, run_dir: str) -> None:
        read_end, self._fd = os.pipe()
        # Isolated, and without site: nothing of the user's is run there, and it starts in no time. In a session of
        # its own, which a signal to the launcher's group does not reach; the ranks' pipes close when the ranks end.
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(read_end), run_dir],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[read_end],
            start_new_session=True,
        )
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
        self._popen.wait()

    def _tell(self, entry: int) -> None:
        try:
            os.write(self._fd, _ENTRY.pack(entry))
        except BrokenPipeError:
            pass  # somebody has killed the guardian; the ranks themselves still die with us


def _guard(read_end: int, run_dir: str) -> None:
    """The guardian's whole life."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
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


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
