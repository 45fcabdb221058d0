# SPDX-License-Identifier: BSD-3-Clause
"""Classify small images: epochs, a step schedule, validation, and the best checkpoint."""

import argparse
import json

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(16 * 9, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = self.dropout(F.relu(self.fc1(x.flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


def make_images(count, generator):
    """Ten random pictures, each moved by up to one pixel and covered with noise."""
    pictures = torch.randn(10, 6, 6, generator=torch.Generator().manual_seed(1))
    pictures = F.interpolate(pictures[:, None], size=(12, 12), mode="bilinear")
    labels = torch.randint(10, (count,), generator=generator)
    moves = torch.randint(-1, 2, (count, 2), generator=generator).tolist()
    images = torch.stack(
        [pictures[label].roll(move, (1, 2)) for label, move in zip(labels, moves, strict=True)]
    )
    return TensorDataset(images + 0.5 * torch.randn(images.shape, generator=generator), labels)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            share = 100.0 * batch_idx / len(train_loader)
            print(f"Train Epoch: {epoch} ({share:.0f}%)\tLoss: {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += (output.argmax(dim=1) == target).sum().item()
    count = len(test_loader.dataset)
    print(f"Test set: Average loss: {test_loss / count:.4f}, Accuracy: {correct}/{count}")
    return correct / count


def main():
    parser = argparse.ArgumentParser(description="Image classification")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--test-batch-size", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--gamma", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=20)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    generator = torch.Generator().manual_seed(args.seed)
    train_set, test_set = make_images(960, generator), make_images(300, generator)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=args.test_batch_size)

    model = Net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    scheduler = StepLR(optimizer, step_size=2, gamma=args.gamma)

    run = paceline.join()
    model, optimizer, scheduler, train_loader = run.prepare(
        model, optimizer, scheduler, train_loader
    )

    best, accuracies, rates, checkpoints = 0.0, [], [], 0
    for epoch in range(1, args.epochs + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        train(args, model, device, train_loader, optimizer, epoch)
        accuracies.append(test(model, device, test_loader))
        scheduler.step()
        if accuracies[-1] > best:
            best = accuracies[-1]
            torch.save({"epoch": epoch, "model": model.state_dict(), "accuracy": best}, "best.pt")
            checkpoints += 1

    torch.save(model.state_dict(), "last.pt")
    facts = {
        "epochs": epoch,
        "validations": len(accuracies),
        "scheduler_steps": scheduler.last_epoch,
        "rates": rates,
        "lr": scheduler.get_last_lr()[0],
        "checkpoints": checkpoints,
        "best": best,
        "accuracy": accuracies[-1],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
