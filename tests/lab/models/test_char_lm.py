# SPDX-License-Identifier: BSD-3-Clause
"""Character models see earlier symbols only."""

import pytest
import torch

from paceline.errors import SpecError
from paceline.lab.models.char_lm import CharLstm, CharTransformer

both = pytest.mark.parametrize("build", [CharLstm, CharTransformer])

LENGTH = 12


@both
@torch.no_grad()
def test_scores_depend_on_earlier_symbols_only(build):
    torch.manual_seed(0)
    model = build(symbols=7, width=16, layers=2).double()
    text = torch.randint(7, (1, LENGTH))
    others = (text + torch.eye(LENGTH, dtype=torch.int64)) % 7  # each differs at one position
    differs = (model(others) - model(text)).abs().amax(-1) > 1e-13
    position = torch.arange(LENGTH)
    torch.testing.assert_close(differs, position[:, None] <= position[None, :])


@both
def test_every_position_has_a_score_per_symbol(build):
    assert build(symbols=7, width=16, layers=1)(torch.zeros(3, LENGTH).long()).shape == (
        3,
        LENGTH,
        7,
    )


def test_transformer_uses_the_order_of_symbols():
    torch.manual_seed(0)
    model = CharTransformer(symbols=7, width=16)
    one, other = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))
    assert not torch.allclose(one[-1], other[-1])


def test_text_longer_than_length_max_is_refused():
    with pytest.raises(SpecError, match="expected at most length_max = 8 symbols, got 9"):
        CharTransformer(symbols=7, width=16, length_max=8)(torch.zeros(1, 9).long())
