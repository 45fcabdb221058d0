# SPDX-License-Identifier: BSD-3-Clause
"""The messages between the head and the other servers of a run.

Theory of operation
    other server                          head
    JoinAsServer(number, address)   ->                                 after the same handshake as
                                    <-    ServerWelcome                a worker's
                                    <-    LoadPart, StateReply         its part of the parameters
                                    <-    OpenPeer(peer, session)      a worker joins: wait for its
    PeerOpened(peer)                ->                                 data connection
                                    <-    AddReader, PublishPart       send a part of a version
                                    <-    ExpectPart(peer, payload)    a gradient was admitted
    PartArrived(peer, payload)      ->                                 all of its part is here
                                    <-    AddPart(update, worker)      it was accepted
                                    <-    ReducePart(decided)          the update is decided
    PartReduced(update, squares)    ->
                                    <-    StepUpdate(update, scale)      make the version
                                    <-    StopPart, SkipPart           a turn won't count
    PartMoved(peer)                 ->                                 its bytes so far
                                    <-    CollectPart                  for a checkpoint, for example
    StateUpload                     ->
                                    <-    RunOver

    The head decides everything. The other servers do what it says, in the order in which it says
    it, so all servers make each update of the same gradients.

A peer is a worker's connection, which the head has numbered.
"""

from typing import Annotated

import msgspec

from paceline.run.net.connection_messages import Message, Session
from paceline.run.settings import WireFormat
from paceline.run.tensors.state_spec import Count, Name, OptionChange, StateSpec, Text

__all__ = [
    "AddPart",
    "AddReader",
    "Blamed",
    "ClosePeer",
    "CollectPart",
    "ExpectPart",
    "FindBlame",
    "FromOtherServer",
    "JoinAsServer",
    "LoadOptimizerPart",
    "LoadPart",
    "OpenPeer",
    "PartArrived",
    "PartLost",
    "PartMoved",
    "PartReduced",
    "PeerOpened",
    "PublishPart",
    "ReducePart",
    "ReleaseSlot",
    "RemoveReader",
    "RunOver",
    "ServerFailed",
    "ServerWelcome",
    "SkipPart",
    "SkipUpdate",
    "StepUpdate",
    "StopPart",
    "SumEarly",
    "ToOtherServer",
]

Number = Annotated[int, msgspec.Meta(ge=0, le=999_999)]
Factor = Annotated[float, msgspec.Meta(ge=0)]


class JoinAsServer(Message, tag=30, frozen=True):
    """Ask to be one of the servers of the run."""

    number: Number  # from 1 on; the head is 0
    release: Name  # of Paceline
    spec: StateSpec
    is_split: tuple[bool, ...]  # which optimizers work element by element
    address: Text  # where it listens for data connections


class ServerWelcome(Message, tag=31, frozen=True):
    """Accept the server into the run."""

    servers: Count
    ema: Factor | None  # decay of the moving average of the weights
    versions_kept: Count
    is_apart: bool  # workers may read the parameters of each optimizer from another version
    wire: WireFormat
    wire_parameters: WireFormat


class LoadPart(Message, tag=32, frozen=True):
    """Continue from the state in the StateReply that follows."""

    version: Count


class OpenPeer(Message, tag=33, frozen=True):
    """Make a slot for a worker or the agent of a host, and expect its data connection."""

    peer: Count
    worker: Number | None  # None: it is an agent
    session: Session


class ClosePeer(Message, tag=34, frozen=True):
    """Close the data connection of a worker that is gone."""

    peer: Count


class PublishPart(Message, tag=35, frozen=True):
    """Send a version to a worker."""

    peer: Count
    payload: Count
    version: Count
    optimizer: Count | None  # send only its parameters; None: all
    is_last: bool  # the run has ended; the last version is never rounded


class StopPart(Message, tag=36, frozen=True):
    """Send nothing more of a payload."""

    peer: Count
    payload: Count


class ExpectPart(Message, tag=37, frozen=True):
    """Receive a gradient from a worker."""

    peer: Count
    payload: Count
    optimizer: Count


class SkipPart(Message, tag=38, frozen=True):
    """Don't receive this gradient any more."""

    peer: Count
    payload: Count


