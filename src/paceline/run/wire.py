# SPDX-License-Identifier: BSD-3-Clause
"""The messages between a worker and the server, and their bytes. No sockets, no pickle.

Theory of operation
    worker                                server
    Hello(nonce)                    ->
                                    <-    Challenge(nonce, proof)      both prove that they know the
    Proof(proof)                    ->                                 token; it never travels
    Join(worker, contents)          ->
                                    <-    Welcome, or Refused(reason)
                                    <-    Work(turn, version, place)   compute at this version
    Gradient(turn) | Abandoned(turn) ->                                it lies in the worker's slot
                                    <-    Work, with the fate of the last one
                                    <-    Cancel(turn)                 at any moment: of no use
                                    <-    PlaceWanted(checkpoint)      likewise: for a checkpoint
    Place(checkpoint)               ->
                                    <-    Over                         the run has ended

Every message is a frozen value, checked field by field as it is read: bytes that are not exactly a
message of the side that is expected raise `ProtocolError`, and nothing else.
"""

import sys
from collections.abc import Callable
from math import prod
from typing import Annotated, Any, Literal

import msgspec

from paceline.core.events import Fate
from paceline.errors import ProtocolError

__all__ = [
    "LARGEST",
    "PROTOCOL",
    "Abandoned",
    "Cancel",
    "Challenge",
    "Contents",
    "FromServer",
    "FromStranger",
    "FromWorker",
    "Gradient",
    "Hello",
    "Join",
    "Missing",
    "OptimizerSpec",
    "Option",
    "Over",
    "Place",
    "PlaceWanted",
    "Proof",
    "Refused",
    "Seen",
    "State",
    "StateGiven",
    "StateWanted",
    "TensorSpec",
    "Welcome",
    "Whole",
    "Work",
    "decode_server",
    "decode_stranger",
    "decode_worker",
    "encode",
]

PROTOCOL = 1

PLACE_BYTES = 1 << 20  # the largest place of a worker in its data
LARGEST = 2**53  # what every number of a message must stay below, so that sums stay exact
Whole = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]  # neither NaN nor infinite
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(max_length=200)]
Scalar = (
    None | bool | int | float | Text | Annotated[tuple[float, ...], msgspec.Meta(max_length=64)]
)


class _Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A value inside a message."""


class TensorSpec(_Part, frozen=True):
    """A tensor that the processes of a run have in common."""

    name: Name
    dtype: Name
    shape: tuple[Whole, ...]
    stride: tuple[Whole, ...]

    def __str__(self) -> str:
        sizes = [max(size, 1) for size in self.shape]
        usual = tuple(prod(sizes[i + 1 :]) for i in range(len(sizes)))
        strides = "" if self.stride == usual else f" with strides {list(self.stride)}"
        return f"{self.name}: {self.dtype}{list(self.shape)}{strides}"


class OptimizerSpec(_Part, frozen=True):
    """An optimizer, and the parameters that it steps."""

    kind: Name
    parameters: tuple[TensorSpec, ...]


class Contents(_Part, frozen=True):
    """Everything that the processes of a run have in common, in the order of the script."""

    optimizers: tuple[OptimizerSpec, ...]
    buffers: tuple[TensorSpec, ...]  # of floating point: averaged over the contributors
    counters: tuple[TensorSpec, ...]  # other buffers: taken from one contributor
    constants: tuple[TensorSpec, ...]  # parameters that no optimizer steps


class Option(_Part, frozen=True):
    """A setting of a parameter group that the script has changed: optimizer, group, name, value."""

    optimizer: Whole
    group: Whole
    name: Name
    value: Scalar


class _Message(_Part, frozen=True, tag=0):
    """A whole message; its tag is its number."""


class Hello(_Message, tag=1, frozen=True):
    """A stranger begins."""

    protocol: Whole
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
    contents: Contents


class Welcome(_Message, tag=5, frozen=True):
    """The worker is in. With it come its slot and the constants."""

    workers: Whole
    slow: Text  # the latency to inject; "" for none
    seed: Whole
    requeue: bool
    averages: bool  # whether the server keeps a moving average of the weights
    saves: bool = False  # whether the server makes checkpoints
    place: Annotated[bytes, msgspec.Meta(max_length=PLACE_BYTES)] = b""  # where to go on; "": anew


class Refused(_Message, tag=6, frozen=True):
    """The server will not have this peer, and says why."""

    reason: str


class Seen(_Part, frozen=True):
    """What became of the worker's last gradient."""

    fate: Fate
    version: Whole  # that it was computed at
    staleness: Whole
    contributors: Whole  # in the update that it went into; 0: none, or not made yet


