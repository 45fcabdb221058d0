# SPDX-License-Identifier: BSD-3-Clause
"""Character-level language models: an LSTM, and a small transformer decoder.

Both map symbols [B, T] to scores [B, T, symbols] of the next symbol. The scores at position t
depend only on symbols 0 to t. With 65 symbols, the LSTM has 148,801 parameters and the transformer
124,865.
"""

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from paceline.errors import SpecError

__all__ = ["CharLstm", "CharTransformer"]


class CharLstm(nn.Module):
    """An embedding, LSTM layers and a linear layer; every text starts with a zero state."""

    def __init__(self, symbols: int, width: int = 128, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, symbols)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        scores: Tensor = self.head(states)
        return scores


class CharTransformer(nn.Module):
    """Pre-norm transformer blocks with causal attention and learnt positions."""

    def __init__(
        self, symbols: int, width: int = 64, layers: int = 2, heads: int = 4, length_max: int = 256
    ) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.positions = nn.Embedding(length_max, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, symbols))

    def forward(self, x: Tensor) -> Tensor:
        length, length_max = x.shape[1], self.positions.num_embeddings
        if length > length_max:
            raise SpecError(f"expected at most length_max = {length_max} symbols, got {length}")
        inputs = self.symbols(x) + self.positions.weight[:length]
        scores: Tensor = self.head(self.blocks(inputs))
        return scores


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_in = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.attention_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        # [B, T, 3 x width] -> three times [B, heads, T, width / heads]
        parts = self.attention_in(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(x)
        return result
