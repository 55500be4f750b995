"""Polices every test: what it starts, opens or sets is gone when it ends.

Compared before and after: Python threads, processes that descend from this one, open file descriptors, the
entries of /dev/shm, and the environment. What a process makes once and keeps (the server that ranks are
forked from, the resource tracker) is made before the first test that may need it, so nothing is excused.
"""

from __future__ import annotations

import gc
import importlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

PATIENCE = 2.0
"""Seconds that a thread or process gets to finish ending."""

_PYTESTS_OWN = "PYTEST_CURRENT_TEST"
_WITHOUT_WORLDS = ("tests", "pure")
_failed = pytest.StashKey[bool]()


@dataclass(frozen=True)
class Holdings:
    """What this process holds at one moment."""

    threads: frozenset[str]
    processes: frozenset[str]
    descriptors: frozenset[str]
    shared_memory: frozenset[str]
    environment: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        return cls(
            threads=frozenset(f"{t.name} ({t.ident})" for t in threading.enumerate()),
            processes=frozenset(_descendants(os.getpid())),
            descriptors=frozenset(_descriptors()),
            shared_memory=frozenset(_entries("/dev/shm")),
            environment=frozenset(f"{k}={v}" for k, v in os.environ.items() if k != _PYTESTS_OWN),
        )

    def more_than(self, before: Holdings) -> list[str]:
        """Say what is held now and was not before, and what has gone from the environment."""
        lines = []
        for kind in ("threads", "processes", "descriptors", "shared_memory", "environment"):
            new = getattr(self, kind) - getattr(before, kind)
            if new and kind == "shared_memory":
                new -= _used_by_strangers()
            if kind == "processes":  # Named only now: a process may change its name.
                new = {f"{pid} {_read(f'/proc/{pid}/comm').strip()}" for pid in new}
            lines += [f"{kind}: {item}" for item in sorted(new)]
        gone = {item.partition("=")[0] for item in before.environment - self.environment}
        gone -= {item.partition("=")[0] for item in self.environment}
        return lines + [f"environment: {name} is gone" for name in sorted(gone)]


@pytest.fixture(autouse=True)
def police(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves anything behind."""
    if request.path.parent.name not in _WITHOUT_WORLDS:
        request.getfixturevalue("warm")
    before = Holdings.now()
    yield
    if request.node.stash.get(_failed, False):
        return  # Its traceback keeps alive whatever its frames hold.
    until = time.monotonic() + PATIENCE
    always: set[str] | None = None  # what stays; other processes of this machine come and go
    while left := Holdings.now().more_than(before):
        always = set(left) if always is None else always & set(left)
        if not always:
            return
        if time.monotonic() > until:
            left = sorted(always)
            pytest.fail("the test leaves behind\n  " + "\n  ".join(left), pytrace=False)
        gc.collect()
        time.sleep(0.02)


@pytest.fixture
def holdings() -> type[Holdings]:
    """The look that the police takes, for the test of the police."""
    return Holdings


@pytest.fixture(scope="session")
def warm() -> None:
    """Have everything made that a process makes once."""
    from phalanx.testing import run, warm_up  # Here, because pure tests do without torch.

    with ThreadPoolExecutor(1) as pool:
        # The first optimizer imports it, which takes seconds and sets a variable of the environment.
        pool.submit(importlib.import_module, "torch._dynamo")
        warm_up("pytest", "hypothesis")
    run(1, int, over="processes", backend=None)  # The first store opens a pipe that stays.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


def _descendants(pid: int) -> Iterator[str]:
    for task in _entries(f"/proc/{pid}/task"):
        for child in _read(f"/proc/{pid}/task/{task}/children").split():
            yield child
            yield from _descendants(int(child))


def _descriptors() -> Iterator[str]:
    for number in _entries("/proc/self/fd"):
        try:
            yield f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}"
        except OSError:
            pass  # The one that listed the folder.


def _used_by_strangers() -> set[str]:
    """Return the entries of /dev/shm that processes use which do not descend from this one."""
    family = {os.getpid(), *(int(child) for child in _descendants(os.getpid()))}
    names = set()
    for pid in _entries("/proc"):
        if pid.isdigit() and int(pid) not in family:
            lines = _read(f"/proc/{pid}/maps").splitlines()
            names |= {line.rpartition("/dev/shm/")[2].split()[0] for line in lines if "/dev/shm/" in line}
    return names


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""
