# SPDX-License-Identifier: BSD-3-Clause
"""A server's end of a data connection to a worker.

`TcpPeer` adds the control connection, which only the head has. `PartPeer` is the end of any other
server: the head tells it what to send and what to expect.
"""

from collections import deque
from collections.abc import Callable

from paceline.errors import PeerLost, ProtocolError
from paceline.run.net.data_socket import ByteStream, receive_payloads, send_payloads
from paceline.run.net.payload_stream import Arrival, PayloadReceiver, PayloadSender, Span
from paceline.run.net.transport import Moved
from paceline.run.net.wire_format import codec_for
from paceline.run.settings import WireFormat

__all__ = ["DataPeer", "PartPeer"]


class DataPeer:
    """A server's end of a data connection, which is attached some time after the peer is made."""

    def __init__(self) -> None:
        self._stream: ByteStream | None = None  # not None iff the data connection is attached
        self._sender = PayloadSender()
        self._receiver = PayloadReceiver()
        self._moved = Moved()
        self._lost_by = ""  # why the data connection is gone
        self.on_changed: Callable[[], None] = lambda: None
        """Called when there is more to send or to receive: see `has_unsent` and `is_receiving`."""

    def attach(self, stream: ByteStream) -> None:
        """Use this data connection, which has proved that it belongs to the session."""
        self._stream = stream

    @property
    def is_attached(self) -> bool:
        """Whether it has its data connection."""
        return self._stream is not None

    @property
    def has_unsent(self) -> bool:
        """Whether to call `send_data` when the data connection takes more."""
        return bool(self._sender) and not self._lost_by

    @property
    def is_receiving(self) -> bool:
        """Whether to call `receive_data` when something has arrived."""
        return True

    @property
    def has_arrived(self) -> bool:
        """Whether the owner doesn't know yet what has arrived, or that the connection is lost."""
        return self._lost_by != ""

    def send_data(self) -> None:
        """Send what the data connection takes."""
        if self._stream is not None and not self._lost_by:
            try:
                send_payloads(self._stream, self._sender)
            except PeerLost as error:
                self._lost_by = str(error)

    def receive_data(self) -> None:
        """Receive what has arrived on the data connection."""
        assert self._stream is not None
        if self._lost_by:
            return
        try:
            for arrival in receive_payloads(self._stream, self._receiver):
                self._take(arrival)
                if not self.is_receiving:
                    return
        except (PeerLost, ProtocolError) as error:
            self._lost_by = str(error)

    def _take(self, arrival: Arrival) -> None:
        if arrival.is_complete:
            self._on_arrival(arrival.number)
        else:
            self._on_cancelled(arrival.number)

    def _on_arrival(self, payload: int) -> None:
        raise NotImplementedError

    def _on_cancelled(self, payload: int) -> None:
        """Called if the other side has cancelled a payload that is still wanted."""
        raise ProtocolError(f"the worker cancelled payload {payload}, which the server wants")

    def _send_payload(self, number: int, spans: list[Span]) -> None:
        self._sender.add(number, spans)
        self.send_data()
        if self.has_unsent or self._lost_by:
            self.on_changed()

    def take_moved(self) -> Moved:
        """Return how many bytes were moved since the last call."""
        now = Moved(self._sender.sent_bytes, self._receiver.received_bytes)
        before, self._moved = self._moved, now
        return Moved(now.to_worker - before.to_worker, now.to_server - before.to_server)

    def close(self) -> None:
        """Close the data connection."""
        if self._stream is not None:
            self._stream.close()


class PartPeer(DataPeer):
    """The end of a server that isn't the head."""

    def __init__(
        self, wire: WireFormat, wire_parameters: WireFormat, *, is_agent: bool = False
    ) -> None:
        """`is_agent`: the other side is the agent of a host, which may cancel a sum."""
        super().__init__()
        self._is_agent = is_agent
        self._sender.codec = codec_for(wire_parameters)
        self._receiver.codec = codec_for(wire)
        self._arrived: deque[int] = deque()  # payloads that are complete

    @property
    def is_receiving(self) -> bool:
        """Whether a payload is expected: the head says where the next one belongs."""
        return self._receiver.is_expecting

    @property
    def has_arrived(self) -> bool:
        """Whether a payload has arrived that wasn't taken, or the connection is lost."""
        return bool(self._arrived) or super().has_arrived

    def send(self, payload: int, spans: list[Span]) -> None:
        """Send a payload."""
        self._send_payload(payload, spans)

    def stop(self, payload: int) -> None:
        """Send nothing more of a payload."""
        self._sender.cancel(payload)

    def expect(self, payload: int, spans: list[Span]) -> None:
        """Receive a payload into this memory."""
        self._receiver.expect(payload, spans)
        self.on_changed()

    def skip(self, payload: int) -> None:
        """Don't receive this payload any more."""
        if payload in self._arrived:
            self._arrived.remove(payload)
        self._receiver.skip()
        self.on_changed()

    def _on_arrival(self, payload: int) -> None:
        self._arrived.append(payload)
        self.on_changed()

    def _on_cancelled(self, payload: int) -> None:
        if not self._is_agent:  # an agent tells the head why
            super()._on_cancelled(payload)

    def take_arrived(self) -> list[int]:
        """Return the payloads that have arrived; raises PeerLost if the connection is lost."""
        found = list(self._arrived)
        self._arrived.clear()
        if not found and self._lost_by:
            raise PeerLost(self._lost_by)
        return found
