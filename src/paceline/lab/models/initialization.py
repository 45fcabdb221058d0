# SPDX-License-Identifier: BSD-3-Clause
"""Initial weights for deep networks without batch norm or anything like it."""

from torch import nn

__all__ = ["init_he"]


def init_he(model: nn.Module) -> None:
    """Initialize convolutions and linear layers as He et al. (2015) do, with biases of 0.

    Each layer with its ReLU then keeps the mean square of its inputs. With torch's defaults it
    shrinks it to a sixth, so after eight layers, let alone 22, next to nothing is left. The last
    layer has no ReLU and keeps torch's defaults, so that the first scores are small.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    for layer in layers[:-1]:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
