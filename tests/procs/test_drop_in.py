"""The drop-in: what it replaces, in which processes, who says so, and that nothing happens unasked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.errors import MisuseError
from phalanx.launch import drop_in, environment, options
from tests.procs.launching import ENV, Launch, launch, lines_of

__all__ = ["launch"]  # the fixture

NAMES = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler
from torch.distributed.algorithms.join import Join
def is_ours(cls): return any(base.__module__.startswith("phalanx") for base in cls.__mro__)
def replaced():
    same = (torch.nn.parallel.distributed.DistributedDataParallel is DDP
            and torch.nn.modules.batchnorm.SyncBatchNorm is nn.SyncBatchNorm
            and torch.utils.data.distributed.DistributedSampler is DistributedSampler)
    gloo = dist.distributed_c10d._new_process_group_helper.__module__.startswith("phalanx")
    return [same, *map(is_ours, (DDP, nn.SyncBatchNorm, DistributedSampler, Join)), gloo]
"""
ALL, NOTHING = [True] * 6, [True] + [False] * 5
SAYS = "phalanx: drop-in: "


@pytest.mark.full
def test_in_ranks_and_in_their_children(launch: Launch) -> None:
    (launch.folder / "names.py").write_text(NAMES)
    code = """
    import json, multiprocessing, subprocess
    from names import *

    def child(file):
        json.dump(replaced(), open(file, "w"))

    if __name__ == "__main__":
        found = [replaced()]
        dist.init_process_group("gloo")
        if rank == 0:
            for method in ("spawn", "fork"):
                process = multiprocessing.get_context(method).Process(target=child, args=(method,))
                process.start()
                process.join()
                found.append(json.load(open(method)))
            command = [sys.executable, "-c", "from names import *; print(json.dumps(replaced()))"]
            command[-1] = "import json; " + command[-1]
            found.append(json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))
        total = torch.ones(1)
        dist.all_reduce(total)
        group = dist.new_group([0, 1])
        backends = dist.get_backend(), dist.get_backend(group), dist.get_backend_config()
        print(json.dumps([found, total.item(), type(dist.group.WORLD).__name__, backends]), flush=True)
        dist.monitored_barrier()
        dist.destroy_process_group()
    """
    done = launch.run(code, "--drop-in", "-n", "2", env={**ENV, "PYTHONPATH": f"{ENV['PYTHONPATH']}:{launch.folder}"})
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found, total, group, backends = json.loads(lines_of(done.stdout, rank)[-1])
        assert found == [ALL] * (4 if rank == 0 else 1)
        assert (total, group) == (2.0, "PhalanxProcessGroup")
        assert backends == ["gloo", "gloo", "cpu:gloo,cuda:gloo"]
    said = [line for line in done.stderr.splitlines() if SAYS in line]
    assert said == [
        f"[rank 0] {SAYS}DistributedDataParallel, SyncBatchNorm, DistributedSampler and the gloo backend of torch are "
        "replaced by Phalanx's"
    ]


TRAINS = (
    NAMES
    + """
import json, pickle
dist.init_process_group()
torch.manual_seed(0)
model = DDP(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
model(torch.randn(3, 2)).square().sum().backward()
sampler = DistributedSampler(range(10))
orders = [list(sampler), list(sampler)]
layer = model.module[1]
again = pickle.loads(pickle.dumps(layer))
print(json.dumps([replaced(), dist.get_backend(), type(dist.group.WORLD).__name__, type(layer).__module__,
                  type(again) is type(layer), orders]), flush=True)
"""
)


