"""Saving and loading together: the same on all ranks, names of the plain module, errors on every rank."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import phalanx
from phalanx import MisuseError, PeerFailedError
from phalanx.checkpoint import CheckpointError
from phalanx.checkpoint import folder as disk
from phalanx.testing import run
from tests.threads.small_models import ddp, filled, noise, same_on_all, squares


class Tied(nn.Module):
    """An output layer that shares the weight of the input layer; extra state; a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.head.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(3)
        self.words = ["a"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(x)))

    def get_extra_state(self) -> dict[str, Any]:
        return {"words": self.words}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.words = state["words"]


def plain(seed: int = 0) -> nn.Module:
    return filled(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double(), seed)


def values(module: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


def trained(rank: int, steps: int, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        squares(model, noise(4, 2, seed=10 * step + rank)).backward()
        optimizer.step()
        scheduler.step()


def parts(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])


def test_all_comes_back_on_every_rank_also_into_a_model_that_is_not_wrapped(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        model = ddp(plain())
        optimizer, scheduler = parts(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        trained(rank, 3, model, optimizer, scheduler)
        path = phalanx.checkpoint.save(
            tmp_path / "new" / "runs", step=3, model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler,
            extra={"names": ("a", 1), "best": torch.ones(2)},
        )  # fmt: skip
        again = plain(seed=1)
        optimizer_again, scheduler_again = parts(again)
        scaler_again = torch.amp.GradScaler("cpu", init_scale=2.0)
        loaded = phalanx.checkpoint.load(
            tmp_path / "new" / "runs", model=again, optimizer=optimizer_again, scheduler=scheduler_again,
            scaler=scaler_again,
        )  # fmt: skip
        assert loaded.path == path and (loaded.step, loaded.world_size) == (3, 2)
        assert loaded.extra["names"] == ("a", 1) and loaded.extra["best"].tolist() == [1, 1]
        assert scheduler_again.state_dict() == scheduler.state_dict() and scaler_again.get_scale() == 8
        ours, theirs = optimizer_again.state_dict(), optimizer.state_dict()
        assert repr(ours) == repr(theirs)
        assert all(state["exp_avg"].untyped_storage().nbytes() < 100 for state in ours["state"].values())
        return str(path), values(again)

    path, found = same_on_all(2, program)
    model = plain(seed=2)
    model.load_state_dict(load_file(Path(path) / "model.safetensors"))
    assert values(model) == found


@pytest.mark.parametrize("wrap", ["phalanx", "torch", "compiled", "part", "nothing"])
def test_names_are_those_of_the_plain_module_whatever_wraps_it(tmp_path: Path, wrap: str) -> None:
    def wrapped(module: Tied) -> nn.Module:
        if wrap == "part":
            module.inner = torch.compile(module.inner, backend="eager")
            module.norm = ddp(module.norm)
            return module
        if wrap == "compiled":
            return ddp(torch.compile(module, backend="eager"))
        return {"phalanx": ddp, "torch": TorchDDP, "nothing": lambda m: m}[wrap](module)

    def program(rank: int) -> Any:
        module = filled(Tied(), seed=3)
        module.words = ["b", "c"]
        path = phalanx.checkpoint.save(tmp_path, step=1, model=wrapped(module))
        again = filled(Tied(), seed=4)
        phalanx.checkpoint.load(tmp_path, model=wrapped(again))
        assert again.words == ["b", "c"] and again.head.weight is getattr(again.inner, "_orig_mod", again.inner).weight
        fresh = Tied()
        phalanx.checkpoint.load(tmp_path, model=fresh)
        assert fresh.state_dict().keys() == Tied().state_dict().keys()
        return str(path), fresh.head.weight.tolist(), again.head.weight.tolist()

    path, fresh, again = run(1, program, backend="phalanx")[0]
    assert fresh == again == filled(Tied(), seed=3).head.weight.tolist()
    stored = load_file(Path(path) / "model.safetensors")
    model = Tied()
    model.load_state_dict({**stored, "_extra_state": {"words": []}})
    assert model.head.weight.tolist() == fresh and "norm.running_mean" in stored


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_loads_it_and_says_what_becomes_of_random_states(tmp_path: Path, ranks: int) -> None:
    def program(rank: int, n: int) -> Any:
        model = ddp(plain())
        if n == 2:
            phalanx.checkpoint.save(tmp_path, step=7, model=model)
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = phalanx.checkpoint.load(tmp_path, model=model)
        return loaded.step, [str(each.message) for each in caught] if rank == 0 else []

    run(2, program, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = run(ranks, program, ranks)
    assert [step for step, _ in results] == [7] * ranks


def test_several_models_and_optimizers_by_name(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        models = {"g": ddp(plain(0)), "d": ddp(plain(1))}
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1 + i) for i, model in enumerate(models.values())]
        phalanx.checkpoint.save(tmp_path, step=1, model=models, optimizer=optimizers)
        again = {"g": plain(2), "d": plain(3)}
        anew = [torch.optim.SGD(model.parameters(), lr=9.0) for model in again.values()]
        phalanx.checkpoint.load(tmp_path, model=again, optimizer=anew)
        assert [optimizer.param_groups[0]["lr"] for optimizer in anew] == [0.1, 1.1]
        with pytest.raises(MisuseError, match=r"optimizer was saved with \[0, 1\] and is loaded with \[0\]"):
            phalanx.checkpoint.load(tmp_path, optimizer=anew[:1])
        return values(again["g"]), values(again["d"])

    assert same_on_all(2, program) == (values(plain(0)), values(plain(1)))


# -- what is kept, what is best, what is taken ----------------------------------------------------------


def test_the_metric_is_the_mean_over_the_ranks_and_the_best_stays(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        # Rank 0 alone would find step 1 best, rank 1 alone step 3.
        for step, metric in ((1, [1.0, 9.0]), (2, [2.0, 2.0]), (3, [8.0, 1.0]), (4, [9.0, 9.0])):
            phalanx.checkpoint.save(tmp_path, step=step, keep=1, metric=torch.tensor(metric[rank]), mode="min")
        return phalanx.checkpoint.load(tmp_path).metric

    assert same_on_all(2, program) == 9.0
    assert phalanx.checkpoint.best(tmp_path).name == "step-000000002"
    assert phalanx.checkpoint.latest(tmp_path).name == "step-000000004"
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000000002", "step-000000004"]


def test_a_damaged_one_is_passed_over_and_said_and_named_it_is_an_error(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        model = ddp(plain())
        for step in (1, 2, 3):
            phalanx.checkpoint.save(tmp_path, step=step, model=model, extra=step)
        if rank == 0:
            flip(tmp_path / "step-000000003" / "model.safetensors")
            (tmp_path / "step-000000002" / "manifest.json").write_text("{}")
        loaded = phalanx.checkpoint.load(tmp_path, model=model)
        for wrong in ({"path": tmp_path / "step-000000003"}, {"path": tmp_path, "step": 3}):
            with pytest.raises(CheckpointError, match="step-000000003 is damaged: model.safetensors does not have its"):
                phalanx.checkpoint.load(wrong.pop("path"), model=model, **wrong)
        assert phalanx.checkpoint.load(tmp_path / "step-000000001").extra == 1
        phalanx.checkpoint.save(tmp_path, step=2, model=model)
        return loaded.extra, loaded.damaged, phalanx.checkpoint.load(tmp_path).path.name

    with pytest.warns(UserWarning, match="step-000000003 is damaged.* Loaded .*step-000000001 .step 1. instead"):
        extra, damaged, newest = same_on_all(2, program)
    assert extra == 1 and len(damaged) == 2 and newest == "step-000000002.2"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_what_is_not_there_is_said_on_every_rank(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"^\[rank \d\] .*no checkpoint in .*nowhere .there is no such"):
            phalanx.checkpoint.load(tmp_path / "nowhere")
        phalanx.checkpoint.save(tmp_path, step=5, model=ddp(plain()))
        with pytest.raises(MisuseError, match="step-000000005 has no optimizer: it holds extra, model"):
            phalanx.checkpoint.load(tmp_path, optimizer=torch.optim.SGD(plain().parameters()))
        with pytest.raises(CheckpointError, match="no checkpoint of step 6 in"):
            phalanx.checkpoint.load(tmp_path, step=6)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"weight\""):
            phalanx.checkpoint.load(tmp_path, model=nn.Linear(1, 1))

    run(2, program)


# -- errors on one rank ----------------------------------------------------------------------------------


class Failing:
    """A sampler that cannot say its state."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state here")


def test_an_error_of_any_rank_is_raised_on_all_and_nothing_is_written(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        with pytest.raises(MisuseError, match=r"extra\['a'\] is a builtins.object") as caught:
            phalanx.checkpoint.save(tmp_path, step=1, extra={"a": object()} if rank == 0 else None)
        assert rank == 0 or "(rank 0)" in caught.value.what
        sampler = Failing() if rank == 1 else nn.Identity()
        with pytest.raises(ValueError if rank == 1 else PeerFailedError, match="no state here"):
            phalanx.checkpoint.save(tmp_path, step=1, sampler=sampler)
        with pytest.raises(MisuseError, match="step=1 on rank 0 and 2 on rank 1; nothing was saved"):
            phalanx.checkpoint.save(tmp_path, step=1 + rank)
        with pytest.raises(MisuseError, match="on rank 0 and .* on rank 1"):
            phalanx.checkpoint.save(tmp_path, step=1, **({"metric": 1.0, "mode": "min"} if rank else {}))
        with pytest.raises(MisuseError, match="is less better, or more"):
            phalanx.checkpoint.save(tmp_path, step=1, metric=1.0)

    run(2, program)
    assert not list(tmp_path.glob("step-*")) and not list(tmp_path.glob(".step-*"))


def test_a_full_disk_is_an_error_on_all_and_the_one_before_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = os.fsync, threading.Event()

    def fsync(descriptor: int) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)

    def program(rank: int) -> None:
        model = ddp(plain())
        phalanx.checkpoint.save(tmp_path, step=1, model=model)
        full.set()
        with pytest.raises(CheckpointError, match=r"^\[rank \d\] .*of step 2 could not .*ENOSPC") as caught:
            phalanx.checkpoint.save(tmp_path, step=2, model=model)
        assert (caught.value.rank, caught.value.peer) == (rank, None if rank == 0 else 0)
        handle = phalanx.checkpoint.save(tmp_path, step=3, model=model, asynchronous=True)
        with pytest.raises(CheckpointError, match="step 3 could not be written"):
            phalanx.checkpoint.save(tmp_path, step=4, model=model)  # the next call raises it
        with pytest.raises(MisuseError, match="step 3, whose error has been raised"):
            handle.wait()
        phalanx.mean(1.0)  # no rank goes on before the other has seen it
        full.clear()
        assert phalanx.checkpoint.load(tmp_path, model=model).step == 1
        phalanx.checkpoint.save(tmp_path, step=5, model=model)

    run(2, program)
    assert [entry.manifest.step for entry in disk.entries(tmp_path)] == [5, 1]
    assert not list(tmp_path.glob(".step-*"))


def test_asynchronous_saves_what_was_there_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, go = disk.write, threading.Event()
    monkeypatch.setattr(disk, "write", lambda *args: go.wait(10) and real(*args))

    def program(rank: int) -> Any:
        model = ddp(plain())
        optimizer, scheduler = parts(model)
        trained(rank, 1, model, optimizer, scheduler)
        before = values(model.module)
        handle = phalanx.checkpoint.save(
            tmp_path, step=1, model=model, optimizer=optimizer, extra=model.module[0].weight, asynchronous=True
        )
        trained(rank, 2, model, optimizer, scheduler)
        assert not phalanx.checkpoint.latest(tmp_path)
        go.set()
        assert handle.wait() == handle.wait() == tmp_path / "step-000000001"
        phalanx.checkpoint.save(tmp_path / "other", step=2, model=model, asynchronous=True)
        again = plain(seed=1)
        loaded = phalanx.checkpoint.load(tmp_path, model=again)
        assert loaded.extra.tolist() == before["0.weight"]
        assert phalanx.checkpoint.load(tmp_path / "other").step == 2, "a load waits for it too"
        if rank == 0:
            assert values(again) == before
        return values(again)["0.weight"]

    same_on_all(2, program)


# -- checkpoints of others -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ddp", "plain", "dict", "compiled", "safetensors"])
def test_what_others_have_saved_loads_wrapped_or_not(tmp_path: Path, kind: str) -> None:
    source = plain(seed=5)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.5, momentum=0.9)
    squares(source, noise(4, 2)).backward()
    optimizer.step()
    state = {f"module.{name}": value for name, value in source.state_dict().items()}
    file = tmp_path / ("x.safetensors" if kind == "safetensors" else "x.pt")
    if kind == "safetensors":
        save_file(source.state_dict(), file)
    elif kind == "dict":
        saved = {"model": state, "optimizer": optimizer.state_dict(), "epoch": 3, "global_step": 12}
        torch.save(saved, file)
    else:
        compiled = {f"module._orig_mod.{name}": value for name, value in source.state_dict().items()}
        torch.save({"ddp": state, "plain": source.state_dict(), "compiled": compiled}[kind], file)

    def program(rank: int) -> Any:
        found = []
        for model in (plain(), ddp(plain())):
            anew = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.9)
            loaded = phalanx.checkpoint.load(file, model=model, **({"optimizer": anew} if kind == "dict" else {}))
            if kind == "dict":
                assert anew.param_groups[0]["lr"] == 0.5 and loaded.step == 12 and loaded.extra["epoch"] == 3
                assert anew.state_dict()["state"][0]["momentum_buffer"].abs().sum() > 0
            found.append(values(getattr(model, "module", model)))
        return found

    assert same_on_all(2, program) == [values(source)] * 2


def test_a_file_that_only_code_can_read_is_not_read(tmp_path: Path) -> None:
    torch.save(plain(), tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(b"nothing of the kind")

    def program(rank: int) -> None:
        with pytest.raises(MisuseError, match="holds more than state dicts"):
            phalanx.checkpoint.load(tmp_path / "x.pt", model=plain())
        with pytest.raises((MisuseError, CheckpointError), match="y.pt"):
            phalanx.checkpoint.load(tmp_path / "y.pt", model=plain())

    run(2, program)


# -- resume ----------------------------------------------------------------------------------------------


def test_resume_goes_by_the_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int, **keywords: Any) -> Any:
        loaded = phalanx.checkpoint.resume(tmp_path / "runs", model=ddp(plain()), **keywords)
        return loaded and loaded.step

    monkeypatch.setenv("PHALANX_RESUME", "auto")
    assert same_on_all(2, program) is None, "nothing is there yet"
    run(2, lambda rank: phalanx.checkpoint.save(tmp_path / "runs", step=4, model=ddp(plain())))
    run(2, lambda rank: phalanx.checkpoint.save(tmp_path / "other", step=9, model=ddp(plain())))
    assert same_on_all(2, program) == 4
    monkeypatch.setenv("PHALANX_RESUME", str(tmp_path / "other"))
    assert same_on_all(2, program) == 9
    monkeypatch.setenv("PHALANX_RESUME", str(tmp_path / "nowhere"))
    with pytest.raises(Exception, match="no checkpoint in .*nowhere"):
        run(2, program)
    monkeypatch.delenv("PHALANX_RESUME")
    with pytest.warns(UserWarning, match="beginning anew, though .* the last step-000000004: `phalanx run --resume"):
        assert same_on_all(2, program) is None
    assert same_on_all(2, lambda rank: program(rank, always=True)) == 4


def test_a_run_that_begins_anew_in_an_old_folder_leaves_the_old_alone(tmp_path: Path) -> None:
    run(1, lambda rank: [phalanx.checkpoint.save(tmp_path, step=step) for step in (100, 200)])
    from phalanx.checkpoint import saving

    saving._runs.clear()  # as in another process

    def program(rank: int) -> Any:
        for step in (10, 20):
            phalanx.checkpoint.save(tmp_path, step=step, keep=1)
        return phalanx.checkpoint.load(tmp_path).step

    with pytest.warns(UserWarning, match="has checkpoints of another run, the last step-000000200"):
        assert same_on_all(2, program) == 20
    assert sorted(path.name[-3:] for path in tmp_path.glob("step-*")) == ["020", "100", "200"]
