# SPDX-License-Identifier: BSD-3-Clause
"""The server's end between hosts: large payloads, cancelled ones, and peers that misbehave.

Everything runs over real TCP connections on loopback, in one thread.
"""

import gc
import os
import socket
import struct
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net import messages
from paceline.run.net.payload_stream import CHUNK_BYTES
from paceline.run.net.tcp import TcpPeer, spans_of
from paceline.run.net.transport import Announcement, Moved
from paceline.run.tensors.layout import gather
from tcp_loopback import REPORT, Tcp, assign, pump, state_of_size, turn

LARGE = 8 * CHUNK_BYTES
HEADER_BYTES = 16
BUFFERED = 16 * CHUNK_BYTES  # that both sockets may hold; far less than VERY_LARGE
VERY_LARGE = 64 * CHUNK_BYTES


@pytest.fixture(scope="module")
def small_spec():
    return state_of_size(64).spec


@pytest.fixture(scope="module")
def large_spec():
    return state_of_size(LARGE).spec


@pytest.fixture
def small(small_spec):
    with closing(Tcp(small_spec)) as tcp:
        yield tcp


@pytest.fixture
def large(large_spec):
    with closing(Tcp(large_spec)) as tcp:
        yield tcp


def weight(views):
    [[tensor]] = views.parameters
    return tensor


def announced(tcp, peer, worker, report=REPORT):
    """Announce a gradient; return the announcement as the server receives it."""
    worker.announce(report)
    [announcement] = received(tcp, peer)
    assert isinstance(announcement, Announcement)
    return announcement


def wait_readable(tcp, worker):
    """Let both sides send and receive until the worker has a message."""
    for _ in pump(tcp, worker):
        if worker.wait_readable(0.0):
            return


def received(tcp, peer, *workers):
    """Return the next messages of a peer."""
    for ready in pump(tcp, *workers):
        if peer in ready and (found := list(peer.receive_nowait())):
            return found
    raise AssertionError


def receive_all(tcp, peer, *workers):
    """Return the messages of a peer until it is lost, and why."""
    found = []
    try:
        for ready in pump(tcp, *workers):
            if peer in ready:
                found.extend(peer.receive_nowait())
    except PeerLost as error:
        return found, str(error)


def loss(tcp, peer):
    """Wait until a peer is lost; return the reason."""
    found, reason = receive_all(tcp, peer)
    assert found == []
    return reason


