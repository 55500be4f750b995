"""The full list of torch's tests runs only where it is asked for: `pytest -m peer_full`."""

from __future__ import annotations

import pytest

_FULL = "peer_full"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{_FULL}: every applicable case of torch's own tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _FULL in config.option.markexpr:
        return
    full = [item for item in items if item.get_closest_marker(_FULL)]
    config.hook.pytest_deselected(items=full)
    items[:] = [item for item in items if item not in full]
