# SPDX-License-Identifier: BSD-3-Clause
"""A siamese network that learns whether two images show the same class."""

import argparse
import json
import random

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

import paceline


class SiameseNetwork(nn.Module):
    """Two towers with shared weights, and a small classifier on top of both."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16, 16)
        )
        self.fc = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.sigmoid = nn.Sigmoid()

    def forward(self, input1, input2):
        difference = (self.tower(input1) - self.tower(input2)).abs()
        return self.sigmoid(self.fc(difference))


class APPMatcher(Dataset):
    """Pairs of images, of which every other one shows the same class twice."""

    def __init__(self, pairs, seed):
        generator = torch.Generator().manual_seed(0)
        pictures = torch.randn(6, 5, 5, generator=generator)
        pictures = F.interpolate(pictures[:, None], size=(10, 10), mode="bilinear")
        generator.manual_seed(seed)
        noise = 0.5 * torch.randn(20, 6, 1, 10, 10, generator=generator)
        self.images = (pictures + noise).transpose(0, 1)  # by class
        self.pairs = pairs

    def __len__(self):
        return self.pairs

    def __getitem__(self, index):
        pick = random.Random(index)
        first = pick.randrange(6)
        second = first if index % 2 == 0 else pick.choice([c for c in range(6) if c != first])
        image_1 = self.images[first, pick.randrange(20)]
        image_2 = self.images[second, pick.randrange(20)]
        return image_1, image_2, torch.tensor(float(index % 2 == 0))


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    criterion = nn.BCELoss()
    for batch_idx, (images_1, images_2, targets) in enumerate(train_loader):
        images_1, images_2, targets = images_1.to(device), images_2.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{batch_idx * len(images_1)}]\tLoss: {loss.item():.6f}")


@torch.no_grad()
def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    criterion = nn.BCELoss(reduction="sum")
    for images_1, images_2, targets in test_loader:
        outputs = model(images_1.to(device), images_2.to(device)).squeeze()
        test_loss += criterion(outputs, targets).item()
        correct += ((outputs > 0.5) == targets.bool()).sum().item()
    count = len(test_loader.dataset)
    print(f"Test set: Average loss: {test_loss / count:.4f}, Accuracy: {correct}/{count}")
    return correct / count


def main():
    parser = argparse.ArgumentParser(description="Siamese network")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--test-batch-size", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    train_loader = DataLoader(
        APPMatcher(1200, seed=1), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    test_loader = DataLoader(APPMatcher(300, seed=2), batch_size=args.test_batch_size)

    model = SiameseNetwork().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)

    run = paceline.join()
    model, optimizer, scheduler, train_loader = run.prepare(
        model, optimizer, scheduler, train_loader
    )

    accuracies = []
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        accuracies.append(test(model, device, test_loader))
        scheduler.step()

    torch.save(model, "siamese_network.pt")
    facts = {
        "epochs": epoch,
        "validations": len(accuracies),
        "scheduler_steps": scheduler.last_epoch,
        "lr": scheduler.get_last_lr()[0],
        "checkpoints": 1,
        "accuracy": accuracies[-1],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
