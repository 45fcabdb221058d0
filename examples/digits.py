# SPDX-License-Identifier: BSD-3-Clause
"""Train a small convolutional network to read handwritten digits.

$ paceline run --workers 8 --policy backup:1 --steps 200 examples/digits.py
server    | 200 updates of 22400 samples in 3.5 s
worker 0  | test accuracy 97.5%
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
test = torch.arange(len(images)) % 5 == 0  # every fifth image is for testing
loader = DataLoader(TensorDataset(images[~test], labels[~test]), batch_size=16, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.GroupNorm(4, 32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)


@torch.no_grad()
def accuracy():
    return (model(images[test]).argmax(1) == labels[test]).float().mean().item()


for _ in range(30):
    for step, (inputs, targets) in enumerate(loader):  # in a run, the workers share an epoch
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()  # push the gradient, wait as the rule says, load the new version
        run.log(loss=loss.item())
        if run.is_first and step % 5 == 0:
            run.log(accuracy=accuracy())

if run.is_first:
    print(f"test accuracy {accuracy():.1%}")
