# SPDX-License-Identifier: BSD-3-Clause
"""tiny-shakespeare: 1,115,394 characters from the plays, 65 of them distinct."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.lab.data.download import Source, damaged_file, locate, read_file

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
    """A text; each character is an index into `symbols`."""

    train: Tensor  # uint8: the first nine tenths of the text
    test: Tensor
    symbols: str  # in the order of their codes


def load_shakespeare(folder: Path) -> Text:
    """Read the text from the data folder; raises SpecError."""
    path = locate(folder, *SOURCES)
    data = read_file(path)
    found = hashlib.sha256(data).hexdigest()
    if found != SOURCES[0].sha256:  # plain text has no structure to check
        raise damaged_file(path, f"expected SHA-256 {SOURCES[0].sha256}, got {found}")
    symbols = bytes(sorted(set(data)))
    codes = torch.frombuffer(
        bytearray(data.translate(bytes.maketrans(symbols, bytes(range(len(symbols)))))),
        dtype=torch.uint8,
    )
    end = len(codes) * 9 // 10
    return Text(train=codes[:end], test=codes[end:], symbols=symbols.decode("ascii"))
