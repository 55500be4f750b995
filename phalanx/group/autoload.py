"""Make the backend name "phalanx" known as soon as torch is imported.

torch loads what is installed under the entry point `torch.backends` at the end of its own import, and
fails to import at all if that raises. So this registers a name and a function, imports nothing heavy, and
never raises: the process group itself is imported when the first one is made.

Where PHALANX_DROPIN asks for it, this is also the moment at which Phalanx takes the place of torch's own
classes, in every Python process that inherits the variable and before the script can import a name.
"""

from __future__ import annotations

import sys
import traceback
from importlib import import_module
from typing import Any

from phalanx.launch.environment import DROP_IN, variable

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
    if variable(DROP_IN, ""):
        _drop_in()


def _drop_in() -> None:
    """Load the drop-in, which stands above this package; what goes wrong is said, and torch's own stays."""
    try:
        import_module("phalanx.dropin")
    except Exception:  # noqa: BLE001 (see above: whoever imports torch must not see it)
        text = f"phalanx: {DROP_IN} is set, but nothing of torch has been replaced:\n{traceback.format_exc()}"
        print(text, file=sys.stderr, flush=True)


def create(options: Any, backend_options: Any) -> Any:
    """Make a process group; torch.distributed calls this with the place of the rank in it."""
    from phalanx.group.process_group import create as create_group

    return create_group(options, backend_options)