def reset(worker):
    """Kill a worker's connections as if its process was killed with unread data."""
    for sock in (worker._control._channel._sock, worker._links[0].stream._sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


def settle(tcp, *workers):
    """Let everyone send and receive until no byte has moved for a while."""
    quiet, before = 0, None
    for _ in pump(tcp, *workers):
        peers = tcp.connections._connections
        now = [(peer._sender.sent_bytes, peer._receiver.received_bytes) for peer in peers]
        now += [worker._links[0].receiver.received_bytes for worker in workers]
        quiet, before = (quiet + 1 if now == before else 0), now
        if quiet == 20:
            return


# ------------------------------------------------------------------------------- large payloads


def test_large_version_and_gradient_arrive_complete(large):
    peer, worker, slot = large.join()
    buffer = large.store.new_buffer()
    weight(buffer.views).copy_(torch.arange(LARGE // 4).view(1, -1))
    peer.publish(assign(1), buffer)
    wait_readable(large, worker)
    views = worker.fetch(worker.receive())
    assert torch.equal(weight(views), weight(buffer.views))
    weight(slot).copy_(weight(views) * 2)
    report = turn(large, peer, worker, 1)
    assert torch.equal(weight(peer.delivered(report).slot), weight(buffer.views) * 2)


def test_moved_bytes_are_counted_once_with_their_headers(large):
    peer, worker, _ = large.join()
    assert peer.take_moved() == Moved()
    turn(large, peer, worker, 1)
    assert peer.take_moved() == Moved(0, LARGE + 8 * HEADER_BYTES)
    assert peer.take_moved() == Moved()
    buffer = large.store.new_buffer()
    peer.publish(assign(1), buffer)
    wait_readable(large, worker)
    assert peer.take_moved() == Moved(LARGE + 8 * HEADER_BYTES, 0)


def test_only_the_optimizer_that_was_asked_for_travels():
    models = [nn.Linear(4, 1, bias=False), nn.Linear(8, 1, bias=False)]
    spec = gather(models, [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]).spec
    with closing(Tcp(spec)) as tcp:
        peer, worker, _ = tcp.join()
        worker.announce(messages.GradientReport(1, 0, 1, 1, 0.5, 1.0))
        [announcement] = received(tcp, peer)
        announcement.admit()
        [report] = received(tcp, peer, worker)
        assert report.optimizer == 1
        sizes = [peer._slot.flats[1][0].numel() * 4, peer.take_moved().to_server]
        assert sizes[1] == sizes[0] + HEADER_BYTES


def test_nothing_is_sent_before_the_server_admits_it(large):
    peer, worker, _ = large.join()
    announcement = announced(large, peer, worker)
    settle(large, worker)
    assert peer.take_moved() == Moved()
    announcement.admit()
    assert received(large, peer, worker) == [REPORT]


def test_announced_gradient_is_complete_before_its_report_is_received(large):
    peer, worker, slot = large.join()
    weight(slot).fill_(3.0)
    announced(large, peer, worker).admit()
    assert received(large, peer, worker) == [REPORT]
    assert weight(peer.delivered(REPORT).slot).eq(3.0).all()


# ------------------------------------------------------------------------ cancelled by the server


def test_version_that_is_cancelled_before_the_worker_reads_stops_soon():
    with closing(Tcp(state_of_size(VERY_LARGE).spec)) as tcp:
        peer, worker, slot = tcp.join()
        buffer = tcp.store.new_buffer()
        weight(buffer.views).fill_(1.0)
        peer.publish(assign(1), buffer)
        settle(tcp)
        peer.cancel(1)
        wait_readable(tcp, worker)
        assignment = worker.receive()
        assert assignment == assign(1)
        assert worker.fetch(assignment) is None
        moved = peer.take_moved().to_worker
        assert 0 < moved <= BUFFERED
        assert worker.receive() == messages.CancelTurn(1)
        weight(buffer.views).fill_(2.0)
        peer.publish(assign(2), buffer)
        wait_readable(tcp, worker)
        views = worker.fetch(worker.receive())
        assert weight(views).eq(2.0).all()
        weight(slot).fill_(5.0)
        assert weight(peer.delivered(turn(tcp, peer, worker, 2)).slot).eq(5.0).all()


def test_cancelling_another_turn_does_not_stop_the_version(large):
    peer, worker, _ = large.join()
    buffer = large.store.new_buffer()
    weight(buffer.views).fill_(1.0)
    peer.publish(assign(2), buffer)
    peer.cancel(1)
    wait_readable(large, worker)
    assert weight(worker.fetch(worker.receive())).eq(1.0).all()
    assert worker.receive() == messages.CancelTurn(1)


def test_cancelling_a_turn_whose_version_has_arrived_only_tells_the_worker(large):
    peer, worker, _ = large.join()
    buffer = large.store.new_buffer()
    peer.publish(assign(1), buffer)
    wait_readable(large, worker)
    peer.cancel(1)
    assert worker.fetch(worker.receive()) is not None
    assert worker.receive() == messages.CancelTurn(1)


# ------------------------------------------------------------------------ withdrawn by the server


def test_gradient_that_is_withdrawn_before_its_admission_is_never_sent(large):
    peer, worker, slot = large.join()
    announced(large, peer, worker).withdraw()
    settle(large, worker)
    assert peer.take_moved() == Moved()
    weight(slot).fill_(2.0)
    assert weight(peer.delivered(turn(large, peer, worker, 2)).slot).eq(2.0).all()


def test_gradient_that_is_withdrawn_on_its_way_stops_soon_and_the_next_one_arrives():
    with closing(Tcp(state_of_size(VERY_LARGE).spec)) as tcp:
        peer, worker, slot = tcp.join()
        weight(slot).fill_(1.0)
        announcement = announced(tcp, peer, worker)
        announcement.admit()
        for _ in pump(tcp, worker):
            if peer._receiver.received_bytes > 3 * CHUNK_BYTES:
                break
        announcement.withdraw()
        kept = weight(peer.delivered(REPORT).slot).clone()
        settle(tcp, worker)
        assert 3 * CHUNK_BYTES < peer.take_moved().to_server <= 4 * CHUNK_BYTES + BUFFERED
        assert torch.equal(weight(peer.delivered(REPORT).slot), kept)
        assert list(peer.receive_nowait()) == []
        weight(slot).fill_(2.0)
        assert turn(tcp, peer, worker, 2).turn == 2
        assert weight(peer.delivered(REPORT).slot).eq(2.0).all()


def test_gradient_that_is_withdrawn_after_its_last_byte_is_not_received(large):
    peer, worker, _ = large.join()
    announcement = announced(large, peer, worker)
    announcement.admit()
    for ready in pump(large, worker):
        if peer in ready:
            break  # it has arrived, but the server hasn't received its report
    assert peer.has_arrived
    announcement.withdraw()
    assert list(peer.receive_nowait()) == []
    assert turn(large, peer, worker, 2).turn == 2


def test_worker_may_announce_again_once_its_gradient_was_withdrawn(small):
    peer, worker, _ = small.join()
    for number in range(1, 6):
        report = messages.GradientReport(number, 0, 0, 1, 0.5, 1.0)
        announced(small, peer, worker, report).withdraw()
    assert turn(small, peer, worker, 6).turn == 6


# ------------------------------------------------------------------------------------- lost peers


def test_peer_that_stops_in_the_middle_of_a_payload_does_not_hold_up_others(large):
    stuck, silent, _ = large.join()
    peer, worker, slot = large.join()
    announced(large, stuck, silent).admit()
    for _ in pump(large, silent):
        if stuck._receiver.received_bytes > CHUNK_BYTES:
            break
    for number in range(1, 4):
        weight(slot).fill_(float(number))
        assert weight(peer.delivered(turn(large, peer, worker, number)).slot).eq(number).all()
    assert received(large, stuck, silent) == [REPORT]  # it has gone on


def test_peer_that_is_killed_in_the_middle_of_a_payload_is_lost_and_others_go_on(large):
    lost, killed, _ = large.join()
    peer, worker, _ = large.join()
    announced(large, lost, killed).admit()
    for _ in pump(large, killed):
        if lost._receiver.received_bytes > CHUNK_BYTES:
            break
    reset(killed)
    assert loss(large, lost)
    large.connections.close(lost)
    assert turn(large, peer, worker, 1).turn == 1


def test_peer_whose_data_connection_alone_is_closed_is_lost(small):
    peer, worker, _ = small.join()
    worker._links[0].stream.close()
    assert loss(small, peer) == "the data connection was closed"


def test_peer_that_is_killed_while_it_is_sent_a_version_is_lost(large):
    peer, worker, _ = large.join()
    buffer = large.store.new_buffer()
    for number in range(1, 5):
        peer.publish(assign(number), buffer)
    reset(worker)
    assert loss(large, peer)


def test_messages_before_the_loss_of_the_data_connection_are_received_first(small):
    peer, worker, _ = small.join()
    for number in range(3):
        worker.send(messages.AbandonReport(number, 0.5))
    worker._links[0].stream.close()
    found, reason = receive_all(small, peer)
    assert found == [messages.AbandonReport(number, 0.5) for number in range(3)]
    assert reason == "the data connection was closed"


def test_long_messages_before_the_loss_of_both_connections_are_received_first(small):
    """The server reads a long message in several steps."""
    peer, worker, _ = small.join()
    sent = [messages.PositionReport(1, bytes(100_000)), messages.ScriptEnded()]
    for message in sent:
        worker.send(message)
    worker.close()
    found, _ = receive_all(small, peer)
    assert found == sent


def test_gradient_that_is_complete_before_the_loss_is_received_first(large):
    peer, worker, slot = large.join()
    weight(slot).fill_(4.0)
    announced(large, peer, worker).admit()
    for _ in pump(large, worker):
        if not worker._links[0].sender and peer._receiver.received_bytes:
            break
    worker.close()
    found, _ = receive_all(large, peer)
    assert found == [REPORT]
    assert weight(peer.delivered(REPORT).slot).eq(4.0).all()


def test_peer_without_a_data_connection_cannot_get_a_version(small):
    peer, _ = small.connect()
    lonely = TcpPeer(peer._control, small.store)
    with pytest.raises(PeerLost, match="it has no data connection"):
        lonely.publish(assign(1), small.store.new_buffer())


# -------------------------------------------------------------------------------------- many peers


def test_many_peers_deliver_at_once(small):
    joined = [small.join() for _ in range(64)]
    workers = [worker for _, worker, _ in joined]
    for number, (_, worker, slot) in enumerate(joined):
        weight(slot).fill_(float(number))
        worker.announce(REPORT)
    delivered = {}
    for ready in pump(small, *workers):
        for peer in ready:
            for message in peer.receive_nowait():
                if isinstance(message, Announcement):
                    message.admit()
                else:
                    delivered[peer] = weight(peer.delivered(message).slot).clone()
        if len(delivered) == 64:
            break
    for number, (peer, _, _) in enumerate(joined):
        assert delivered[peer].eq(number).all()


def test_peer_that_never_reads_does_not_slow_down_another():
    with closing(Tcp(state_of_size(VERY_LARGE).spec)) as tcp:
        deaf, _, _ = tcp.join()
        peer, worker, _ = tcp.join()
        buffer = tcp.store.new_buffer()
        deaf.publish(assign(1), buffer)
        settle(tcp)
        stuck_at = deaf.take_moved().to_worker
        assert stuck_at < VERY_LARGE
        for number in range(1, 4):
            peer.publish(assign(number), buffer)
            wait_readable(tcp, worker)
            assert worker.receive().turn == number
        assert deaf.take_moved().to_worker == 0


def test_peer_that_reads_one_byte_at_a_time_does_not_slow_down_another():
    with closing(Tcp(state_of_size(VERY_LARGE).spec)) as tcp:
        slow, reader, _ = tcp.join()
        peer, worker, _ = tcp.join()
        buffer = tcp.store.new_buffer()
        slow.publish(assign(1), buffer)
        peer.publish(assign(1), buffer)
        bytes_read = 0
        for _ in pump(tcp, worker):
            bytes_read += reader._links[0].stream.receive_into(memoryview(bytearray(1)))
            if worker.wait_readable(0.0):
                break
        assert worker.receive() == assign(1)
        assert bytes_read < 10_000
        assert bool(slow._sender)


# ------------------------------------------------------------------------------------ broken rules


def test_second_announcement_before_the_first_was_sent_breaks_the_protocol(small):
    peer, worker, _ = small.join()
    announced(small, peer, worker)
    worker.send(REPORT)
    with pytest.raises(ProtocolError, match="a payload was announced before the last one was sent"):
        received(small, peer)


@pytest.mark.parametrize("is_admitted", [False, True])
def test_upload_while_a_gradient_is_awaited_breaks_the_protocol(small, is_admitted):
    peer, worker, _ = small.join()
    announcement = announced(small, peer, worker)
    if is_admitted:
        announcement.admit()
    worker.send(messages.StateUpload(0, b"\x80", True, 64))
    with pytest.raises(ProtocolError, match="a payload was announced before the last one was sent"):
        received(small, peer)


def test_upload_that_does_not_fit_into_memory_breaks_the_protocol(small):
    peer, worker, _ = small.join()
    worker.send(messages.StateUpload(0, b"\x80", True, 2**50))
    with pytest.raises(ProtocolError, match="not enough shared memory for the uploaded state"):
        received(small, peer)


def test_data_that_was_not_asked_for_is_a_loss_with_a_reason(small):
    peer, worker, _ = small.join()
    worker._links[0].sender.add(1, spans_of([torch.zeros(4)]))
    worker.wait_readable(0.0)  # sends it
    assert loss(small, peer) == "payload 1 with a chunk of 16 bytes wasn't expected"


def test_gradient_that_is_sent_before_its_admission_is_a_loss_with_a_reason(small):
    peer, worker, slot = small.join()
    announced(small, peer, worker)
    worker._links[0].sender.add(1, spans_of([weight(slot)]))
    worker.wait_readable(0.0)
    assert loss(small, peer) == "payload 1 with a chunk of 64 bytes wasn't expected"


def test_nothing_is_received_after_the_rules_were_broken(small):
    """What follows could look like a valid chunk."""
    peer, worker, slot = small.join()
    announced(small, peer, worker).admit()
    worker._links[0].sender.add(7, spans_of([weight(slot)]))
    worker._links[0].sender.add(1, spans_of([torch.full((16,), 9.0)]))
    worker.wait_readable(0.0)
    for _ in range(3):
        small.connections.wait(0.01)
    assert loss(small, peer) == "payload 7 with a chunk of 64 bytes wasn't expected"
    assert not weight(peer.delivered(REPORT).slot).any()


def test_gradient_that_the_worker_cancels_by_itself_is_a_loss_with_a_reason(small):
    peer, worker, slot = small.join()
    announced(small, peer, worker).admit()
    worker._links[0].sender.add(1, spans_of([weight(slot)]))
    worker._links[0].sender.cancel(1)
    worker._announced = None
    worker.wait_readable(0.0)
    assert loss(small, peer) == "the worker cancelled payload 1, which the server wants"


# ------------------------------------------------------------------------------------------ states


def test_upload_that_is_never_read_leaves_no_memory_when_the_peer_is_closed(small):
    gc.collect()
    before = uploads_in_memory()  # other tests may still have some
    peer, worker, _ = small.join()
    worker.send(messages.StateUpload(0, b"\x80", True, 4096))
    for ready in pump(small):
        if peer in ready:
            assert list(peer.receive_nowait()) == []
            break
    assert len(uploads_in_memory()) > len(before)
    worker.close()
    small.connections.close(peer)
    del peer, ready
    gc.collect()  # a mapping holds a descriptor until it is collected
    assert uploads_in_memory() == before


def uploads_in_memory():
    folder = Path("/proc/self/fd")
    links = [os.readlink(fd) for fd in folder.iterdir() if fd.is_symlink()]
    return [link for link in links if "paceline-uploaded state" in link]


def test_large_state_travels_in_both_directions(small):
    peer, worker, _ = small.join()
    state = {"a": torch.arange(3 * CHUNK_BYTES // 4).float(), "b": [1, "two"]}
    worker.send_state(0, state, has_begun=True)
    [upload] = received(small, peer, worker)
    found = peer.receive_state(upload)
    assert torch.equal(found["a"], state["a"])
    peer.send_state(state, "state")
    wait_readable(small, worker)
    assert torch.equal(worker.receive_state(worker.receive())["a"], state["a"])


# --------------------------------------------------------------------------------------- the end


def test_reason_is_sent_although_the_worker_is_in_the_middle_of_a_gradient():
    with closing(Tcp(state_of_size(VERY_LARGE).spec)) as tcp:
        peer, worker, _ = tcp.join()
        announced(tcp, peer, worker).admit()
        for _ in pump(tcp, worker):
            if peer._receiver.received_bytes > CHUNK_BYTES:
                break
        tcp.connections.close(peer, "the reason")
        assert worker.receive() == messages.Refused("the reason")
        with pytest.raises(PeerLost):
            worker.receive()
