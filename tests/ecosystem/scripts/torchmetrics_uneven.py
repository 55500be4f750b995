"""Metrics over ranks with different numbers of items equal those of one process over all of them."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix


def metrics(**options):
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(3, **options),
            "table": MulticlassConfusionMatrix(3, **options),
        }
    ), [MeanMetric(**options), CatMetric(**options), BinaryAUROC(**options)]


def update(found, logits, labels):
    found[0].update(logits, labels)
    found[1][0].update(logits.square().mean(1))
    found[1][1].update(labels.float() * 2)
    found[1][2].update(logits[:, 0].sigmoid(), (labels == 0).int())


def computed(found):
    values = [*found[0].compute().values(), *(each.compute() for each in found[1])]
    return [value.float().sort().values if value.ndim == 1 else value.float() for value in values]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 3))
    data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
    ours, whole = metrics(), metrics(sync_on_compute=False)
    loader = DataLoader(data, 5, sampler=DistributedSampler(data, shuffle=False))
    with torch.no_grad():
        for index, (x, y) in enumerate(loader):
            if index < 3 or dist.get_rank() == 0:  # rank 1 leaves its last batch out
                update(ours, model(x), y)
        kept = [*range(0, 32, 2), *range(1, 31, 2)]
        update(whole, model(data.tensors[0][kept]), data.tensors[1][kept])
    for mine, truth in zip(computed(ours), computed(whole), strict=True):
        torch.testing.assert_close(mine, truth)
    print("metrics agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
