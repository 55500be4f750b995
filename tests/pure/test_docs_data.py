"""The code of docs/data.md runs, in a world of one."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed as dist

PAGE = Path(__file__).parents[2] / "docs/data.md"


def test_the_code_of_the_page_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict = {}
    try:
        exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
        assert names["state"]["history"] == [[256]]
        assert names["resumed"].state_dict()["finished"]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
