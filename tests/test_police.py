"""The police of conftest.py sees whatever a test can leave behind."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path


def test_nothing_is_found_where_nothing_is_left(holdings):
    before = holdings.now()
    with open(os.devnull):
        pass
    assert holdings.now().more_than(before) == []


def test_a_thread_is_found(holdings):
    before, done = holdings.now(), threading.Event()
    thread = threading.Thread(target=done.wait, name="left over")
    thread.start()
    try:
        (line,) = holdings.now().more_than(before)
    finally:
        done.set()
        thread.join()
    assert line.startswith("threads: left over")


def test_a_process_and_its_child_are_found(holdings):
    before = holdings.now()
    child = subprocess.Popen(["sh", "-c", "sleep 30 & echo on; wait"], stdout=subprocess.PIPE)
    child.stdout.readline()
    try:
        lines = holdings.now().more_than(before)
    finally:
        grandchild = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
        for pid in grandchild:
            os.kill(int(pid), 9)
        child.wait()
        child.stdout.close()
    assert len(grandchild) == 1
    for pid in (child.pid, *grandchild):
        assert any(line.startswith(f"processes: {pid} ") for line in lines)
    assert any(line.startswith("descriptors: ") for line in lines)


def test_a_descriptor_is_found(holdings):
    before = holdings.now()
    with open(os.devnull) as file:
        assert holdings.now().more_than(before) == [f"descriptors: {file.fileno()} -> {os.devnull}"]


def test_an_entry_in_shared_memory_is_found(holdings):
    before, path = holdings.now(), Path(f"/dev/shm/phalanx-police-{os.getpid()}")
    path.touch()
    try:
        assert holdings.now().more_than(before) == [f"shared_memory: {path.name}"]
    finally:
        path.unlink()


def test_variables_set_changed_and_gone_are_found(holdings, monkeypatch):
    monkeypatch.setenv("POLICE_CHANGED", "1")
    monkeypatch.setenv("POLICE_GONE", "1")
    before = holdings.now()
    monkeypatch.setenv("POLICE_SET", "1")
    monkeypatch.setenv("POLICE_CHANGED", "2")
    monkeypatch.delenv("POLICE_GONE")
    assert holdings.now().more_than(before) == [
        "environment: POLICE_CHANGED=2",
        "environment: POLICE_SET=1",
        "environment: POLICE_GONE is gone",
    ]
