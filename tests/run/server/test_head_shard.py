# SPDX-License-Identifier: BSD-3-Clause
"""The servers of a run compute, together, the bits that a single server would."""

from copy import deepcopy
from math import inf, isfinite, isnan, nan
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn

from paceline.errors import ProtocolError
from paceline.run.net import messages
from paceline.run.net.in_process import InProcessStore, PlainMemory
from paceline.run.net.messages import decode_server, decode_worker, encode
from paceline.run.net.server_messages import OpenPeer, PeerOpened, ServerWelcome
from paceline.run.server.head_shard import HeadShard
from paceline.run.server.other_servers import OtherServers
from paceline.run.server.part_server import PartSession
from paceline.run.system import SYSTEM
from paceline.run.tensors.layout import Layout, gather
from paceline.run.tensors.optimizer_parts import can_split
from paceline.run.tensors.part_tensors import take_part
from paceline.run.tensors.partition import partition
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.sums import SlotGradient
from server_group import small_units
from shard_updates import decide
from split_training import is_same

WORKERS = 4


class DirectEnd:
    """The head's end of a connection to another server, which acts at once."""

    def __init__(self):
        self.session = None  # set when there is one
        self._inbox = []  # what the other server has sent
        self._state = None  # the state that is on its way, in either direction

    # What the head does.

    def send(self, message):
        self.session.handle(decode_server(encode(message)))

    def send_state(self, state, what):
        del what
        self._state = deepcopy(state)
        self.send(messages.StateReply(1, 1))

    def receive_nowait(self):
        found, self._inbox = self._inbox, []
        return iter(found)

    def receive_state(self, message):
        del message
        return self._state

    def end_for_server(self):
        """Return the other server's end."""

        def send_state(optimizer, state, has_begun):
            self._state = deepcopy(state)
            send(messages.StateUpload(optimizer, b"", has_begun))

        def send(message):
            self._inbox.append(decode_worker(encode(message)))

        return SimpleNamespace(
            send=send, send_state=send_state, receive_state=lambda _: self._state
        )


class DirectServers:
    """The tensors of a run on several servers, which are connected without a transport."""

    def __init__(self, make, servers, **options):
        """`make`: returns what is trained and its schedulers. `options`: of the shard."""
        state, schedulers = make()
        self.spec = state.spec
        is_split = tuple(map(can_split, state.optimizers))
        self.parts = partition(state.spec, servers, is_split)
        welcome = ServerWelcome(
            servers,
            options.get("ema"),
            options.get("versions_kept", 1),
            options.get("apart", False),
            "exact",
            "exact",
        )
        self.others = OtherServers(state, self.parts, is_split, welcome)
        self.store = InProcessStore(self.parts[0].spec, self.parts[0].layout)
        self.shard = HeadShard(state, schedulers, self.store, self.others)
        self.sessions = []
        for number in range(1, servers):
            end = self.others._ends[number] = DirectEnd()
            part = self.parts[number]
            end.session = PartSession(
                (part, take_part(make(other=True)[0], part)),
                welcome,
                SimpleNamespace(head=end.end_for_server(), expect=lambda *_: None),
                SimpleNamespace(
                    system=SYSTEM, new_store=lambda part: InProcessStore(part.spec, part.layout)
                ),
            )
            self.sessions.append(end.session)
        for worker in range(WORKERS):
            self.others.broadcast(OpenPeer(worker + 1, worker, bytes(32)))
            self.others.answers(PeerOpened)
        self.slots = [self.store.new_accumulator() for _ in range(WORKERS)]

    def deliver(self, worker, whole):
        """Put each server's part of a gradient into its slot; return the head's slot."""
        slots = [self.slots[worker], *(one._slots[worker] for one in self.sessions)]
        for part, slot in zip(self.parts, slots, strict=True):
            copy_views(part.of(whole), slot)
        return self.slots[worker]


class OneServer:
    """The tensors of the same run on a single server."""

    def __init__(self, make, **options):
        state, schedulers = make()
        self.store = InProcessStore(state.spec)
        self.shard = Shard(state, schedulers, self.store, **options)
        self.slots = [self.store.new_accumulator() for _ in range(WORKERS)]

    def deliver(self, worker, whole):
        copy_views(whole, self.slots[worker])
        return self.slots[worker]


