# SPDX-License-Identifier: BSD-3-Clause
"""A data set of labelled images: bytes, in torch's order of dimensions."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Images"]


@dataclass(frozen=True, eq=False)
class Images:
    """A data set of images; don't write to its tensors, they are shared."""

    train_x: Tensor  # uint8, of shape [images, channels, height, width]
    train_y: Tensor  # int64, each below `classes`
    test_x: Tensor
    test_y: Tensor
    classes: int
