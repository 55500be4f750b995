"""What this host offers: cores and CUDA devices."""

from __future__ import annotations

import math
import os
from pathlib import Path

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_NVIDIA_DEVICES = Path("/proc/driver/nvidia/gpus")


def cores() -> int:
    """Cores that this process may use: its affinity, and no more than a container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, _quota(_CPU_QUOTA) or allowed))


def _quota(path: Path) -> int | None:
    """Whole cores of a container's quota, rounded up; the file reads `max 100000` or `150000 100000`."""
    try:
        quota, period = path.read_text().split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return None


def cuda_devices(path: Path = _NVIDIA_DEVICES) -> int:
    """CUDA devices that the driver lists, found without loading anything."""
    try:
        return len(os.listdir(path))
    except OSError:
        return 0
