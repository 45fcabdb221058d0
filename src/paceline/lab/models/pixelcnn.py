# SPDX-License-Identifier: BSD-3-Clause
"""A gated PixelCNN (van den Oord et al. 2016): the probability of an image, value by value.

Values are ordered by row, then from left to right, then R, G, B. A vertical stack sees all rows
above and a horizontal one the pixels to the left, so there is no blind spot. The paper masks
kernels; this module uses smaller kernels and shifted inputs, which compute the same function
without multiplying by zeros. In the first layer a pixel doesn't see itself (mask A); further layers
see the features at their own position (mask B).

The outputs describe, for each pixel, a mixture of discretized logistic distributions of its three
values; the means of G and B depend on the values before them (Salimans et al. 2017). At this size
that learns much faster than 256 scores per value, because it knows from the start that 127 is near
128.

The default has 108,434 parameters and takes images of any size.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

__all__ = ["PixelCnn", "bits_per_dimension", "log_probabilities"]

LOG_SCALE_MIN = -7.0  # a thousandth of the range; anything sharper makes no difference
HALF = 1 / 255  # half the width of a value, with 256 values between -1 and 1


def bits_per_dimension(model: nn.Module, images: Tensor) -> Tensor:
    """Return the bits per value for each image of [B, 3, H, W] bytes."""
    nats: Tensor = -log_probabilities(model(images), images).flatten(1).mean(1)
    return nats / math.log(2)


def log_probabilities(outputs: Tensor, images: Tensor) -> Tensor:
    """Return the log probability of each value [B, 3, H, W], given those before it."""
    weights, means, log_scales, mixing = _unpack(outputs)
    x = _scaled(images, outputs.dtype).unsqueeze(1)  # all of these: [B, mixtures, 3, H, W]
    red, green = x[:, :, :1], x[:, :, 1:2]
    to_green, red_to_blue, green_to_blue = mixing.chunk(3, dim=2)
    shift = torch.cat(
        [torch.zeros_like(to_green), to_green * red, red_to_blue * red + green_to_blue * green], 2
    )
    joint = _log_logistic(x, means + shift, log_scales).cumsum(2)
    upto = (weights.log_softmax(1) + joint).logsumexp(1)  # of R; of R and G; of all three
    return torch.cat([upto[:, :1], upto.diff(dim=1)], dim=1)


def _unpack(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return logits [B, mixtures, 1, H, W], and means, log-scales and mixing coefficients [B,
    mixtures, 3, H, W]."""
    batch, channels, *grid = outputs.shape
    parts = outputs.reshape(batch, channels // 10, 10, *grid)
    weights, means, mixing = parts[:, :, :1], parts[:, :, 1:4], parts[:, :, 7:]
    return weights, means, parts[:, :, 4:7].clamp(min=LOG_SCALE_MIN), mixing.tanh()


def _log_logistic(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Return the log probability of a logistic distribution between x - HALF and x + HALF.

    The outermost values include the tails. With the logistic function s, the difference s(a) - s(b)
    is computed as s(a) s(-b) (1 - exp(b - a)), which never subtracts nearly equal numbers.
    """
    inverse = (-log_scale).exp()
    above = logsigmoid((x - mean + HALF) * inverse)
    below = logsigmoid((mean - x + HALF) * inverse)
    width = (-torch.expm1(-2 * HALF * inverse)).log()
    inside = above + below + width
    return torch.where(x > 1 - HALF, below, torch.where(x < HALF - 1, above, inside))


def _scaled(images: Tensor, dtype: torch.dtype) -> Tensor:
    return images.to(dtype) / 127.5 - 1


class PixelCnn(nn.Module):
    """Outputs [B, 10 x mixtures, H, W] for images of [B, 3, H, W] bytes."""

    def __init__(self, width: int = 32, layers: int = 5, mixtures: int = 5) -> None:
        super().__init__()
        self.first = _Layer(4, width, reach=3, is_first=True)
        self.rest = nn.ModuleList(_Layer(width, width, reach=1) for _ in range(layers - 1))
        self.head = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, 10 * mixtures, 1)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = _scaled(images, self.first.down.weight.dtype)
        x = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)  # makes the image's border visible
        vertical, horizontal, total = self.first(x, x)
        for layer in self.rest:
            vertical, horizontal, skip = layer(vertical, horizontal)
            total = total + skip
        outputs: Tensor = self.head(total)
        return outputs


class _Layer(nn.Module):
    """One layer of both stacks; in the vertical stack, (i, j) sees rows up to i.

    `reach`: how many pixels it sees upwards and to both sides.
    """

    def __init__(self, inputs: int, width: int, *, reach: int, is_first: bool = False) -> None:
        super().__init__()
        self.is_first = is_first
        self.reach = reach
        self.vertical = nn.Conv2d(inputs, 2 * width, (reach + 1, 2 * reach + 1))
        self.horizontal = nn.Conv2d(inputs, 2 * width, (1, reach + 1))
        self.down = nn.Conv2d(2 * width, 2 * width, 1)
        self.out = nn.Conv2d(width, 2 * width, 1)

    def forward(self, vertical: Tensor, horizontal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of both stacks, and the skip connection to the head."""
        reach = self.reach
        rows = self.vertical(pad(vertical, (reach, reach, reach, 0)))
        # Mask A: shift by one, so that (i, j) gets what ends at (i, j - 1).
        left = pad(horizontal, (reach + self.is_first, -self.is_first, 0, 0))
        above = pad(rows, (0, 0, 1, -1))  # (i, j) gets what ends with row i - 1
        gated = _gate(self.horizontal(left) + self.down(above))
        residual, skip = self.out(gated).chunk(2, dim=1)
        return _gate(rows), residual if self.is_first else horizontal + residual, skip


def _gate(x: Tensor) -> Tensor:
    values, gates = x.chunk(2, dim=1)
    return values.tanh() * gates.sigmoid()
