"""Checkpoints on the disk: nested data there and back, the format of others, whole or not there at all."""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import shutil
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from phalanx.checkpoint import container, folder, tree
from phalanx.checkpoint.failure import CheckpointError
from phalanx.checkpoint.manifest import Manifest
from phalanx.errors import MisuseError

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.complex_numbers()
)  # fmt: skip
PAIRS = st.tuples(st.integers(), st.text(max_size=2))
KEYS = st.text(max_size=3) | st.integers() | st.booleans() | PAIRS | st.just("~")
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.frozensets(st.integers(), max_size=1)  # one, as the order of more is nobody's
        | st.sets(st.text(max_size=2), max_size=1)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_nested_data_comes_back_as_it_was(value: Any) -> None:
    assert repr(tree.unpack(tree.pack(value, "extra"))) == repr(value)  # repr, for NaN


def test_types_that_training_state_has_come_back() -> None:
    value = {
        "counter": Counter([2, 2, 4]), "ordered": OrderedDict(b=1, a=2), "default": defaultdict(list, {1: [2]}),
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cuda", 1),
    }  # fmt: skip
    back = tree.unpack(tree.pack(value, "extra"))
    assert back == value and type(back["size"]) is torch.Size and type(back["counter"]) is Counter
    back = tree.unpack(tree.pack({"a": np.arange(4, dtype=np.uint32), "s": np.float32(2.5)}, "extra"))
    assert back["a"].dtype == np.uint32 and back["a"].tolist() == [0, 1, 2, 3] and type(back["s"]) is np.float32


@pytest.mark.parametrize("dtype", container.CODES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (3,), (2, 5)], ids=str)
def test_tensors_of_every_dtype_come_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(-3, 90, shape).to(dtype)
    odd = torch.tensor([True])  # which puts what follows to an odd place
    back = tree.unpack(tree.pack([odd, tensor, tensor.t() if len(shape) == 2 else tensor], "extra"))
    assert back[1].dtype == dtype and torch.equal(back[1].view(-1), tensor.view(-1))
    assert back[2].shape == (tensor.t().shape if len(shape) == 2 else shape)


@pytest.mark.parametrize(
    ("value", "text", "instead"),
    [
        ({"args": [argparse.Namespace(lr=1)]}, r"extra\['args'\]\[0\] is a argparse.Namespace", "vars"),
        ({"path": Path("a")}, r"extra\['path'\] is a pathlib\.", "str"),
        ([lambda: 0], r"extra\[0\] is a builtins.function", "numbers"),
        (torch.eye(2).to_sparse(), "extra is a Tensor with layout torch.sparse_coo", "to_dense"),
        (np.array(["a"]), "extra is a numpy ndarray of dtype <U1", "tolist"),
    ],
)
def test_what_could_not_be_read_back_is_refused_by_its_place(value: Any, text: str, instead: str) -> None:
    with pytest.raises(MisuseError, match=text) as caught:
        tree.pack(value, "extra")
    assert instead in caught.value.instead


def test_the_container_is_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).t(), "b": torch.randn(3).bfloat16(), "c": torch.tensor([True]),
               "d": torch.empty(0, 2), "e": torch.tensor(3)}  # fmt: skip
    file = tmp_path / "x.safetensors"
    file.write_bytes(b"".join(container.pieces(tensors, {"format": "pt"})))
    theirs = load_file(file)
    assert theirs.keys() == tensors.keys() and all(torch.equal(theirs[name], tensors[name]) for name in tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    ours, _ = container.parse(torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8))
    assert ours.keys() == tensors.keys() and all(torch.equal(ours[name], tensors[name]) for name in tensors)


# -- the folder ----------------------------------------------------------------------------------------


def draft(step: int, run: str = "a", **keywords: Any) -> Manifest:
    return Manifest(step=step, serial=0, run=run, world_size=1, holds=("extra",), **keywords)


def write(place: Path, step: int, keep: int | None = None, **keywords: Any) -> Path:
    contents = {"one": [b"first", b"second"], "two": [step.to_bytes(8, "little")]}
    files: dict[str, folder.Pieces] = {name: (lambda pieces=pieces: pieces) for name, pieces in contents.items()}
    return folder.write(place, draft(step, **keywords), files, keep)


def steps(place: Path) -> list[int]:
    """The steps of the checkpoints, the last saved first; all of them verified."""
    found = folder.entries(place)
    for entry in found:
        assert not entry.fault
        assert folder.read(entry, "two").numpy().tobytes() == entry.manifest.step.to_bytes(8, "little")
        assert folder.read(entry, "one").numpy().tobytes() == b"firstsecond"
    return [entry.manifest.step for entry in found]


