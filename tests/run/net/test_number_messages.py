# SPDX-License-Identifier: BSD-3-Clause
"""The messages about numbers are validated like all others; see test_messages.py."""

import pytest

from paceline.errors import ProtocolError
from paceline.release import RELEASE
from paceline.run.net.messages import decode_server, decode_worker, encode
from paceline.run.net.number_messages import NumberReserved, ReserveNumber


def test_request_without_a_wish_wants_any_number():
    request = decode_worker(encode(ReserveNumber(b"seat", RELEASE)))
    assert (request.wanted, request.is_fixed) == (None, False)


@pytest.mark.parametrize("wrong", [{"wanted": -1}, {"wanted": 10**6}, {"seat": bytes(33)}], ids=str)
def test_request_for_an_impossible_number_is_refused(wrong):
    body = encode(ReserveNumber(**{"seat": b"seat", "release": RELEASE, **wrong}))
    with pytest.raises(ProtocolError):
        decode_worker(body)


def test_answer_has_what_a_script_may_ask_before_it_joins():
    answer = decode_server(encode(NumberReserved(b"seat", 3, 4, 7)))
    assert (answer.number, answer.workers, answer.seed) == (3, 4, 7)
