"""The shape of the ImageNet example: one long main with argparse, meters, a validation pass and checkpoints."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data
import torch.utils.data.distributed

parser = argparse.ArgumentParser(description="Training on made-up images")
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int, help="of all ranks together")
parser.add_argument("--lr", "--learning-rate", default=0.05, type=float, dest="lr")
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", "--weight-decay", default=1e-4, type=float, dest="weight_decay")
parser.add_argument("-j", "--workers", default=1, type=int)
parser.add_argument("--dist-url", default="env://")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--seed", default=3, type=int)
parser.add_argument("--out", default="checkpoint.pth.tar")


class Images(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(size, 3, 8, 8, generator=generator)
        self.labels = torch.randint(0, 10, (size,), generator=generator)
        self.images += self.labels.view(-1, 1, 1, 1) / 4

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))


def build():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), Block(16), nn.MaxPool2d(2), Block(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 10),
    )  # fmt: skip


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value, n=1):
        self.sum += float(value) * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum() * (100.0 / target.size(0)) for k in topk]


def main():
    args = parser.parse_args()
    args.rank = int(os.environ["RANK"])
    args.world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend=args.dist_backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank
    )
    if dist.get_backend() != args.dist_backend:
        raise RuntimeError(f"wanted {args.dist_backend}, got {dist.get_backend()}")
    torch.manual_seed(args.seed)
    model = torch.nn.parallel.DistributedDataParallel(build())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    train_data, val_data = Images(400, 1), Images(101, 2)
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_data)
    val_sampler = torch.utils.data.distributed.DistributedSampler(val_data, shuffle=False, drop_last=True)
    batch = args.batch_size // args.world_size
    train_loader = torch.utils.data.DataLoader(
        train_data, batch_size=batch, num_workers=args.workers, pin_memory=False, sampler=train_sampler
    )
    val_loader = torch.utils.data.DataLoader(val_data, batch_size=batch, sampler=val_sampler)

    best = 0.0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion, args)
        scheduler.step()
        best = max(best, acc1)
        if args.rank % args.world_size == 0:
            state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.out)
    dist.barrier()
    loaded = torch.load(args.out, map_location="cpu", weights_only=True)
    model.load_state_dict(loaded["state_dict"])
    optimizer.load_state_dict(loaded["optimizer"])
    validate(val_loader, model, criterion, args)
    dist.destroy_process_group()


def train(loader, model, criterion, optimizer, epoch, args):
    losses = AverageMeter("Loss")
    model.train()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if args.rank == 0:
            print(f"Epoch: [{epoch}][{i}] loss {loss.item():.9f}", flush=True)


def validate(loader, model, criterion, args):
    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target)[0], images.size(0))
    losses.all_reduce()
    top1.all_reduce()
    if args.rank == 0:
        print(f" * Acc@1 {top1.avg:.3f} loss {losses.avg:.9f}", flush=True)
    return top1.avg


if __name__ == "__main__":
    main()
