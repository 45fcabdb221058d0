# SPDX-License-Identifier: BSD-3-Clause
"""The messages between a worker (or the launcher) and the server, and their bytes.

Theory of operation
    worker                                server
    Hello(nonce)                    ->
                                    <-    Challenge(nonce, proof)      both prove that they know the
    Proof(proof, kind)              ->                                 token, which is never sent
    Join(worker, spec)              ->
                                    <-    Welcome, or Refused(reason)
                                    <-    Assignment(turn, version)    compute at this version
    GradientReport | AbandonReport  ->                                 the gradient is in the slot
                                    <-    Assignment, with the fate of the last gradient
                                    <-    CancelTurn(turn)             at any time: it won't count
    LeaseRequest(stream)            ->                                 it needs one more batch
                                    <-    LeaseReply(lease)
    BatchesReturned(use)            ->                                 at any time, unanswered
                                    <-    PositionRequest(checkpoint)  at any time: for a checkpoint
    PositionReport(checkpoint)      ->
    StopRun                         ->                                 the script called run.stop()
                                    <-    RunEnded
    ScriptEnded                     ->                                 instead of just leaving

    launcher                              server
    Watch(request)                  ->                                 after the same handshake
                                    <-    RunProgress(request)         now, or when there is news
    WorkerUnavailable(worker)       ->                                 it won't be restarted

    The module `connection_messages` has the messages of the handshake, and those that a transport
    sends for its own use and handles itself; `number_messages` has those about the numbers of
    workers, `server_messages` those between servers, `host_messages` those with agents of hosts.

Every message is a frozen value whose fields are validated when it is decoded. Bytes that aren't
exactly one message of the expected sender raise `ProtocolError`. No sockets, no pickle.
"""

import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from paceline.core.events import Fate
from paceline.errors import ProtocolError
from paceline.leases import Use
from paceline.run.net.connection_messages import (
    BufferShared,
    Challenge,
    DataAttached,
    Hello,
    Message,
    Proof,
    Refused,
    SendPayload,
    Session,
    SlotShared,
    StopPayload,
)
from paceline.run.net.host_messages import FromHost, ToHost
from paceline.run.net.number_messages import (
    AboutHosts,
    LeaveRun,
    NumberReserved,
    ReserveNumber,
    Seat,
    ToHosts,
    WorkerNumber,
)
from paceline.run.net.server_messages import FromOtherServer, ToOtherServer
from paceline.run.settings import WireFormat
from paceline.run.tensors.state_spec import (
    LARGEST,
    Count,
    MessagePart,
    Name,
    OptionChange,
    SchedulerCalls,
    StateSpec,
    Text,
)

__all__ = [
    "PROTOCOL",
    "AbandonReport",
    "Assignment",
    "BatchesReturned",
    "BufferShared",
    "CancelTurn",
    "Challenge",
    "DataAttached",
    "FateNotice",
    "FromServer",
    "FromStranger",
    "FromWorker",
    "GradientReport",
    "Hello",
    "Join",
    "LeaseReply",
    "LeaseRequest",
    "LeaveRun",
    "NumberReserved",
    "PositionReport",
    "PositionRequest",
    "Proof",
    "Refused",
    "ReserveNumber",
    "RunEnded",
    "RunProgress",
    "ScriptEnded",
    "SendPayload",
    "SlotShared",
    "StateReply",
    "StateRequest",
    "StateUpload",
    "StopPayload",
    "StopRun",
    "Watch",
    "Welcome",
    "WorkerUnavailable",
    "decode_server",
    "decode_stranger",
    "decode_worker",
    "encode",
]

PROTOCOL = 6

POSITION_BYTES = 1 << 20  # the largest encoded position of a worker in its data
Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]  # neither NaN nor infinite
EncodedPosition = Annotated[bytes, msgspec.Meta(max_length=POSITION_BYTES)]


class Join(Message, tag=4, frozen=True):
    """Ask to take part in the run as this worker."""

    worker: WorkerNumber
    release: Name  # of Paceline
    spec: StateSpec
    ahead: tuple[Count, ...] = ()  # batches of each stream that it wants to hold
    session: Session = b""
    """Identifies the process, which may connect again before its old connection is closed."""
    seat: Seat = b""  # for which its launcher has reserved the number; empty: it hasn't