def test_the_newest_are_those_saved_last_and_the_best_stays(tmp_path: Path) -> None:
    for step, metric in ((10, 3.0), (20, 1.0), (30, 2.0), (40, float("nan")), (15, 5.0)):
        write(tmp_path, step, keep=2, metric=metric, mode="min")
    assert steps(tmp_path) == [15, 40, 20]
    assert folder.best_of(folder.entries(tmp_path)).manifest.step == 20
    write(tmp_path, 99, keep=1, run="another")
    assert steps(tmp_path) == [99, 15, 40, 20], "another run's checkpoints are left alone"


def test_a_step_that_is_saved_again_takes_a_new_name(tmp_path: Path) -> None:
    first, second = write(tmp_path, 10), write(tmp_path, 10)
    assert (first.name, second.name) == ("step-000000010", "step-000000010.2")
    assert folder.entries(tmp_path)[0].path == second
    assert folder.step_of(second) == 10


class Killed(BaseException):
    """Stands for the end of the process: nothing is cleaned up."""


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Let the process end in the n-th call that changes or flushes the disk, before it or after."""
    calls = {"left": 10**9}

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            calls["left"] -= 1
            if calls["left"] == 0:
                raise Killed
            result = real(*args, **keywords)
            calls["left"] -= 1
            if calls["left"] == 0:
                raise Killed
            return result

        return call

    for owner, name in ((os, "fsync"), (Path, "mkdir"), (Path, "rename")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    real = shutil.rmtree
    # What clears up after an exception does not run in a process that is killed.
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **keywords: calls["left"] > 0 and real(*args, **keywords))
    yield lambda n: calls.update(left=n)


def test_killed_anywhere_it_leaves_the_old_or_the_new_one_whole(
    tmp_path: Path, killed_at: Callable[[int], None]
) -> None:
    seen, n, killed = set(), 0, True
    while killed:
        n += 1
        place = tmp_path / str(n)
        killed_at(10**9)
        write(place, 10)
        write(place, 20)
        killed_at(n)
        try:
            write(place, 30, keep=2)
            killed = False
        except Killed:
            pass
        killed_at(10**9)
        left = steps(place)
        seen.add(tuple(left))
        assert left[0] in (20, 30) and len(left) >= 2
        write(place, 40, keep=2)
        assert steps(place) == [40, left[0]]
        assert not [name for name in os.listdir(place) if name.endswith(".tmp")], "left-overs are removed"
    assert n > 12 and seen == {(20, 10), (30, 20, 10), (30, 20)}


@pytest.mark.parametrize("call", ["fsync", "open", "rename"])
def test_a_disk_that_refuses_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write(tmp_path, 10)
    before = sorted(os.listdir(tmp_path))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path if call == "rename" else os, call, full)
    with pytest.raises(CheckpointError, match=r"step 20 could not be written .* No space left .*ENOSPC.*000010, is un"):
        write(tmp_path, 20)
    monkeypatch.undo()
    assert steps(tmp_path) == [10] and sorted(os.listdir(tmp_path)) == before


def replace(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (lambda place: (place / "one").unlink(), "one is missing"),
        (lambda place: (place / "one").write_bytes(b"firstsecon"), "one has 10 bytes and should have 11"),
        (lambda place: (place / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda place: (place / "manifest.json").write_text("{"), "manifest.json is not whole"),
        (lambda place: (place / "manifest.json").write_text("[]"), "manifest.json is not whole"),
        (lambda place: replace(place / "manifest.json", "20", "2"), "manifest.json does not have its checksum"),
    ],
)
def test_damage_is_seen(tmp_path: Path, harm: Callable[[Path], None], fault: str) -> None:
    write(tmp_path, 10)
    harm(write(tmp_path, 20))
    assert [entry.fault for entry in folder.entries(tmp_path)] == [fault, ""]


def test_a_flipped_bit_is_seen_when_the_file_is_read(tmp_path: Path) -> None:
    place = write(tmp_path, 10)
    (place / "one").write_bytes(b"firstsecone"[:10] + b"D")
    entry = folder.entries(tmp_path)[0]
    with pytest.raises(ValueError, match="one does not have its checksum"):
        folder.read(entry, "one")
    assert entry.manifest.files["one"].sha256 == hashlib.sha256(b"firstsecond").hexdigest()
