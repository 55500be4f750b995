"""Run the programs that the command line names, and write what each rank's came to into a file."""

from __future__ import annotations

import json
import sys
import traceback

import torch
import torch.distributed as dist

from tests.ecosystem.programs import PROGRAMS


def main(file: str, names: list[str]) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = {}
    for name in names:
        torch.manual_seed(11)
        try:
            results[name] = PROGRAMS[name](rank)
        except Exception:
            results[name] = f"raised\n{traceback.format_exc()}"
    everyone: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    if rank == 0:
        with open(file, "w") as opened:
            json.dump(everyone, opened)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or list(PROGRAMS))