class Welcome(Message, tag=5, frozen=True):
    """Accept the worker into the run."""

    workers: Count
    latency: Text  # the latency to inject; "" for none
    seed: Count
    requeue: bool
    averages: bool  # whether the server keeps a moving average of the weights
    saves: bool = False  # whether the server makes checkpoints
    position: EncodedPosition = b""  # where to continue in the data; empty: at the beginning
    shares: Count = 1  # into which an epoch is divided; late workers' gradients don't count
    wire: WireFormat = "exact"  # how to send gradients, if memory isn't shared
    wire_parameters: WireFormat = "exact"  # how parameters are sent, if memory isn't shared
    worker: WorkerNumber = 0
    servers: tuple[Text, ...] = ()  # the addresses of the other servers, which have their parts
    is_split: tuple[bool, ...] = ()  # whether they share the parameters of each optimizer


class FateNotice(MessagePart, frozen=True):
    """The fate of the worker's last gradient."""

    fate: Fate
    version: Count  # it was computed at this version
    staleness: Count
    contributors: Count  # in the update that it went into; 0: none, or the update isn't made yet


class Assignment(Message, tag=7, frozen=True):
    """Compute a gradient at this version of the parameters, which is in this buffer."""

    turn: Count
    version: Count
    buffer: Count
    scheduler_steps: tuple[Count, ...]  # that each scheduler has made
    asked_at: Amount  # time.monotonic() on the server's host
    optimizer: Count | None = None  # load only its parameters; None: load all
    options: tuple[OptionChange, ...] = ()  # those that this worker doesn't know yet
    notice: FateNotice | None = None
    position_wanted: Count = 0  # the checkpoint that needs the worker's position; 0: none
    epochs: dict[Count, float] = msgspec.field(default_factory=dict)  # passed to these schedulers
    stream_samples: tuple[Count, ...] = ()  # of each stream that are done
    leases: tuple[Use, ...] = ()  # more batches for this worker
    forget_leases: bool = False  # it no longer holds any of those that it got before


class CancelTurn(Message, tag=8, frozen=True):
    """Stop computing this turn's gradient: it won't count."""

    turn: Count


class RunEnded(Message, tag=9, frozen=True):
    """The run has ended; its last version is in this buffer."""

    version: Count
    buffer: Count
    scheduler_steps: tuple[Count, ...]
    notice: FateNotice | None = None
    position_wanted: Count = 0  # the checkpoint that needs the worker's position; 0: none
    epochs: dict[Count, float] = msgspec.field(default_factory=dict)  # as in an Assignment
    stream_samples: tuple[Count, ...] = ()  # of each stream that are done


class GradientReport(Message, tag=10, frozen=True):
    """Announce this turn's gradient. It is in the slot, unless the turn was cancelled."""

    turn: Count
    version: Count
    optimizer: Count
    samples: Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
    compute_s: Amount
    sq_norm: Amount | None  # None: not finite, or not measured because the turn was cancelled
    unused: tuple[Count, ...] = ()  # parameters of the optimizer that have no gradient
    options: tuple[OptionChange, ...] = ()
    scalars: dict[Name, float] = msgspec.field(default_factory=dict)  # logged by the script
    cancelled: bool = False
    schedulers: tuple[SchedulerCalls, ...] = ()
    uses: tuple[Use, ...] = ()  # the batches that it was computed on
    new_samples: Count | None = None  # that no accepted gradient used before; None: all
    pulled: tuple[Count, ...] = ()  # leases of each stream that were used up since the last report
    cpu_s: Amount = 0  # processor time of the worker's process since its last report


class AbandonReport(Message, tag=11, frozen=True):
    """Report that this turn's gradient was abandoned before it was complete."""

    turn: Count
    compute_s: Amount
    version: Count = 0  # it would have been computed at this version
    options: tuple[OptionChange, ...] = ()
    optimizer: Count = 0
    schedulers: tuple[SchedulerCalls, ...] = ()
    pulled: tuple[Count, ...] = ()  # leases of each stream that were used up since the last report
    cpu_s: Amount = 0  # processor time of the worker's process since its last report


class StateRequest(Message, tag=12, frozen=True):
    """Ask for the state of an optimizer, or for the moving average of the weights."""

    what: Literal["optimizer", "average"]
    optimizer: Count = 0


class StateUpload(Message, tag=13, frozen=True):
    """Load this state into an optimizer; an empty StateReply confirms it."""

    optimizer: Count
    tree: bytes
    has_begun: bool = True  # False: this worker hasn't stepped yet, so it may be late
    data_bytes: Count = 0  # size of its payload; 0: it has none, because memory is shared


