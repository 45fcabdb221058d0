# SPDX-License-Identifier: BSD-3-Clause
"""The messages between the servers of a run and the agent of a host.

Theory of operation
    agent                                 head
    JoinAsHost(spec)                ->                                 after a worker's handshake
                                    <-    HostWelcome(servers)
                                    <-    HostVersion(payload)         a version that workers want
                                    <-    SendSum(payload, workers)    their gradients are admitted
    the sum of these gradients      ->                                 to every server
                                    <-    StopPayload(payload)         the sum is no longer wanted
    SumSpoiled(payload, workers)    ->                                 some of them aren't finite

    An agent serves the workers of one host through shared memory. Each of its workers also has a
    control connection from the agent to the head, which carries the same messages as that of a
    worker without an agent. Only versions and gradients go through the agent's own connections:
    a version once for all of its workers, and the gradients of an update added up.
"""

from paceline.run.net.connection_messages import Message
from paceline.run.net.number_messages import WorkerNumber
from paceline.run.settings import WireFormat
from paceline.run.tensors.state_spec import Count, Name, StateSpec, Text

__all__ = [
    "FromHost",
    "HostVersion",
    "HostWelcome",
    "JoinAsHost",
    "SendSum",
    "SumSpoiled",
    "ToHost",
]


class JoinAsHost(Message, tag=70, frozen=True):
    """Ask to exchange tensors with the servers for all workers of a host."""

    release: Name  # of Paceline
    spec: StateSpec


class HostWelcome(Message, tag=71, frozen=True):
    """Accept the agent of a host."""

    wire: WireFormat
    wire_parameters: WireFormat
    servers: tuple[Text, ...] = ()  # addresses of the servers other than the head
    is_split: tuple[bool, ...] = ()  # which optimizers these servers have parts of


class HostVersion(Message, tag=72, frozen=True):
    """Announce a version of the parameters, which comes as a payload."""

    payload: Count
    version: Count
    optimizer: Count | None  # only its parameters; None: all
    is_last: bool  # the run has ended; the last version is never rounded
    worker: WorkerNumber | None  # only this worker loads it; None: any
    keep: tuple[Count, ...]  # the payloads that workers may still use; the memory of others is free


class SendSum(Message, tag=73, frozen=True):
    """Ask for the sum of the gradients of these workers, as a payload.

    Each gradient counts in proportion to its samples; the one of the first worker counts once.
    """

    payload: Count
    optimizer: Count
    workers: tuple[WorkerNumber, ...]  # in ascending order
    samples: tuple[Count, ...]


class SumSpoiled(Message, tag=74, frozen=True):
    """Report that gradients contain NaN or infinity, so their sum wasn't sent."""

    payload: Count
    workers: tuple[WorkerNumber, ...]


FromHost = JoinAsHost | SumSpoiled
ToHost = HostWelcome | HostVersion | SendSum
