# SPDX-License-Identifier: BSD-3-Clause
"""First weights for plain deep networks, those without batch norm or anything like it."""

from torch import nn

__all__ = ["he_weights"]


def he_weights(model: nn.Module) -> None:
    """Set the weights of convolutions and linear layers as He et al. (2015) do; biases to 0.

    Each ReLU then passes on as much as it gets. With torch's own first weights it passes on a sixth
    (in squares), and what reaches the end of eight layers, let alone 22, is next to nothing. The
    last layer, which no ReLU follows, keeps torch's, so that the first scores are small.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for layer in layers[:-1]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
