# SPDX-License-Identifier: BSD-3-Clause
"""The launcher's connection to the server: the handshake, and what is sent during it."""

import select
from dataclasses import replace

import pytest

from paceline.errors import PeerLost, ProtocolError
from paceline.run.launch.watch_channel import dialer
from paceline.run.net.address import accept, listen, of_socket
from paceline.run.net.channel import STRANGER_LIMIT, Channel
from paceline.run.net.handshake import Challenger, new_token
from paceline.run.net.messages import RunProgress, Watch, decode_stranger, decode_worker
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.net.tcp import TcpPeer
from paceline.run.net.tls import server_context
from paceline.run.server.listener import Listener
from paceline.run.tensors.state_spec import StateSpec

PATIENCE_S = 60


@pytest.fixture
def listening(identity):
    with listen(identity.address) as sock:
        yield sock


def accepted(listening):
    """Return the server's end of the next connection."""
    select.select([listening], [], [], PATIENCE_S)
    sock = accept(listening)
    sock.setblocking(True)
    return Channel(sock, decode_stranger, STRANGER_LIMIT)


def test_messages_wait_for_the_handshake(identity, listening, selector):
    end = dialer(identity, selector)()
    end.send(Watch(1, waits=False))
    server, challenger = accepted(listening), Challenger(identity.token())
    server.send(challenger.answer(server.receive()))
    assert end.wait_readable(PATIENCE_S)
    assert list(end.receive_nowait()) == []  # the handshake is not for the caller
    challenger.check(server.receive())
    server.trust(decode_worker)
    assert server.receive() == Watch(1, waits=False)
    end.send(Watch(2, waits=True))
    assert server.receive() == Watch(2, waits=True)
    progress = RunProgress(2, 0, {}, (), {}, False, False)
    server.send(progress)
    assert end.wait_readable(PATIENCE_S)
    assert list(end.receive_nowait()) == [progress]
    server.close()
    end.close()


def test_handshakes_over_tls_do_not_block(identity, selector, tls_files):
    with listen("tcp:127.0.0.1:0") as listening:
        address = of_socket(listening, "tcp:127.0.0.1:0")
        end = dialer(replace(identity, address=address, tls=tls_files), selector)()
        end.send(Watch(1, waits=False))
        store = SharedMemoryStore(StateSpec((), (), (), ()))
        listener = Listener(
            [listening],
            identity.token(),
            lambda channel: TcpPeer(channel, store),
            tls=server_context(tls_files),
        )
        received = []
        while not received:
            for peer in listener.wait(0.01):
                received += peer.receive_nowait()
            if end.wait_readable(0.0):
                assert list(end.receive_nowait()) == []
        assert received == [Watch(1, waits=False)]
        end.close()
        listener.shut_down()


def test_open_connection_is_registered_with_the_selector(identity, listening, selector):
    end = dialer(identity, selector)()
    assert len(selector.get_map()) == 1
    end.close()
    assert not selector.get_map()


def test_missing_server_is_lost(identity, selector):
    with pytest.raises(PeerLost, match="no server at"):
        dialer(identity, selector)()
    assert not selector.get_map()


def test_server_with_another_token_breaks_the_protocol(identity, listening, selector):
    end = dialer(identity, selector)()
    server = accepted(listening)
    server.send(Challenger(new_token()).answer(server.receive()))
    assert end.wait_readable(PATIENCE_S)
    with pytest.raises(ProtocolError, match="a different token"):
        list(end.receive_nowait())
    server.close()
    end.close()
