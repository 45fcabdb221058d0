# SPDX-License-Identifier: BSD-3-Clause
"""The messages between a worker and the server, and their bytes. No sockets, no pickle.

Theory of operation
    worker                                server
    Hello(nonce)                    ->
                                    <-    Challenge(nonce, proof)      both prove that they know the
    Proof(proof)                    ->                                 token; it never travels
    Join(worker, contents)          ->
                                    <-    Welcome, or Refused(reason)
                                    <-    Assignment(turn, version)    compute at this version
    GradientReport | AbandonReport  ->                                 it lies in the worker's slot
                                    <-    Assignment, with the fate of the last one
                                    <-    CancelTurn(turn)             at any moment: of no use
                                    <-    PositionRequest(checkpoint)  likewise: for a checkpoint
    PositionReport(checkpoint)      ->
                                    <-    RunEnded                     the run has ended

Every message is a frozen value, checked field by field as it is read: bytes that are not exactly a
message of the side that is expected raise `ProtocolError`, and nothing else.
"""

import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from paceline.core.events import Fate
from paceline.errors import ProtocolError
from paceline.run.tensors.state_spec import (
    LARGEST,
    Count,
    MessagePart,
    Name,
    OptionChange,
    StateSpec,
    Text,
)

__all__ = [
    "PROTOCOL",
    "AbandonReport",
    "Assignment",
    "CancelTurn",
    "Challenge",
    "FateNotice",
    "FromServer",
    "FromStranger",
    "FromWorker",
    "GradientReport",
    "Hello",
    "Join",
    "PositionReport",
    "PositionRequest",
    "Proof",
    "Refused",
    "RunEnded",
    "StateReply",
    "StateRequest",
    "StateUpload",
    "Welcome",
    "WorkerUnavailable",
    "decode_server",
    "decode_stranger",
    "decode_worker",
    "encode",
]

PROTOCOL = 1

POSITION_BYTES = 1 << 20  # the largest place of a worker in its data
Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]  # neither NaN nor infinite
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class _Message(MessagePart, frozen=True, tag=0):
    """A whole message; its tag is its number."""


class Hello(_Message, tag=1, frozen=True):
    """A stranger begins."""

    protocol: Count
    nonce: Nonce


class Challenge(_Message, tag=2, frozen=True):
    """The server proves that it knows the token, and asks for the same."""

    nonce: Nonce
    proof: Nonce


class Proof(_Message, tag=3, frozen=True):
    """The stranger proves that it knows the token."""

    proof: Nonce


class Join(_Message, tag=4, frozen=True):
    """A worker wants to take part."""

    worker: Annotated[int, msgspec.Meta(ge=0, le=999_999)]
    release: Name  # of Paceline
    contents: StateSpec


class Welcome(_Message, tag=5, frozen=True):
    """The worker is in. With it come its slot and the constants."""

    workers: Count
    slow: Text  # the latency to inject; "" for none
    seed: Count
    requeue: bool
    averages: bool  # whether the server keeps a moving average of the weights
    saves: bool = False  # whether the server makes checkpoints
    place: Annotated[bytes, msgspec.Meta(max_length=POSITION_BYTES)] = (
        b""  # where to go on; "": anew
    )


class Refused(_Message, tag=6, frozen=True):
    """The server will not have this peer, and says why."""

    reason: str


class FateNotice(MessagePart, frozen=True):
    """What became of the worker's last gradient."""

    fate: Fate
    version: Count  # that it was computed at
    staleness: Count
    contributors: Count  # in the update that it went into; 0: none, or not made yet


class Assignment(_Message, tag=7, frozen=True):
    """Compute a gradient at this version, which lies in this place. A new place comes with it."""

    turn: Count
    version: Count
    place: Count
    place_is_new: bool
    steps: tuple[Count, ...]  # how often each optimizer has stepped
    asked_at: Amount  # by the clock of the server's machine: time.monotonic()
    options: tuple[OptionChange, ...] = ()  # those that this worker does not know yet
    seen: FateNotice | None = None
    place_wanted: Count = 0  # for the checkpoint of this number; 0: it is not


class CancelTurn(_Message, tag=8, frozen=True):
    """What you compute is of no use any more."""

    turn: Count


class RunEnded(_Message, tag=9, frozen=True):
    """The run has ended; the last version lies in this place."""

    version: Count
    place: Count
    place_is_new: bool
    steps: tuple[Count, ...]
    seen: FateNotice | None = None
    place_wanted: Count = 0  # for the checkpoint of this number; 0: it is not


class GradientReport(_Message, tag=10, frozen=True):
    """The gradient of this turn is whole. It lies in the slot, unless it was cancelled."""

    turn: Count
    version: Count
    optimizer: Count
    samples: Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
    compute_s: Amount
    sq_norm: Amount | None  # None iff it is not finite, or was cancelled and so not looked at
    unused: tuple[Count, ...] = ()  # parameters of the optimizer that have no gradient
    options: tuple[OptionChange, ...] = ()
    scalars: dict[Name, float] = msgspec.field(default_factory=dict)  # what the script logged
    cancelled: bool = False


class AbandonReport(_Message, tag=11, frozen=True):
    """The gradient of this turn was given up."""

    turn: Count
    compute_s: Amount
    version: Count = 0  # that it was to be computed at
    options: tuple[OptionChange, ...] = ()


class StateRequest(_Message, tag=12, frozen=True):
    """Give me the state of an optimizer, or the average of the weights."""

    what: Literal["optimizer", "average"]
    optimizer: Count = 0


class StateUpload(_Message, tag=13, frozen=True):
    """Load this state into an optimizer. The tensors come with it; an empty StateReply answers."""

    optimizer: Count
    tree: bytes
    has_begun: bool = True  # the script has made a step; one that has not may only come late


class StateReply(_Message, tag=14, frozen=True):
    """What was asked for. A tree of so many bytes comes with it, and its tensors."""

    tree_bytes: Count  # 0: nothing comes, for a state was given and is loaded


class WorkerUnavailable(_Message, tag=15, frozen=True):
    """The launcher will not start this worker again: nobody need wait for it."""

    worker: Annotated[int, msgspec.Meta(ge=0, le=999_999)]
    reason: Text


class PositionRequest(_Message, tag=16, frozen=True):
    """A checkpoint is made: tell where the work that you have began."""

    checkpoint: Count  # its number in the life of this server


class PositionReport(_Message, tag=17, frozen=True):
    """Where this worker was in its data, and in its random numbers, when its work began."""

    checkpoint: Count  # that it was asked for
    place: Annotated[bytes, msgspec.Meta(max_length=POSITION_BYTES)]


FromStranger = Hello | Proof
FromWorker = (
    Join
    | GradientReport
    | AbandonReport
    | StateRequest
    | StateUpload
    | WorkerUnavailable
    | PositionReport
)
FromServer = (
    Challenge
    | Welcome
    | Refused
    | Assignment
    | CancelTurn
    | RunEnded
    | StateReply
    | PositionRequest
)


def _decoder(kind: Any, whose: str) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(body: bytes) -> Any:
        try:
            return decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"expected a message of a {whose}: {error}") from None

    return checked


encode = msgspec.msgpack.Encoder().encode
decode_stranger: Callable[[bytes], FromStranger] = _decoder(FromStranger, "stranger")
decode_worker: Callable[[bytes], FromWorker] = _decoder(FromWorker, "worker")
decode_server: Callable[[bytes], FromServer] = _decoder(FromServer, "server")
