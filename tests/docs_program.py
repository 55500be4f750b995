"""Runs code of the documentation, one block after the other, on the ranks of one world.

    phalanx run -n 2 docs_program.py blocks.json folder

A block that joins the world itself is a script of its own. Any other goes on from a script, and finds what the pages
take for granted: a wrapped model `ddp`, its `optimizer`, a `loader`, `x` and `y`, ... Each has an empty folder, and a
warning of a wrong use is an error. `folder/rank-R.json` says for each block what it printed, or its error; the
first error ends the run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import phalanx
from phalanx import misuse
from phalanx.parallel import seeds
from tests import ray_stand_in

BEGINS_BY_ITSELF = ("phalanx.init()", "init_process_group(", "import phalanx.dropin")


left_alone: list[dict[str, Any]] = []
"""What blocks have made with torch's own wrapper over Gloo. To free it can wait for ever: for a thread of Gloo's, which
waits for Python's global lock."""


class Batch(NamedTuple):
    """A pair, with a length: the number of its items."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)


def taken_for_granted() -> dict[str, Any]:
    """What the pages say that a script has, made in the world that it has joined."""
    phalanx.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    ddp = phalanx.DistributedDataParallel(net)
    loader = [Batch(torch.randn(3 + i % 2, 8), torch.randn(3 + i % 2, 1)) for i in range(5)]
    plain = nn.Linear(8, 1)
    torch.save(plain.state_dict(), f"model-of-rank-{phalanx.rank()}.pt")
    os.replace(f"model-of-rank-{phalanx.rank()}.pt", "model.pt")
    return {
        "torch": torch, "nn": nn, "phalanx": phalanx, "DistributedDataParallel": phalanx.DistributedDataParallel,
        "ddp": ddp, "optimizer": torch.optim.SGD(ddp.parameters(), lr=0.01), "model": plain,
        "encoder": nn.Linear(8, 4), "head": nn.Linear(4, 1), "criterion": nn.MSELoss(),
        "loss": lambda output: output.square().mean(), "loader": loader, "x": loader[0].x, "y": loader[0].y,
        "sampler": DistributedSampler(range(8)), "lock": threading.Lock(), "train": lambda batch: ddp(batch.x),
    }  # fmt: skip


def run_block(block: dict[str, str], folder: Path) -> str:
    """Run one block and return what it has printed; the world that it was in is closed."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    said = io.StringIO()
    code = compile(block["code"], block["name"], "exec")
    with warnings.catch_warnings(), contextlib.redirect_stdout(said), ray_stand_in.installed():
        warnings.simplefilter("error", phalanx.MisuseWarning)
        begins = any(words in block["code"] for words in BEGINS_BY_ITSELF)
        names: dict[str, Any] = {"__name__": "__main__"} if begins else taken_for_granted()
        exec(block["given"], names)
        exec(code, names)
    if "init_process_group(" in block["code"]:
        left_alone.append(names)
    else:
        names.clear()
    phalanx.shutdown()
    misuse.silenced.clear()
    seeds.expect_different_seeds(False)
    return said.getvalue()


def main() -> None:
    blocks, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).resolve()
    results = folder / f"rank-{phalanx.rank()}.json"
    ended: dict[str, dict[str, str]] = {}
    for number, block in enumerate(blocks):
        try:
            ended[block["name"]] = {"said": run_block(block, folder / str(number))}
        except BaseException:
            ended[block["name"]] = {"error": traceback.format_exc()}
            raise
        finally:
            results.write_text(json.dumps(ended))


if __name__ == "__main__":
    main()
    os._exit(0)  # see left_alone
