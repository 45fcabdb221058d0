# SPDX-License-Identifier: BSD-3-Clause
"""Early stopping: a network overfits few noisy samples, and its best weights are kept."""

import argparse
import json

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import paceline


class EarlyStopping:
    """Save the model when the validation loss improves; stop when it hasn't for a while."""

    def __init__(self, patience, path="checkpoint.pt"):
        self.patience, self.path = patience, path
        self.counter, self.saves = 0, 0
        self.best = float("inf")
        self.early_stop = False

    def __call__(self, val_loss, model):
        if val_loss < self.best:
            print(f"Validation loss decreased ({self.best:.6f} --> {val_loss:.6f}). Saving ...")
            self.best, self.counter = val_loss, 0
            torch.save(model.state_dict(), self.path)
            self.saves += 1
        else:
            self.counter += 1
            print(f"EarlyStopping counter: {self.counter} out of {self.patience}")
            self.early_stop = self.counter >= self.patience


def make_data(count, generator):
    x = 2 * torch.rand(count, 4, generator=generator) - 1
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    return TensorDataset(x, y + 0.3 * torch.randn(y.shape, generator=generator))


@torch.no_grad()
def evaluate(model, loader, criterion):
    model.eval()
    losses = [criterion(model(x), y).item() * len(x) for x, y in loader]
    return sum(losses) / len(loader.dataset)


def train_model(model, optimizer, loaders, criterion, args):
    train_loader, valid_loader = loaders
    early_stopping = EarlyStopping(args.patience)
    valid_losses = []
    for epoch in range(1, args.epochs + 1):
        model.train()
        train_losses = []
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            train_losses.append(loss.item())
        valid_losses.append(evaluate(model, valid_loader, criterion))
        train_loss = sum(train_losses) / max(1, len(train_losses))
        print(f"[{epoch}/{args.epochs}] train {train_loss:.5f} valid {valid_losses[-1]:.5f}")
        early_stopping(valid_losses[-1], model)
        if early_stopping.early_stop:
            print("Early stopping")
            break
    model.load_state_dict(torch.load(early_stopping.path))
    return early_stopping, valid_losses


def main():
    parser = argparse.ArgumentParser(description="Early stopping")
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--patience", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    train_set, valid_set = random_split(make_data(240, generator), [120, 120], generator)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    valid_loader = DataLoader(valid_set, batch_size=args.batch_size)
    test_loader = DataLoader(make_data(400, generator), batch_size=100)
    model = nn.Sequential(
        nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = nn.MSELoss()

    run = paceline.join()
    model, optimizer, train_loader, valid_loader = run.prepare(
        model, optimizer, train_loader, valid_loader
    )

    stopping, valid_losses = train_model(
        model, optimizer, (train_loader, valid_loader), criterion, args
    )
    facts = {
        "epochs": len(valid_losses),
        "stopped_early": stopping.early_stop,
        "validations": len(valid_losses),
        "checkpoints": stopping.saves,
        "best_loss": stopping.best,
        "best_epoch": valid_losses.index(min(valid_losses)) + 1,
        "loss_of_best": evaluate(model, valid_loader, criterion),
        "loss": evaluate(model, test_loader, criterion),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
