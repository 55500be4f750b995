"""Make the backend name "phalanx" known as soon as torch is imported.

torch loads what is installed under the entry point `torch.backends` at the end of its own import, and
fails to import at all if that raises. So this registers a name and a function, imports nothing heavy, and
never raises: the process group itself is imported when the first one is made.
"""

from __future__ import annotations

from typing import Any

NAME = "phalanx"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Register the backend with torch.distributed; harmless when repeated, and where there is none."""
    try:
        from torch.distributed import Backend
    except ImportError:  # torch was built without torch.distributed
        return
    if NAME.upper() not in Backend._plugins:
        Backend.register_backend(NAME, create, extended_api=True, devices=list(DEVICES))


def create(options: Any, backend_options: Any) -> Any:
    """Make a process group; torch.distributed calls this with the place of the rank in it."""
    from phalanx.group.process_group import create as create_group

    return create_group(options, backend_options)
