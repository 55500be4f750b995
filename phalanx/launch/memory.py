"""Whether the kernel has killed processes for want of memory: its counters, before a run and after it.

A control group counts the kills among its own processes (`memory.events` of version 2,
`memory.oom_control` of version 1), the kernel those of the whole host (`/proc/vmstat`). None of them names
a process, so what is concluded from them is a guess and is worded as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class MemoryKills:
    """Processes killed for want of memory in this process's control group and on this host; None: unknown."""

    group: int | None = None
    host: int | None = None

    @classmethod
    def now(cls, root: Path = _ROOT) -> MemoryKills:
        """Read the counters as they stand; `root` is where the file system begins."""
        return cls(_of_group(root), _count(root / "proc/vmstat"))

    def since(self, before: MemoryKills) -> MemoryKills:
        """What has been added to an earlier reading."""
        return MemoryKills(_more(before.group, self.group), _more(before.host, self.host))

    @property
    def any(self) -> bool | None:
        """Whether there were any; None if nothing is known."""
        known = [count for count in (self.group, self.host) if count is not None]
        return any(count > 0 for count in known) if known else None

    @property
    def where(self) -> str:
        """Where memory ran out, for texts."""
        return "in this control group (a container, or a job's share)" if self.group else "on this host"


def _of_group(root: Path) -> int | None:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts, file = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], "memory.events"
        elif "memory" in controllers.split(","):
            mounts, file = ["sys/fs/cgroup/memory"], "memory.oom_control"
        else:
            continue
        for mount in mounts:
            # A container often sees its own group at the mount itself, whatever the path says.
            for folder in (root / mount / path.lstrip("/"), root / mount):
                count = _count(folder / file)
                if count is not None:
                    return count
    return None


def _count(path: Path) -> int | None:
    counts = [line.split()[1] for line in _read(path).splitlines() if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def _more(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
