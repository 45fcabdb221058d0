# SPDX-License-Identifier: BSD-3-Clause
"""An example of each message, and hypothesis strategies that generate any message."""

from collections.abc import Callable
from math import inf
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from msgspec import inspect

from paceline.core.events import Fate
from paceline.leases import Use
from paceline.release import RELEASE
from paceline.run.net import host_messages, messages
from paceline.run.net import server_messages as between
from paceline.run.net.number_messages import AskRunSize, RunSize
from paceline.run.tensors.state_spec import (
    OptimizerSpec,
    OptionChange,
    SchedulerCalls,
    StateSpec,
    TensorSpec,
)

__all__ = ["EXAMPLES", "SPEC", "any_message", "unhurried"]

unhurried = settings(deadline=None)  # a busy machine must not fail a test

SPEC = StateSpec(
    (OptimizerSpec("SGD", (TensorSpec("weight", "torch.float32", (2, 3), (3, 1)),)),),
    (TensorSpec("mean", "torch.float32", (3,), (1,)),),
    (TensorSpec("count", "torch.int64", (), ()),),
    (TensorSpec("frozen", "torch.float64", (0,), (1,)),),
)
_NOTICE = messages.FateNotice(Fate.LATE, 6, 1, 0)
_OPTION = OptionChange(0, 0, "lr", 0.1)
_CALLS = SchedulerCalls(0, "metric", 2, 0, None, (0.5,))

EXAMPLES = [
    messages.Hello(messages.PROTOCOL, bytes(32)),
    messages.Challenge(bytes(32), bytes(32)),
    messages.Proof(bytes(32)),
    messages.Join(3, RELEASE, SPEC, (1, 5)),
    messages.Welcome(4, "50ms", 7, True, False),
    messages.Refused("the token is wrong"),
    messages.Assignment(
        5, 7, 1, (7,), 12.5, None, (_OPTION,), _NOTICE, 0, {0: 1.5}, (1,), (Use(0, (9,)),)
    ),
    messages.CancelTurn(5),
    messages.RunEnded(8, 1, (8,), _NOTICE),
    messages.GradientReport(
        5, 7, 0, 32, 0.05, 1.5, (0,), (_OPTION,), {"loss": 0.5}, uses=(Use(0, (8,)),)
    ),
    messages.AbandonReport(5, 0.05, 7, (_OPTION,), 0, (_CALLS,)),
    messages.StateRequest("optimizer", 0),
    messages.StateUpload(0, b"\x80"),
    messages.StateReply(1),
    messages.WorkerUnavailable(3, "it fails"),
    messages.PositionRequest(2),
    messages.PositionReport(2, b"somewhere"),
    messages.SlotShared(),
    messages.BufferShared(1),
    messages.Watch(4, True),
    messages.StopRun(),
    messages.ScriptEnded(),
    messages.LeaseRequest(1),
    messages.LeaseReply(Use(1, (5,)), (0, 2)),
    messages.BatchesReturned(Use(0, (3, 4)), True),
    messages.SendPayload(4),
    messages.StopPayload(4),
    messages.DataAttached(),
    host_messages.JoinAsHost(RELEASE, SPEC),
    host_messages.HostWelcome("exact", "bfloat16", ("tcp:10.0.0.2:1",), (True,)),
    host_messages.HostVersion(3, 7, None, False, None, (2,)),
    host_messages.SendSum(3, 0, (1, 4), (8, 16)),
    host_messages.SumSpoiled(3, (4,)),
    messages.ReserveNumber(b"seat", RELEASE, 3, True),
    messages.NumberReserved(b"seat", 3, 4, 7),
    messages.LeaveRun(3, b"session"),
    AskRunSize(),
    RunSize(4),
    messages.RunProgress(4, 7, {0: 6, 3: 1}, (0,), {3: 2}, True, False, 7, "stopped"),
    between.JoinAsServer(1, RELEASE, SPEC, (True,), "tcp:127.0.0.1:4000"),
    between.ServerWelcome(3, 0.9, 1, False, "exact", "bfloat16"),
    between.LoadPart(7),
    between.OpenPeer(4, 2, bytes(32)),
    between.ClosePeer(4),
    between.PublishPart(4, 9, 7, None, False),
    between.StopPart(4, 9),
    between.ExpectPart(4, 8, 0),
    between.SkipPart(4, 8),
    between.AddReader(2, 7, None),
    between.RemoveReader(2, 0),
    between.AddPart(8, 2, 0, 32, 0.5, (1,)),
    between.SumEarly(8, inf),
    between.ReleaseSlot(2),
    between.ReducePart(8, (2,), (32,), (1.0,), (0.5,)),
    between.StepUpdate(8, 1.0, (_OPTION,)),
    between.SkipUpdate(8),
    between.FindBlame(8),
    between.CollectPart(),
    between.LoadOptimizerPart(0),
    between.RunOver(),
    between.PartReduced(8, {0: ((1.5, inf), ())}),
    between.PartArrived(4, 8, 1000, 2000),
    between.PartMoved(4, 1000, 2000),
    between.PartLost(4, "it was closed"),
    between.Blamed(8, (2,)),
    between.PeerOpened(3, "not enough shared memory"),
    between.ServerFailed("no memory"),
]
"""One of each message."""


def any_message(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy that generates any value of a message type."""
    return _values(inspect.type_info(kind))


def _values(info: Any) -> st.SearchStrategy[Any]:
    return _STRATEGIES[type(info)](info)


_STRATEGIES: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    inspect.StructType: lambda i: st.builds(i.cls, *[_values(field.type) for field in i.fields]),
    inspect.NamedTupleType: lambda i: st.builds(
        i.cls, *[_values(field.type) for field in i.fields]
    ),
    inspect.UnionType: lambda i: st.one_of([_values(kind) for kind in i.types]),
    inspect.IntType: lambda i: st.integers(
        -(2**63) if i.ge is None else i.ge, 2**64 - 1 if i.le is None else i.le
    ),
    inspect.FloatType: lambda i: st.floats(i.ge, i.le, allow_nan=False),
    inspect.StrType: lambda i: st.text(max_size=20),
    inspect.BytesType: lambda i: st.binary(
        min_size=i.min_length or 0, max_size=min(i.max_length or 20, 40)
    ),
    inspect.VarTupleType: lambda i: st.lists(_values(i.item_type), max_size=3).map(tuple),
    inspect.DictType: lambda i: st.dictionaries(
        _values(i.key_type), _values(i.value_type), max_size=3
    ),
    inspect.BoolType: lambda _: st.booleans(),
    inspect.NoneType: lambda _: st.none(),
    inspect.LiteralType: lambda i: st.sampled_from(i.values),
    inspect.EnumType: lambda i: st.sampled_from(list(i.cls)),
}