def copy_views(source, target):
    for a, b in zip(source.flats, target.flats, strict=True):
        for one, other in zip(a, b, strict=True):
            other.copy_(one)
    for name in ("buffer_flats", "counter_flats"):
        for one, other in zip(getattr(source, name), getattr(target, name), strict=True):
            other.copy_(one)


SPLIT = [
    lambda own: torch.optim.SGD(own, lr=0.1),
    lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9, weight_decay=0.01),
    lambda own: torch.optim.AdamW(own, lr=0.1, amsgrad=True),
    lambda own: torch.optim.RMSprop(own, lr=0.1, centered=True),
]
WHOLE = lambda own: torch.optim.Adafactor(own, lr=0.1)  # noqa: E731


def maker(first, second=None, *, scheduled=False, dtype=torch.float32):
    """Return what makes the same training again and again; `other`: with other values."""

    def make(*, other=False):
        torch.manual_seed(1 if other else 0)
        model = nn.Sequential(
            nn.Conv2d(3, 7, 3), nn.BatchNorm2d(7), nn.Linear(17, 9), nn.Linear(5, 3)
        ).to(dtype=dtype, memory_format=torch.channels_last)
        model[3].requires_grad_(False)
        own = [p for one in model[:2] for p in one.parameters()]
        rest = list(model[2].parameters())
        optimizers = [first(own), second(rest)] if second else [first([*own, *rest])]
        schedulers = [torch.optim.lr_scheduler.StepLR(one, 2) for one in optimizers]
        return gather([model], optimizers), schedulers if scheduled else []

    return make


@st.composite
def trainings(draw):
    second = draw(st.sampled_from([None, WHOLE, *SPLIT]))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16]))
    return maker(draw(st.sampled_from(SPLIT)), second, scheduled=draw(st.booleans()), dtype=dtype)


gradients = st.tuples(
    st.integers(0, WORKERS - 1),
    st.sampled_from([1, 1, 3]),  # samples
    st.sampled_from([1.0, 1.0, 0.5]),  # scale
    st.integers(0, 1),  # optimizer
    st.frozensets(st.integers(0, 3), max_size=2),  # unused
)