class AddReader(Message, tag=39, frozen=True):
    """Keep a version unchanged: a worker computes with it."""

    worker: Number
    version: Count
    optimizer: Count | None  # it reads only these parameters from it; None: all


class RemoveReader(Message, tag=40, frozen=True):
    """Note that a worker no longer computes with its version."""

    worker: Number
    optimizer: Count | None  # it still reads the parameters of the others; None: none


class AddPart(Message, tag=41, frozen=True):
    """Use a worker's gradient for an update: it was accepted."""

    update: Count
    worker: Number
    optimizer: Count
    samples: Count
    scale: Factor
    unused: tuple[Count, ...]  # parameters of the optimizer that have no gradient
    host: Count | None = None  # the peer in whose slot it is part of a sum; None: it is in its own
    is_in_sum: bool = False  # that sum was added with the gradient of another worker


class SumEarly(Message, tag=42, frozen=True):
    """Add the gradients of workers below `limit` to the sum of an update that isn't due."""

    update: Count
    limit: Factor


class ReleaseSlot(Message, tag=43, frozen=True):
    """Add what is still in a worker's slot to its sum, because the slot is needed."""

    worker: Number


class ReducePart(Message, tag=44, frozen=True):
    """Average the gradients of an update as it was decided, and measure the average."""

    update: Count
    workers: tuple[Number, ...]  # of each contribution
    samples: tuple[Count, ...]
    weights: tuple[Factor, ...]
    scales: tuple[Factor, ...]


class StepUpdate(Message, tag=45, frozen=True):
    """Step the optimizers along the average, times `scale`, and make the new version."""

    update: Count
    scale: Factor
    options: tuple[OptionChange, ...]  # that have changed since the last step


class SkipUpdate(Message, tag=46, frozen=True):
    """Make the new version without a step."""

    update: Count


class FindBlame(Message, tag=47, frozen=True):
    """Find out which gradients of an update aren't finite."""

    update: Count


class CollectPart(Message, tag=48, frozen=True):
    """Ask for the parameters, their averages and the states of optimizers."""


class LoadOptimizerPart(Message, tag=49, frozen=True):
    """Load the state in the StateReply that follows into an optimizer."""

    optimizer: Count


class RunOver(Message, tag=50, frozen=True):
    """Exit: the run has ended, and everything is saved."""


class PartReduced(Message, tag=51, frozen=True):
    """Answer a ReducePart."""

    update: Count
    squares: dict[Count, tuple[tuple[float, ...], ...]]  # by optimizer, flat tensor and block


class PartArrived(Message, tag=52, frozen=True):
    """Report that all of a worker's gradient has arrived."""

    peer: Count
    payload: Count
    to_worker: Count  # bytes moved since the last report
    to_server: Count


class PartLost(Message, tag=53, frozen=True):
    """Report that the data connection of a worker is gone."""

    peer: Count
    reason: Text


class Blamed(Message, tag=54, frozen=True):
    """Answer a FindBlame."""

    update: Count
    workers: tuple[Number, ...]


class ServerFailed(Message, tag=55, frozen=True):
    """Report an error of the script's optimizer, for example: the run can't go on."""

    reason: Text


class PeerOpened(Message, tag=56, frozen=True):
    """Answer an OpenPeer."""

    peer: Count
    failure: Text  # why there is no slot for the worker; empty: there is one


class PartMoved(Message, tag=57, frozen=True):
    """Report the bytes that were moved for a turn that has ended before its gradient arrived."""

    peer: Count
    to_worker: Count  # since the last report
    to_server: Count


FromOtherServer = (
    JoinAsServer
    | PartReduced
    | PartArrived
    | PartLost
    | Blamed
    | ServerFailed
    | PeerOpened
    | PartMoved
)
ToOtherServer = (
    ServerWelcome
    | LoadPart
    | OpenPeer
    | ClosePeer
    | PublishPart
    | StopPart
    | ExpectPart
    | SkipPart
    | AddReader
    | RemoveReader
    | AddPart
    | SumEarly
    | ReleaseSlot
    | ReducePart
    | StepUpdate
    | SkipUpdate
    | FindBlame
    | CollectPart
    | LoadOptimizerPart
    | RunOver
)
