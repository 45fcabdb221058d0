# SPDX-License-Identifier: BSD-3-Clause
"""A client without tensors of its own: messages and states, as between a server and the head."""

import socket
from time import monotonic

import pytest
import torch

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.net import server_messages as between
from paceline.run.net.channel import MEMBER_LIMIT, Channel
from paceline.run.net.data_socket import DataSocket
from paceline.run.net.in_process import InProcessStore
from paceline.run.net.messages import decode_server, decode_worker
from paceline.run.net.tcp import TcpPeer
from paceline.run.net.tcp_client import ControlSocket, TcpClient
from tcp_loopback import TIMEOUT_S, state_of_size

LARGE = 8 << 20  # more than the sockets hold


class Pair:
    """A client and a server's end, over real sockets."""

    def __init__(self):
        (mine, theirs), (data, their_data) = socket.socketpair(), socket.socketpair()
        theirs.setblocking(False)
        self._channel = Channel(theirs, decode_worker, MEMBER_LIMIT)
        self.peer = TcpPeer(self._channel, InProcessStore(state_of_size(64).spec))
        self.peer.attach(DataSocket(their_data))
        self.control = ControlSocket(Channel(mine, decode_server, MEMBER_LIMIT))
        self.stream = DataSocket(data)
        self.client = TcpClient(self.control, self.stream)

    def until(self, is_met):
        """Let both sides work until this is met; return what the server has received."""
        found = []
        give_up_at = monotonic() + TIMEOUT_S
        while not is_met(found):
            assert monotonic() < give_up_at
            self.client.wait_readable(0.0)
            self.peer.send_data()
            self.peer.receive_data()
            found += self.peer.receive_nowait()
        return found

    def close(self):
        self.client.close()
        self.peer.close()


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


def test_message_without_a_payload_is_received_at_once(pair):
    pair.peer.send(between.CollectPart())
    assert pair.client.receive() == between.CollectPart()
    assert not pair.client.wait_readable(0.0)


@pytest.mark.parametrize("count", [0, 3, LARGE // 4])
def test_state_from_the_server_is_received_after_its_message(pair, count):
    state = {"step": 3, "values": torch.arange(float(count))}
    pair.peer.send(between.LoadPart(7))
    pair.peer.send_state(state, "parameters")
    pair.peer.send(between.CollectPart())
    pair.until(lambda _: pair.client.wait_readable(0.0))
    assert pair.client.receive() == between.LoadPart(7)
    pair.until(lambda _: pair.client.wait_readable(0.0))
    found = pair.client.receive_state(pair.client.receive())
    assert found["step"] == 3
    assert torch.equal(found["values"], state["values"])
    assert pair.client.receive() == between.CollectPart()


def test_state_without_tensors_is_received_in_both_directions(pair):
    pair.peer.send_state({"lr": 0.5}, "state of the optimizer")
    pair.until(lambda _: pair.client.wait_readable(0.0))
    assert pair.client.receive_state(pair.client.receive()) == {"lr": 0.5}
    pair.client.send_state(0, {"lr": 0.25}, has_begun=True)
    [upload] = pair.until(bool)
    assert pair.peer.receive_state(upload) == {"lr": 0.25}


@pytest.mark.parametrize("count", [3, LARGE // 4])
def test_state_to_the_server_is_sent_when_it_is_wanted(pair, count):
    pair.client.send_state(2, [torch.arange(float(count))], has_begun=True)
    [upload] = pair.until(bool)
    assert (upload.optimizer, upload.has_begun) == (2, True)
    [values] = pair.peer.receive_state(upload)
    assert torch.equal(values, torch.arange(float(count)))


def test_state_is_read_once(pair):
    pair.peer.send_state([torch.ones(1)], "parameters")
    pair.until(lambda _: pair.client.wait_readable(0.0))
    reply = pair.client.receive()
    pair.client.receive_state(reply)
    with pytest.raises(ProtocolError, match="expected shared memory with a message, got none"):
        pair.client.receive_state(reply)
    assert pair.client.receive_state(messages.StateReply(0)) is None


def test_client_wishes_for_data_only_while_a_payload_is_under_way(pair):
    assert pair.client.wishes == (True, [], [])
    pair.peer._control.send(messages.StateReply(1, 4))
    pair.client.wait_readable(0.0)
    pair.client.wait_readable(0.0)
    assert pair.client.wishes == (True, [pair.stream], [])


def test_control_socket_reports_a_message_only_if_it_is_wished_for(pair):
    pair.peer.send(between.CollectPart())
    wishes = pair.client.wishes
    assert pair.control.wait(wishes, TIMEOUT_S)
    assert not pair.control.wait(wishes._replace(message=False), 0.0)


def test_loss_of_the_server_is_raised_after_its_last_message(pair):
    pair.peer.send(between.RunOver())
    pair.peer.close()
    assert pair.client.wait_readable(0.0)
    assert pair.client.receive() == between.RunOver()
    with pytest.raises(PeerLost):
        pair.client.receive()


def test_messages_without_a_payload_survive_the_loss_of_the_data_connection(pair):
    pair.peer._control.send(messages.StateReply(1, 4))
    pair.peer.send(between.RunOver())
    pair.peer._stream.close()
    assert pair.client.receive() == between.RunOver()
    with pytest.raises(PeerLost, match="the data connection was closed"):
        pair.client.receive()
