# SPDX-License-Identifier: BSD-3-Clause
"""Tiny-Shakespeare: 1,115,394 characters from his plays, of 65 kinds, to be told one by one."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.lab.data.files import Source, damaged, locate, read

__all__ = ["SOURCES", "Text", "load_shakespeare"]

SOURCES = (
    Source(
        "tiny-shakespeare/input.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
)


@dataclass(frozen=True, eq=False)
class Text:
    """A text; each character is a place in `symbols`."""

    train: Tensor  # uint8: the first nine tenths of the text
    test: Tensor
    symbols: str  # in the order of their codes


def load_shakespeare(folder: Path) -> Text:
    """Read it from the folder for data. Raises SpecError."""
    path = locate(folder, *SOURCES)
    data = read(path)
    found = hashlib.sha256(data).hexdigest()
    if found != SOURCES[0].sha256:  # a text has no form of its own that could be looked at
        raise damaged(path, f"its SHA-256 is {found} instead of {SOURCES[0].sha256}")
    symbols = bytes(sorted(set(data)))
    codes = torch.frombuffer(
        bytearray(data.translate(bytes.maketrans(symbols, bytes(range(len(symbols)))))),
        dtype=torch.uint8,
    )
    end = len(codes) * 9 // 10
    return Text(train=codes[:end], test=codes[end:], symbols=symbols.decode("ascii"))
