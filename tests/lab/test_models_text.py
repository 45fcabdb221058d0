# SPDX-License-Identifier: BSD-3-Clause
"""Language models: what comes later is not seen, and what came before is."""

import pytest
import torch

from paceline.errors import SpecError
from paceline.lab.models.text import CharLstm, CharTransformer

both = pytest.mark.parametrize("build", [CharLstm, CharTransformer])
LENGTH = 12


@both
@torch.no_grad()
def test_scores_depend_on_the_symbols_until_there(build):
    torch.manual_seed(0)
    model = build(symbols=7, width=16, layers=2).double()
    text = torch.randint(7, (1, LENGTH))
    others = (text + torch.eye(LENGTH, dtype=torch.int64)) % 7  # each is another at one place
    differs = (model(others) - model(text)).abs().amax(-1) > 1e-13
    place = torch.arange(LENGTH)
    torch.testing.assert_close(differs, place[:, None] <= place[None, :])


@both
def test_there_is_a_score_for_every_symbol_at_every_place(build):
    assert build(symbols=7, width=16, layers=1)(torch.zeros(3, LENGTH).long()).shape == (
        3,
        LENGTH,
        7,
    )


def test_the_transformer_knows_the_order_of_the_symbols():
    torch.manual_seed(0)
    model = CharTransformer(symbols=7, width=16)
    one, other = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))
    assert not torch.allclose(one[-1], other[-1])


def test_a_piece_that_is_too_long_for_the_transformer_is_refused():
    with pytest.raises(SpecError, match="at most length_max = 8 symbols, got 9"):
        CharTransformer(symbols=7, width=16, length_max=8)(torch.zeros(1, 9).long())
