"""The name that a run has in a library, kept in the run's folder, so that a resumed run goes on under it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def kept_identity(path: Path, new: Callable[[], str]) -> str:
    """Return the name in the file `path`; if there is none, the one that `new` makes, and keep it there."""
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    name = new()
    part = path.with_name(path.name + ".part")
    part.write_text(name + "\n", encoding="utf-8")
    os.replace(part, path)
    return name
