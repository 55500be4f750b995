import torch, pytest
from phalanx.testing import run
from phalanx.nn.sync_batchnorm import SyncBatchNorm
from test_sync_batchnorm_processes import network, trained
def diff(s,e): return {k:(s[k].double()-e[k].double()).abs().max().item() for k in e if not (s[k].double()-e[k].double()).abs().max()<1e-10}
GI,GT=torch.load("/tmp/good.pt")
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last]*12)
def test_x(format):
    def program(rank: int):
        model = SyncBatchNorm.convert_sync_batchnorm(network()).to(memory_format=format)
        return trained(model, rank)
    expected = trained(network(), None)
    if diff(expected,GT): print("\nPARENT WRONG", diff(expected,GT))
    for state in run(2, program, backend="gloo", over="processes", timeout=60):
        if diff(state,GT): print("\nCHILD WRONG", diff(state,GT))