def test_under_torchrun_and_some_of_it_only(tmp_path: Path) -> None:
    """Without gloo, on a plain group of torch; the sampler's order is torch's, in every pass."""
    (tmp_path / "script.py").write_text(TRAINS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "script.py"]
    env = {**ENV, "PHALANX_DROPIN": "ddp, syncbn,sampler"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    found, backend, group, module, pickled, orders = json.loads(done.stdout)
    assert found == [True] * 5 + [False]
    assert group == "ProcessGroup" and module == "torch.nn.modules.batchnorm" and pickled
    assert orders == [[4, 1, 7, 5, 3, 9, 0, 8, 6, 2]] * 2
    assert done.stderr.count(SAYS) == 1


def python(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    env = {**ENV, **variables}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=90)


@pytest.mark.full
def test_an_import_replaces_what_the_script_has_imported_before(tmp_path: Path) -> None:
    """What torch's wrapper has pickled loads; rank 0 of the world that the script makes says what is replaced, once."""
    code = NAMES + (
        "import pickle, phalanx, phalanx.parallel.ddp; before = replaced()\n"
        "phalanx.init('gloo'); saved = pickle.dumps(DDP(nn.Linear(2, 1), static_graph=True)); phalanx.shutdown()\n"
        "import phalanx.dropin\n"
        "print(before, replaced(), phalanx.dropin.replaced)\n"
        "for _ in range(2): phalanx.init(); model = pickle.loads(saved); phalanx.shutdown()\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "print(type(model) is DDP, model.static_graph, model.module.weight.grad.tolist())\n"
    )
    done = python(code, tmp_path)
    said = f"{NOTHING} {ALL} ('ddp', 'syncbn', 'sampler', 'gloo')\nTrue True [[1.0, 1.0]]\n"
    assert done.stdout == said, done.stderr
    assert done.stderr.count(SAYS) == 1


def test_it_is_there_whatever_is_imported_first(tmp_path: Path) -> None:
    code = "from phalanx import DistributedDataParallel" + NAMES + "print(replaced(), DDP is DistributedDataParallel)"
    assert python(code, tmp_path, PHALANX_DROPIN="all").stdout == f"{ALL} True\n"


@pytest.mark.full
def test_an_unknown_name_is_said_and_torch_still_imports(tmp_path: Path) -> None:
    code = NAMES + (
        "import os, phalanx\n"
        "try: import phalanx.dropin\n"
        "except phalanx.MisuseError as error: print(error.what)\n"
        "os.environ['PHALANX_DROPIN'] = '0'\n"
        "import phalanx.dropin; print(phalanx.dropin.replaced, replaced())\n"
    )
    done = python(code, tmp_path, PHALANX_DROPIN="dpd")
    assert done.stdout == f"drop-in 'dpd' is not known\n() {NOTHING}\n"
    assert "drop-in 'dpd' is not known" in done.stderr and "nothing of torch has been replaced" in done.stderr


# -- the command line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "chosen", "args"),
    [
        (["--drop-in", "SCRIPT", "--drop-in"], environment.REPLACEABLE, ["--drop-in"]),
        (["--drop-in", "-n", "2", "SCRIPT", "-n", "3"], environment.REPLACEABLE, ["-n", "3"]),
        (["-n", "2", "--drop-in=gloo,ddp", "SCRIPT"], ("ddp", "gloo"), []),
        (["--log-dir", "--drop-in", "SCRIPT"], None, []),
        (["-n2", "SCRIPT", "--drop-in=ddp"], (), ["--drop-in=ddp"]),
    ],
)
def test_the_option_never_takes_the_script(argv: list[str], chosen: tuple[str, ...] | None, args: list[str],
                                           tmp_path: Path) -> None:  # fmt: skip
    script = tmp_path / "script.py"
    script.touch()
    words = [str(script) if word == "SCRIPT" else word for word in argv]
    if chosen is None:  # it is the value of another option
        with pytest.raises(SystemExit):
            options.parse(words)
        return
    found = options.parse(words)
    assert (found.drop_in, found.target, list(found.args)) == (chosen, str(script), args)


@pytest.mark.parametrize(("text", "names"), [("", ()), ("0", ()), ("1", environment.REPLACEABLE),
                                             (" gloo , DDP", ("ddp", "gloo"))])  # fmt: skip
def test_lists(text: str, names: tuple[str, ...]) -> None:
    assert environment.drop_in(text) == names


def test_mistakes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MisuseError, match="'batchnorm' is not known\nInstead: some of ddp,syncbn,sampler,gloo"):
        environment.drop_in("ddp,batchnorm")
    with pytest.raises(SystemExit):
        options.parse(["--drop-in=nonsense", __file__])
    assert "drop-in 'nonsense' is not known" in capsys.readouterr().err
    monkeypatch.setattr(environment, "variable", lambda name, default: "0")
    with pytest.raises(SystemExit):
        options.parse(["--drop-in", __file__])
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD turns off: unset it" in capsys.readouterr().err


def test_where_phalanx_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks find the entry point on their search path, and Phalanx too."""
    assert drop_in.variables(["ddp"], str(tmp_path)) == {"PHALANX_DROPIN": "ddp"}
    monkeypatch.setattr(drop_in, "_is_installed", lambda: False)
    given = drop_in.variables(["ddp"], str(tmp_path))
    code = (
        "from importlib.metadata import entry_points\n"
        "found = [point for point in entry_points(group='torch.backends') if point.dist.name == 'phalanx-drop-in']\n"
        "print([point.load().__module__ for point in found])"
    )
    assert python(code, tmp_path, **given).stdout == "['phalanx.group.autoload']\n"
