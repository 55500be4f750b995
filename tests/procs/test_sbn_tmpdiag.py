import torch, pytest
from phalanx.testing import run
from phalanx.nn.sync_batchnorm import SyncBatchNorm
from test_sync_batchnorm_processes import network, trained
def diff(s,e): return {k:(s[k].double()-e[k].double()).abs().max().item() for k in e if (s[k].double()-e[k].double()).abs().max()>1e-10}
@pytest.mark.parametrize("k", range(6))
def test_x(k):
    def prog(rank):
        i=network().state_dict()
        m=SyncBatchNorm.convert_sync_batchnorm(network())
        i2={k:v.clone() for k,v in m.state_dict().items()}
        return i,i2,trained(m, rank)
    init=network().state_dict()
    init2=network().state_dict()
    e=trained(network(),None); e2=trained(network(),None)
    print("parent", diff(init2,init), diff(e2,e))
    r=run(2,prog,over="processes",backend="gloo")
    print([(diff(a,init),diff(b,init),diff(c,e)) for a,b,c in r])
