# SPDX-License-Identifier: BSD-3-Clause
"""A buffer is never written while a worker reads it, and there are no more than are needed."""

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from message_examples import unhurried
from paceline.run.net.in_process import InProcessStore
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.sums import SlotGradient
from paceline.run.tensors.version_buffers import VersionBuffers
from shard_updates import make_update


class Bench:
    """A shard whose updates each add 1 to all parameters."""

    def __init__(self, versions_kept=1):
        self.model = nn.Linear(2, 1)
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        state = gather([self.model], [optimizer])
        self.store = InProcessStore(state.spec)
        self.shard = Shard(state, [], self.store, versions_kept=versions_kept)
        slot = self.store.new_accumulator()
        for flat in slot.flats[0]:
            flat.fill_(-1.0)
        self._gradient = SlotGradient(0, 0, 1, 1.0, frozenset(), slot)

    def update(self):
        make_update(self.shard, [self._gradient])

    @property
    def buffer_count(self):
        return len(self.store.buffers)


def version_in(buffer):
    """Return the version that is in a buffer, by its parameters."""
    [version] = {value for flat in buffer.views.parameters[0] for value in flat.flatten().tolist()}
    return version


operations = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("stop reading"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("update"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_buffer_is_not_written_while_a_worker_reads_it(kept):
    @settings(unhurried, max_examples=30)
    @given(operations)
    def check(operations):
        bench = Bench(kept)
        shard, readers, readers_max = bench.shard, {}, 0
        for what, worker, back in operations:
            if what == "stop reading":
                shard.remove_reader(worker)
                readers.pop(worker, None)
            elif what == "read":
                version = max(shard.version - min(back, kept - 1), 0)
                readers[worker] = (shard.add_reader(worker, version), version)
            else:
                old = shard.newest
                is_read = any(buffer is old for buffer, _ in readers.values())
                bench.update()
                assert (shard.newest is old) == (not is_read and kept == 1)
            for buffer, version in readers.values():
                assert version_in(buffer) == version
            readers_max = max(readers_max, len(readers))
            assert bench.buffer_count <= readers_max + kept + 1
        assert version_in(shard.newest) == shard.version
        assert torch.equal(shard.newest.views.parameters[0][0], bench.model.weight)

    check()


def test_one_buffer_is_enough_if_all_workers_wait_for_the_update():
    bench = Bench()
    for version in range(9):
        for worker in range(3):
            bench.shard.add_reader(worker, version)
        for worker in range(3):
            bench.shard.remove_reader(worker)
        bench.update()
    assert bench.buffer_count == 1


def test_straggler_needs_one_more_buffer_however_long_it_takes():
    bench = Bench()
    buffer = bench.shard.add_reader(7, 0)
    for _ in range(20):
        bench.update()
    assert bench.buffer_count == 2
    assert version_in(buffer) == 0.0


def test_version_that_is_not_kept_has_no_buffer():
    bench = Bench(versions_kept=2)
    for _ in range(3):
        bench.update()
    assert version_in(bench.shard.add_reader(0, 2)) == 2.0
    with pytest.raises(KeyError):
        bench.shard.add_reader(0, 1)


def test_buffer_with_a_reader_stays_unchanged_when_its_version_is_forgotten():
    bench = Bench()
    buffer = bench.shard.add_reader(0, 0)
    bench.update()
    bench.update()
    with pytest.raises(KeyError):
        bench.shard.add_reader(1, 0)
    assert version_in(buffer) == 0.0


def test_worker_that_moves_on_reads_one_version_only():
    bench = Bench()
    for version in range(5):
        bench.shard.add_reader(0, version)
        bench.update()
    assert bench.buffer_count == 2


def test_begin_update_says_whether_the_parameters_must_be_copied():
    buffers = VersionBuffers(InProcessStore(gather([nn.Linear(1, 1)], []).spec), 1)
    buffers.reset(0)
    first = buffers.current
    assert not buffers.begin_update(1)
    buffers.end_update(1)
    assert buffers.add_reader(3, 1) is first
    assert buffers.begin_update(2)
    assert buffers.current is not first
    buffers.end_update(2)
    buffers.remove_reader(3)
    buffers.remove_reader(3)  # a worker that doesn't read
    assert not buffers.begin_update(3)
    assert len(buffers) == 2


def test_end_update_without_begin_keeps_the_buffer():
    """A skipped update is the same parameters under a new version."""
    buffers = VersionBuffers(InProcessStore(gather([nn.Linear(1, 1)], []).spec), 1)
    buffers.reset(0)
    buffers.end_update(1)
    assert buffers.add_reader(0, 1) is buffers.current
    assert len(buffers) == 1
    with pytest.raises(KeyError):
        buffers.add_reader(0, 0)


# ------------------------------------------------------------------------- versions by optimizer


class TwoOptimizers:
    """A shard whose workers read the parameters of each optimizer from another version."""

    def __init__(self):
        self.models = [nn.Linear(1, 1), nn.Linear(1, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in self.models]
        with torch.no_grad():
            for model in self.models:
                for parameter in model.parameters():
                    parameter.zero_()
        state = gather(self.models, optimizers)
        self.store = InProcessStore(state.spec)
        self.shard = Shard(state, [], self.store, apart=True)
        self._slot = self.store.new_accumulator()
        for flats in self._slot.flats:
            for flat in flats:
                flat.fill_(-1.0)

    def update(self, optimizer):
        make_update(self.shard, [SlotGradient(0, optimizer, 1, 1.0, frozenset(), self._slot)])


def steps_in(buffer, optimizer):
    """Return how many steps of this optimizer are in a buffer."""
    return buffer.views.parameters[optimizer][0].item()


turns = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=30)


@settings(unhurried, max_examples=50)
@given(turns)
def test_parameters_of_each_optimizer_stay_until_the_worker_loads_them_again(turns):
    """Each turn: a worker reports for an optimizer, the update is made, and it continues."""
    bench = TwoOptimizers()
    shard, read = bench.shard, {}
    for worker in range(3):
        buffer = shard.add_reader(worker, 0)
        read |= {(worker, optimizer): (buffer, 0) for optimizer in range(2)}
    steps = [0, 0]
    for worker, optimizer in turns:
        shard.remove_reader(worker, optimizer)
        bench.update(optimizer)
        steps[optimizer] += 1
        assert shard.loads_only(optimizer) == optimizer
        buffer = shard.add_reader(worker, shard.version, optimizer)
        read[worker, optimizer] = (buffer, steps[optimizer])
        for (_, section), (buffer, count) in read.items():
            assert steps_in(buffer, section) == count
    assert len(bench.store.buffers) <= 3 * 2 + 2


def test_one_buffer_is_enough_for_one_worker_with_two_optimizers():
    bench = TwoOptimizers()
    bench.shard.add_reader(0, 0)
    for turn in range(6):
        bench.shard.remove_reader(0, turn % 2)
        bench.update(turn % 2)
        bench.shard.add_reader(0, turn + 1, turn % 2)
    assert len(bench.store.buffers) == 1


def test_worker_that_leaves_reads_nothing():
    bench = TwoOptimizers()
    bench.shard.add_reader(0, 0)
    bench.update(0)
    assert len(bench.store.buffers) == 2
    bench.shard.remove_reader(0)
    for turn in range(4):
        bench.update(turn % 2)
    assert len(bench.store.buffers) == 2


def test_shard_with_one_optimizer_has_nothing_to_keep_apart():
    assert Bench().shard.loads_only(0) is None
