"""Options in torchrun's spelling before the script; after it they are the script's own."""

from __future__ import annotations

import pytest

from phalanx.launch.options import parse


@pytest.mark.parametrize("words", [
    ["-n", "3"], ["-n3"], ["--ranks=3"], ["--nproc-per-node", "3"], ["--nproc-per-node=3"], ["--nproc_per_node", "3"],
    ["--standalone", "--nproc_per_node=3"], ["--standalone", "--nnodes", "1", "--nproc-per-node", "3"],
])  # fmt: skip
def test_the_number_of_ranks(words: list[str]) -> None:
    options = parse([*words, __file__, "--nproc_per_node=5", "--dropin"])
    assert options.ranks == 3
    assert list(options.args) == ["--nproc_per_node=5", "--dropin"]


@pytest.mark.parametrize("every", ["auto", "gpu", "cpu"])
def test_one_rank_for_each_device_or_core(every: str) -> None:
    assert parse(["--nproc-per-node", every, __file__]).ranks == parse([__file__]).ranks


def test_several_hosts() -> None:
    given = ["--nnodes=2", "--node_rank", "1", "--master_addr", "a", "--master_port=29555", "-n", "1"]
    options = parse([*given, "-m", "train", "--node_rank=7"])
    assert (options.num_nodes, options.node_rank, options.master_addr, options.master_port) == (2, 1, "a", 29555)
    assert (options.is_module, options.target, list(options.args)) == (True, "train", ["--node_rank=7"])


@pytest.mark.parametrize("word", ["--drop-in", "--dropin", "--drop_in", "--drop-in=all"])
def test_a_drop_in_does_not_take_the_script_for_its_value(word: str) -> None:
    assert parse([word, __file__]).drop_in == parse(["--drop-in=ddp,syncbn,sampler,gloo", __file__]).drop_in


@pytest.mark.parametrize(("words", "said"), [
    (["--rdzv-endpoint=host:29500"], "--rdzv-endpoint is torchrun's: one host needs none, several meet at --master"),
    (["--max_restarts", "3"], "--max-restarts is torchrun's: have the scheduler"),
    (["--unheard-of"], "unrecognized arguments: --unheard-of"),
])  # fmt: skip
def test_what_has_no_counterpart_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse([*words, __file__])
    assert left.value.code == 2
    written = capsys.readouterr().err
    assert said in written and written.count("\n") == 1
