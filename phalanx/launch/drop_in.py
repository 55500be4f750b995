"""How `phalanx run --drop-in` reaches the ranks and whatever Python processes they start.

By the environment, which children inherit: a variable says what to replace, and torch itself, at the end of
its import, calls what is installed under the entry point `torch.backends`. Where Phalanx runs from a folder
and is not installed, the ranks get a folder on PYTHONPATH that announces the same entry point.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module

from phalanx.launch import environment

_GROUP, _NAME = "torch.backends", "phalanx"
_ENTRY_POINT = f"[{_GROUP}]\n{_NAME} = phalanx.group.autoload:register\n"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def obstacle() -> str:
    """Why the ranks could not be reached; empty if they can be."""
    if environment.variable(_AUTOLOAD, "1") == "1":
        return ""
    return f"--drop-in works by torch's loading of backends, which {_AUTOLOAD} turns off: unset it"


def variables(names: Sequence[str], folder: str) -> dict[str, str]:
    """The variables of a rank in which `names` are replaced; `folder` lasts as long as the run."""
    if not names:
        return {}
    wanted = {environment.DROP_IN: ",".join(names)}
    return wanted if _is_installed() else {**wanted, "PYTHONPATH": os.pathsep.join(_search_path(folder))}


@cache
def _is_installed() -> bool:
    metadata = import_module("importlib.metadata")  # costs more than the rest of the launcher, so only here
    return any(point.name == _NAME for point in metadata.entry_points(group=_GROUP))


def _search_path(folder: str) -> list[str]:
    announced = os.path.join(folder, "site")
    described = os.path.join(announced, "phalanx_drop_in-0.dist-info")
    os.makedirs(described, exist_ok=True)
    for name, text in (("METADATA", "Name: phalanx-drop-in\nVersion: 0\n"), ("entry_points.txt", _ENTRY_POINT)):
        with open(os.path.join(described, name), "w", encoding="utf-8") as file:
            file.write(text)
    here = os.path.dirname(os.path.dirname(os.path.abspath(sys.modules[_NAME].__file__ or "")))
    given = environment.variable("PYTHONPATH", "")
    return [*([given] if given else []), here, announced]