class StateReply(Message, tag=14, frozen=True):
    """Answer a StateRequest, a StateUpload, a StopRun or a LeaveRun."""

    tree_bytes: Count  # size of the state that comes with it; 0: only a StateRequest gets one
    data_bytes: Count = 0  # size of its tensors in the payload; 0: memory is shared


class WorkerUnavailable(Message, tag=15, frozen=True):
    """Tell the server that the launcher won't start this worker again."""

    worker: WorkerNumber
    reason: Text
    has_completed: bool = False  # its script ended with exit code 0


class PositionRequest(Message, tag=16, frozen=True):
    """Ask for the worker's position at the beginning of its current turn, for a checkpoint."""

    checkpoint: Count  # numbered from the start of this server


class PositionReport(Message, tag=17, frozen=True):
    """Report the worker's position in its data and random numbers when its turn began."""

    checkpoint: Count  # the one it was asked for
    position: EncodedPosition


class Watch(Message, tag=20, frozen=True):
    """Ask for one report on the progress of the run."""

    request: Count  # a number for the reply
    waits: bool  # until there is news; otherwise the reply comes immediately


class RunProgress(Message, tag=21, frozen=True):
    """Report the progress of the run to the launcher; the end is reported without a request."""

    request: Count  # the one that this answers; 0: none
    version: Count
    accepted: dict[WorkerNumber, Count]  # gradients of each worker since this server started
    here: tuple[WorkerNumber, ...]
    left: dict[WorkerNumber, Count]  # workers that left before the end, and at which version
    is_over: bool  # the last update is made, or the run was stopped
    have_scripts_ended: bool  # worker 0, or every worker, had ended its script before the stop
    ended_at: Count | None = None  # the last version; not None iff everything is written
    end_reason: Text = ""  # "finished", "stopped", or why the run failed
    is_saving: bool = False  # the server writes the result, and doesn't answer meanwhile
    is_told: bool = False  # workers have been told of the end
    computing: dict[WorkerNumber, Amount] = msgspec.field(default_factory=dict)
    """After the last update: workers whose turn isn't over, and how long their longest one took."""
    waiting_s: dict[WorkerNumber, Amount] = msgspec.field(default_factory=dict)
    """For which workers the run has been waiting for unusually long, and for how long."""


class StopRun(Message, tag=22, frozen=True):
    """End the run for all workers, because the script called `run.stop()`.

    An empty StateReply follows the RunEnded.
    """


class ScriptEnded(Message, tag=23, frozen=True):
    """Leave the run, because the script ended with exit code 0; worker 0 ends the run with it."""


class LeaseRequest(Message, tag=24, frozen=True):
    """Ask for one more batch of a stream, because the worker holds none."""

    stream: Count


class LeaseReply(Message, tag=25, frozen=True):
    """Lease a batch to the worker."""

    lease: Use
    stream_samples: tuple[Count, ...]


class BatchesReturned(Message, tag=26, frozen=True):
    """End the leases of batches that no accepted gradient was computed on."""

    use: Use
    skipped: bool = False  # the script wants no step on them; otherwise lease them again


FromStranger = Hello | Proof
FromWorker = (
    Join
    | GradientReport
    | AbandonReport
    | StateRequest
    | StateUpload
    | WorkerUnavailable
    | PositionReport
    | Watch
    | StopRun
    | ScriptEnded
    | LeaseRequest
    | BatchesReturned
    | AboutHosts
    | FromOtherServer
    | FromHost
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
    | SlotShared
    | BufferShared
    | RunProgress
    | LeaseReply
    | SendPayload
    | StopPayload
    | DataAttached
    | ToHosts
    | ToOtherServer
    | ToHost
)


def _decoder(kind: Any, sender: str) -> Callable[[bytes], Any]:
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(body: bytes) -> Any:
        try:
            return decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"expected a message from {sender}: {error}") from None

    return checked


encode = msgspec.msgpack.Encoder().encode
decode_stranger: Callable[[bytes], FromStranger] = _decoder(
    FromStranger, "an unauthenticated client"
)
decode_worker: Callable[[bytes], FromWorker] = _decoder(FromWorker, "a worker")
decode_server: Callable[[bytes], FromServer] = _decoder(FromServer, "the server")
