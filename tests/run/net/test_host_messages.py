# SPDX-License-Identifier: BSD-3-Clause
"""The messages of a host's agent are validated like all others; see test_messages.py."""

import pytest

from paceline.errors import ProtocolError
from paceline.run.net.host_messages import HostVersion, SendSum, SumSpoiled
from paceline.run.net.messages import decode_server, decode_worker, encode


def test_sum_names_workers_and_their_samples():
    message = SendSum(3, 0, (1, 4), (8, 16))
    assert decode_server(encode(message)) == message


@pytest.mark.parametrize("wrong", [{"workers": (-1,)}, {"workers": (10**6,)}, {"payload": -1}])
def test_report_about_impossible_workers_is_refused(wrong):
    body = encode(SumSpoiled(**{"payload": 1, "workers": (0,), **wrong}))
    with pytest.raises(ProtocolError):
        decode_worker(body)


def test_version_without_a_worker_is_for_all_of_the_host():
    message = HostVersion(3, 7, None, False, None, (1, 2))
    assert decode_server(encode(message)) == message
