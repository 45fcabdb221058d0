# SPDX-License-Identifier: BSD-3-Clause
"""ReduceLROnPlateau: the learning rate falls when the validation loss stops improving."""

import argparse
import json

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import paceline


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def make_data(count, seed):
    """Three spirals, one per class."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + 2 * torch.pi / 3 * label
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return TensorDataset(points + 0.03 * torch.randn(points.shape, generator=generator), label)


def run_epoch(model, loader, criterion, optimizer=None):
    """Train for one epoch; without an optimizer, evaluate instead."""
    losses, accuracy = AverageMeter(), AverageMeter()
    model.train(optimizer is not None)
    with torch.set_grad_enabled(optimizer is not None):
        for inputs, target in loader:
            output = model(inputs)
            loss = criterion(output, target)
            losses.update(loss.item(), len(inputs))
            accuracy.update((output.argmax(1) == target).float().mean().item(), len(inputs))
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return losses.avg, accuracy.avg


def main():
    parser = argparse.ArgumentParser(description="Train until the learning rate is small")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--min-lr", type=float, default=0.0002)
    parser.add_argument("--patience", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(0)
    train_loader = DataLoader(make_data(480, 0), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(make_data(300, 1), batch_size=100)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = ReduceLROnPlateau(optimizer, mode="min", factor=0.2, patience=args.patience)

    run = paceline.join()
    model, optimizer, scheduler, train_loader = run.prepare(
        model, optimizer, scheduler, train_loader
    )

    history, rates = [], []
    for epoch in range(args.epochs):
        train_loss, _ = run_epoch(model, train_loader, criterion, optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        val_loss, val_accuracy = run_epoch(model, val_loader, criterion)
        history.append(val_loss)
        scheduler.step(val_loss)
        print(f"epoch {epoch}: lr {rates[-1]:g} train {train_loss:.4f} val {val_loss:.4f}")
        torch.save({"epoch": epoch, "state_dict": model.state_dict()}, "checkpoint.pth.tar")
        if rates[-1] < args.min_lr:
            break

    facts = {
        "epochs": epoch + 1,
        "validations": len(history),
        "checkpoints": epoch + 1,
        "val_losses": history,
        "rates": rates,
        "accuracy": val_accuracy,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
