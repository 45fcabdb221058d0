# SPDX-License-Identifier: BSD-3-Clause
"""The server leases batches to its workers, and takes back what they don't use."""

import pytest

from paceline.leases import BatchOrder, Use
from paceline.run.net import messages
from paceline.run.server.roster import LEASES_MAX
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.schema import Skipped
from server_harness import serve

ORDERS = [BatchOrder(samples=6, batches=3, batch_samples=2, last_samples=2), BatchOrder(samples=4)]
"""A stream that is leased, and one that isn't."""


class LeasingRun:
    """A run of two workers whose first stream is leased."""

    def __init__(self, harness, ahead):
        self.harness = harness
        self.workers = [harness.connect().join(worker, harness.spec, ahead) for worker in range(2)]
        self.receive()

    def receive(self):
        """Receive the next turns of both workers."""
        self.turns = [worker.receive_assignment() for worker in self.workers]

    def step(self, worker, *numbers, **fields):
        """Report a gradient on these batches."""
        peer, turn = self.workers[worker], self.turns[worker]
        uses = (Use(0, numbers),)
        report = peer.gradient(
            turn, *peer.parameters.parameters[0], **{"samples": 2, "uses": uses, **fields}
        )
        peer.send(report)

    def lease(self, worker):
        """Ask for one batch; return its number."""
        reply = self.workers[worker].send(messages.LeaseRequest(0)).receive()
        assert isinstance(reply, messages.LeaseReply)
        return reply.lease.numbers[0]


def serve_leases(play, folder, *, steps=2, ahead=(1, 0), **settings):
    """Serve a run to two workers that `play` controls, and audit its trace."""
    usual = {"spec": RunSpec(workers=2, steps=steps), "checkpoint_every": "0"}
    made = Settings(**{**usual, **settings})

    def act(harness):
        play(LeasingRun(harness, ahead))

    return serve(act, folder, made, alone=True, orders=ORDERS)


def test_each_batch_goes_to_one_worker_and_epochs_follow_the_updates(tmp_path):
    def play(run):
        assert [turn.leases for turn in run.turns] == [(Use(0, (0,)),), (Use(0, (1,)),)]
        run.step(0, 0, pulled=(1,))
        run.step(1, 1, pulled=(1,))
        run.receive()
        assert [turn.leases for turn in run.turns] == [(Use(0, (2,)),), (Use(0, (3,)),)]
        assert [turn.stream_samples for turn in run.turns] == [(4, 0)] * 2
        run.step(0, 2)
        run.step(1, 3)
        run.receive()
        assert [end.stream_samples for end in run.turns] == [(8, 0)] * 2

    served = serve_leases(play, tmp_path)
    assert served.failure == ""
    assert served.trace.records[-1].data == [[8, 4, []], [0, 0, []]]


def test_worker_that_asks_gets_the_next_batch(tmp_path):
    def play(run):
        assert [run.lease(1), run.lease(0)] == [2, 3]
        run.step(0, 0, 3)
        run.step(1, 1, 2)
        run.receive()

    assert serve_leases(play, tmp_path, steps=1).trace.records[-1].data[0] == [8, 4, []]


def test_returned_batch_is_leased_again(tmp_path):
    def play(run):
        run.workers[0].send(messages.BatchesReturned(Use(0, (0,))))
        assert run.lease(0) == 0
        run.step(0, 0)
        run.step(1, 1)
        run.receive()

    serve_leases(play, tmp_path, steps=1)


def test_skipped_batch_counts_as_done_and_is_in_the_trace(tmp_path):
    def play(run):
        run.workers[0].send(messages.BatchesReturned(Use(0, (0, 1)), skipped=True))
        run.step(0, run.lease(0))
        run.step(1, 1)
        run.receive()

    served = serve_leases(play, tmp_path, steps=1)
    [skipped] = [record for record in served.trace.records if isinstance(record, Skipped)]
    assert (skipped.worker, skipped.use) == (0, Use(0, (0,)))  # it didn't hold batch 1
    assert served.trace.records[-1].data[0] == [6, 3, []]


def test_batch_that_is_skipped_after_the_end_does_not_count(tmp_path):
    def play(run):
        run.step(0, 0)
        run.step(1, 1)
        run.receive()
        run.workers[0].send(messages.BatchesReturned(Use(0, (2,)), skipped=True))

    served = serve_leases(play, tmp_path, steps=1, ahead=(2, 0))
    assert not [record for record in served.trace.records if isinstance(record, Skipped)]
    assert served.trace.records[-1].data[0] == [4, 4, [2, 3]]


def test_worker_that_leaves_gives_its_batches_to_others(tmp_path):
    def play(run):
        run.step(0, 0, pulled=(1,))
        run.workers[1].close()  # only now the update can be made
        run.turns[0] = run.workers[0].receive_assignment()
        assert run.turns[0].leases == (Use(0, (1,)),)
        run.step(0, 1)

    assert serve_leases(play, tmp_path).trace.records[-1].data[0] == [4, 2, []]


@pytest.mark.parametrize(
    "numbers", [(1,), (5,), (-1,), (2**63,)], ids=["held by another", "future", "negative", "huge"]
)
def test_gradient_on_a_batch_that_the_worker_does_not_hold_is_refused(tmp_path, numbers):
    def play(run):
        run.step(0, *numbers)
        assert f"worker 0 doesn't hold batch {numbers[0]}" in run.workers[0].wait_closed()
        run.step(1, 1)

    served = serve_leases(play, tmp_path, steps=1)
    assert [update.contributors for update in served.trace.updates()] == [(1,)]


@pytest.mark.parametrize("samples", [-1, 2**63])
def test_impossible_number_of_samples_is_refused(tmp_path, samples):
    def play(run):
        run.step(0, uses=(Use(1, (), samples),))
        assert f"can't have used {samples} samples" in run.workers[0].wait_closed()
        run.step(1, 1)

    serve_leases(play, tmp_path, steps=1)


@pytest.mark.parametrize("stream", [1, 2, 2**50], ids=["not leased", "unknown", "huge"])
def test_request_for_a_stream_without_leases_is_refused(tmp_path, stream):
    def play(run):
        reason = run.workers[0].send(messages.LeaseRequest(stream)).wait_closed()
        assert f"stream {stream}" in reason
        run.step(1, 1)

    serve_leases(play, tmp_path, steps=1)


def test_worker_that_wants_endless_batches_gets_a_limited_number(tmp_path):
    def play(run):
        assert [len(turn.leases[0].numbers) for turn in run.turns] == [LEASES_MAX] * 2
        run.step(0, 0, pulled=(2**50, 2**50))
        run.step(1, 1)
        run.receive()
        assert len(run.turns[0].leases[0].numbers) == LEASES_MAX
        run.step(0)
        run.step(1)

    serve_leases(play, tmp_path, ahead=(2**50, 2**50))
