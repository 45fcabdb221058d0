# SPDX-License-Identifier: BSD-3-Clause
"""Train the MNIST CNN on random noise, in a run that only measures how long gradients take."""

import torch
from torch.nn.functional import cross_entropy

from paceline.lab.models.mnist_cnn import MnistCnn
from paceline.run.script import join

BATCH = 8


def main() -> None:
    """Train until the run ends."""
    model = MnistCnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = join()
    model, optimizer = run.prepare(model, optimizer)
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    while not run.finished:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