class SameBits(RuleBasedStateMachine):
    """The same calls for one server and for several."""

    def __init__(self):
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        small_units(self._patch)

    def teardown(self):
        self._patch.undo()

    @initialize(
        make=trainings(),
        servers=st.integers(2, 5),
        ema=st.sampled_from([None, 0.5, 0.99]),
        versions_kept=st.integers(1, 2),
        apart=st.booleans(),
    )
    def begin(self, make, servers, ema, versions_kept, apart):
        self.make = make
        self.options = {"ema": ema, "versions_kept": versions_kept, "apart": apart}
        self._use(servers)
        for one in self.both:
            one.shard.send_parts()

    def _use(self, servers):
        self.one, self.many = (
            OneServer(self.make, **self.options),
            DirectServers(self.make, servers, **self.options),
        )
        self.both = (self.one, self.many)
        self.pending = {}  # the gradients of each update
        self.reading = set()  # workers
        self.optimizers = len(self.one.shard.state.optimizers)

    @property
    def version(self):
        return self.one.shard.version

    def _whole(self, seed, bad=None):
        """Return a random gradient; `bad`: what one of its elements is."""
        spec = self.many.spec
        views = Layout.of(spec).view(PlainMemory(Layout.of(spec).size))
        generator = torch.Generator().manual_seed(seed)
        for one in [*(x for own in views.flats for x in own), *views.buffer_flats]:
            one.copy_(torch.randn(one.shape, generator=generator))
        for one in views.counter_flats:
            one.fill_(seed)
        if bad is not None:
            flats = [x for own in views.flats for x in own if x.numel()]
            flat = flats[seed % len(flats)]
            flat[(seed * 31) % flat.numel()] = bad
        return views

    @rule(
        gradient=gradients,
        ahead=st.sampled_from([1, 1, 1, 2]),
        seed=st.integers(0, 1000),
        bad=st.sampled_from([None] * 12 + [nan, inf]),
    )
    def add(self, gradient, ahead, seed, bad):
        worker, samples, scale, optimizer, unused = gradient
        update, optimizer = self.version + ahead, optimizer % self.optimizers
        count = len(self.many.spec.optimizers[optimizer].parameters)
        unused = frozenset(i for i in unused if i < count)
        whole = self._whole(seed, bad)
        for one in self.both:
            one.shard.release_slot(worker)  # as an assignment does
            slot = one.deliver(worker, whole)
            gradient = SlotGradient(worker, optimizer, samples, scale, unused, slot)
            one.shard.add(update, gradient)
        self.pending.setdefault(update, []).append(gradient)

    @rule(worker=st.integers(0, WORKERS - 1))
    def release(self, worker):
        for one in self.both:
            one.shard.release_slot(worker)

    @rule(ahead=st.integers(1, 2), limit=st.sampled_from([0, 1, 2, inf]))
    def sum_early(self, ahead, limit):
        for one in self.both:
            one.shard.sum_early(self.version + ahead, limit)

    @precondition(lambda self: self.version + 1 in self.pending)
    @rule(
        scale=st.sampled_from([1.0, 1.0, 0.25, 1 / 3]), skips=st.sampled_from([False] * 5 + [True])
    )
    def update(self, scale, skips):
        update = self.version + 1
        decided = decide(update, self.pending.pop(update))
        norms = [one.shard.reduce(decided) for one in self.both]
        assert same_number(*norms)
        if isfinite(norms[0]) and not skips:
            for one in self.both:
                one.shard.step(update, scale)
            found = [one.shard.publish(update) for one in self.both]
            assert found[0] == found[1]
        else:
            found = [one.shard.workers_to_blame(update) for one in self.both]
            assert found[0] == found[1]
            for one in self.both:
                one.shard.skip(update)

    @rule(worker=st.integers(0, WORKERS - 1), optimizer=st.sampled_from([None, 0, 1]))
    def read(self, worker, optimizer):
        whole = optimizer is None or worker not in self.reading
        index = None if whole else optimizer % self.optimizers
        for one in self.both:
            one.shard.add_reader(worker, self.version, index)
        self.reading.add(worker)

    @rule(worker=st.integers(0, WORKERS - 1), optimizer=st.sampled_from([None, 0, 1]))
    def stop_reading(self, worker, optimizer):
        index = None if optimizer is None else optimizer % self.optimizers
        for one in self.both:
            one.shard.remove_reader(worker, index)
        self.reading.discard(worker)

    @rule(index=st.integers(0, 1), lr=st.sampled_from([0.0, 0.05, 1 / 3]))
    def change_option(self, index, lr):
        for one in self.both:
            one.shard.state.optimizers[index % self.optimizers].param_groups[0]["lr"] = lr

    @rule(index=st.integers(0, 1), lr=st.sampled_from([None, 0.02]))
    def load_state_of_optimizer(self, index, lr):
        index %= self.optimizers
        state = deepcopy(self.one.shard.optimizer_state(index))
        if lr is not None:
            state["param_groups"][0]["lr"] = lr
        for own in state["state"].values():
            for name, value in own.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "step":
                    own[name] = value * 0.5
        for one in self.both:
            one.shard.load_optimizer_state(index, deepcopy(state))

    @rule(index=st.integers(0, 1))
    def refuse_state_of_optimizer(self, index):
        index %= self.optimizers
        state = deepcopy(self.one.shard.optimizer_state(index))
        state["param_groups"][0]["params"] = [*state["param_groups"][0]["params"], 99]
        for one in self.both:
            with pytest.raises(ProtocolError):
                one.shard.load_optimizer_state(index, deepcopy(state))

    @rule(servers=st.integers(2, 5))
    def restart(self, servers):
        """Continue from a checkpoint with another number of servers."""
        version = self.version
        saved = deepcopy(self.many.shard.state_dict())
        assert is_same(saved, self.one.shard.state_dict())
        self._use(servers)
        for one in self.both:
            one.shard.load_state_dict(version, deepcopy(saved))
        assert is_same(self.many.shard.state_dict(), self.one.shard.state_dict())  # not sent yet
        for one in self.both:
            one.shard.send_parts()

    @invariant()
    def states_are_the_same(self):
        if not hasattr(self, "both"):
            return
        assert not self.many.others.failure
        assert all(one._shard.version == self.version for one in self.many.sessions)
        assert is_same(self.many.shard.state_dict(), self.one.shard.state_dict())
        assert is_same(self.many.shard.averages(), self.one.shard.averages())


def same_number(a, b):
    return a == b or (isnan(a) and isnan(b))


TestSameBits = SameBits.TestCase
TestSameBits.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
