# SPDX-License-Identifier: BSD-3-Clause
"""What only the in-process transport does: connect threads of one process.

`test_transport.py` tests what all transports do, and `test_server_in_process.py` runs a whole
server over it.
"""

from threading import Thread

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from paceline.errors import PeerLost
from paceline.run.net import messages
from paceline.run.net.in_process import InProcessNetwork, InProcessStore
from paceline.run.tensors.layout import gather


@pytest.fixture
def network():
    model = nn.Linear(3, 1)
    spec = gather([model], [torch.optim.SGD(model.parameters(), lr=0.1)]).spec
    network = InProcessNetwork(InProcessStore(spec))
    yield network
    network.shut_down()


def test_worker_can_connect_before_the_server_waits(network):
    worker = network.connect()
    worker.send(messages.AbandonReport(1, 0.5))
    [peer] = network.wait(0.0)
    assert list(peer.receive_nowait()) == [messages.AbandonReport(1, 0.5)]


def test_worker_cannot_connect_after_the_server_has_shut_down(network):
    network.shut_down()
    with pytest.raises(PeerLost, match="the server has shut down"):
        network.connect()


def test_shutting_down_wakes_all_workers(network):
    workers = [network.connect() for _ in range(3)]
    lost = []

    def wait(worker):
        try:
            worker.receive()
        except PeerLost:
            lost.append(worker)

    threads = [Thread(target=wait, args=[worker]) for worker in workers]
    for thread in threads:
        thread.start()
    network.shut_down()
    for thread in threads:
        thread.join()
    assert len(lost) == 3


def test_message_that_cannot_be_encoded_fails_where_it_is_sent(network):
    worker = network.connect()
    with pytest.raises(TypeError):
        worker.send(object())
    worker.send(messages.AbandonReport(1, 0.5))
    [peer] = network.wait(0.0)
    assert list(peer.receive_nowait()) == [messages.AbandonReport(1, 0.5)]


def test_received_message_is_not_the_object_that_was_sent(network):
    worker, scalars = network.connect(), {"loss": 0.5}
    worker.send(messages.GradientReport(1, 0, 0, 1, 0.5, 1.0, scalars=scalars))
    scalars["loss"] = 1.5
    [peer] = network.wait(0.0)
    [report] = peer.receive_nowait()
    assert report.scalars == {"loss": 0.5}


def test_every_peer_with_news_is_returned_once(network):
    workers = [network.connect() for _ in range(4)]
    for worker in workers[1:3]:
        worker.send(messages.AbandonReport(1, 0.5))
        worker.send(messages.AbandonReport(2, 0.5))
    ready = network.wait(0.0)
    assert len(ready) == 2
    for peer in ready:
        assert len(list(peer.receive_nowait())) == 2
    assert network.wait(0.0) == []