class Work(_Message, tag=7, frozen=True):
    """Compute a gradient at this version, which lies in this place. A new place comes with it."""

    turn: Whole
    version: Whole
    place: Whole
    place_is_new: bool
    steps: tuple[Whole, ...]  # how often each optimizer has stepped
    asked_at: Amount  # by the clock of the server's machine: time.monotonic()
    options: tuple[Option, ...] = ()  # those that this worker does not know yet
    seen: Seen | None = None
    place_wanted: Whole = 0  # for the checkpoint of this number; 0: it is not


class Cancel(_Message, tag=8, frozen=True):
    """What you compute is of no use any more."""

    turn: Whole


class Over(_Message, tag=9, frozen=True):
    """The run has ended; the last version lies in this place."""

    version: Whole
    place: Whole
    place_is_new: bool
    steps: tuple[Whole, ...]
    seen: Seen | None = None
    place_wanted: Whole = 0  # for the checkpoint of this number; 0: it is not


class Gradient(_Message, tag=10, frozen=True):
    """The gradient of this turn is whole. It lies in the slot, unless it was cancelled."""

    turn: Whole
    version: Whole
    optimizer: Whole
    samples: Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
    compute_s: Amount
    sq_norm: Amount | None  # None iff it is not finite, or was cancelled and so not looked at
    unused: tuple[Whole, ...] = ()  # parameters of the optimizer that have no gradient
    options: tuple[Option, ...] = ()
    scalars: dict[Name, float] = {}  # what the script logged
    cancelled: bool = False


class Abandoned(_Message, tag=11, frozen=True):
    """The gradient of this turn was given up."""

    turn: Whole
    compute_s: Amount
    version: Whole = 0  # that it was to be computed at
    options: tuple[Option, ...] = ()


class StateWanted(_Message, tag=12, frozen=True):
    """Give me the state of an optimizer, or the average of the weights."""

    what: Literal["optimizer", "average"]
    optimizer: Whole = 0


class StateGiven(_Message, tag=13, frozen=True):
    """Load this state into an optimizer. The tensors come with it, and an empty State answers."""

    optimizer: Whole
    tree: bytes
    has_begun: bool = True  # the script has made a step; one that has not may only come late


class State(_Message, tag=14, frozen=True):
    """What was asked for. A tree of so many bytes comes with it, and its tensors."""

    tree_bytes: Whole  # 0: nothing comes, for a state was given and is loaded


class Missing(_Message, tag=15, frozen=True):
    """The launcher will not start this worker again: nobody need wait for it."""

    worker: Annotated[int, msgspec.Meta(ge=0, le=999_999)]
    reason: Text


class PlaceWanted(_Message, tag=16, frozen=True):
    """A checkpoint is made: tell where the work that you have began."""

    checkpoint: Whole  # its number in the life of this server


class Place(_Message, tag=17, frozen=True):
    """Where this worker was in its data, and in its random numbers, when its work began."""

    checkpoint: Whole  # that it was asked for
    place: Annotated[bytes, msgspec.Meta(max_length=PLACE_BYTES)]


FromStranger = Hello | Proof
FromWorker = Join | Gradient | Abandoned | StateWanted | StateGiven | Missing | Place
FromServer = Challenge | Welcome | Refused | Work | Cancel | Over | State | PlaceWanted


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
