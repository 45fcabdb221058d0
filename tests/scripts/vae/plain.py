# SPDX-License-Identifier: BSD-3-Clause
"""A variational autoencoder of small images, with samples drawn after each epoch."""

import argparse
import json

import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F

parser = argparse.ArgumentParser(description="VAE")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--log-interval", type=int, default=10)
args = parser.parse_args()

torch.manual_seed(args.seed)


class Bars(torch.utils.data.Dataset):
    """Images of 8 x 8 pixels, each with one horizontal and one vertical bar."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.bars = torch.randint(8, (count, 2), generator=generator)

    def __len__(self):
        return len(self.bars)

    def __getitem__(self, index):
        image = torch.zeros(8, 8)
        image[self.bars[index, 0]] = 1.0
        image[:, self.bars[index, 1]] = 1.0
        return image, 0


train_loader = torch.utils.data.DataLoader(
    Bars(1280, seed=0), batch_size=args.batch_size, shuffle=True
)
test_loader = torch.utils.data.DataLoader(Bars(256, seed=1), batch_size=args.batch_size)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 96)
        self.fc21 = nn.Linear(96, 8)
        self.fc22 = nn.Linear(96, 8)
        self.fc3 = nn.Linear(8, 96)
        self.fc4 = nn.Linear(96, 64)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 64))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


model = VAE()
optimizer = optim.Adam(model.parameters(), lr=5e-3)


def loss_function(recon_x, x, mu, logvar):
    """Reconstruction and Kullback-Leibler divergence, summed over all elements and the batch."""
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def train(epoch):
    model.train()
    train_loss, samples = 0.0, 0
    for batch_idx, (data, _) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        samples += len(data)
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(f"Train Epoch: {epoch} [{samples}]\tLoss: {loss.item() / len(data):.6f}")
    print(f"====> Epoch: {epoch} Average loss: {train_loss / max(1, samples):.4f}")


def test():
    model.eval()
    test_loss, batches = 0.0, 0
    with torch.no_grad():
        for data, _ in test_loader:
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
            batches += 1
    test_loss /= len(test_loader.dataset)
    print(f"====> Test set loss: {test_loss:.4f}")
    return test_loss, batches


if __name__ == "__main__":
    before, _ = test()
    losses, drawings = [], []
    for epoch in range(1, args.epochs + 1):
        train(epoch)
        loss, test_batches = test()
        losses.append(loss)
        with torch.no_grad():
            drawings.append(model.decode(torch.randn(16, 8)).view(16, 1, 8, 8))
        torch.save(drawings, "drawings.pt")
    torch.save(model.state_dict(), "vae.pt")
    facts = {
        "epochs": epoch,
        "validations": len(losses),
        "test_batches": test_batches,
        "checkpoints": len(drawings),
        "before": before,
        "loss": losses[-1],
    }
    print(json.dumps(facts))
