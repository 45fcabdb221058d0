# SPDX-License-Identifier: BSD-3-Clause
"""Whole runs over TCP: what workers report becomes the same events as where memory is shared."""

import pytest
import torch

from paceline.core.events import Fate
from paceline.run.net import messages
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from server_harness import no_intruder, receive_assignments, serve


class Run:
    """A run over TCP whose workers the test controls."""

    def __init__(self, harness, workers):
        self.workers = [harness.connect().join(n, harness.spec) for n in range(workers)]
        self.turns = receive_assignments(self.workers)

    def announce(self, worker, **fields):
        """Announce a gradient."""
        peer = self.workers[worker]
        values = [p * 0 + worker + 1 for p in peer.parameters.parameters[0]]
        peer.announce(peer.gradient(self.turns[worker], *values, **fields))

    def receive(self, *workers):
        """Receive the next turns of these workers."""
        for worker, turn in zip(
            workers, receive_assignments([self.workers[w] for w in workers]), strict=True
        ):
            self.turns[worker] = turn

    def finish(self, *workers):
        """Compute gradients until the run ends."""
        while not isinstance(self.turns[workers[0]], messages.RunEnded):
            for worker in workers:
                self.announce(worker)
            self.receive(*workers)


def serve_tcp(play, folder, policy="sync", workers=2, steps=3, **spec):
    """Serve a run over TCP to workers that `play` controls."""
    made = Settings(
        spec=RunSpec(workers=workers, steps=steps, **spec), policy=policy, checkpoint_every="0"
    )
    return serve(lambda harness: play(Run(harness, workers)), folder, made, alone=True, tcp=True)


def gradients(served, worker):
    return [g for g in served.trace.gradients() if g.worker == worker]


def test_training_over_tcp_is_the_same_bit_for_bit(tmp_path):
    (tmp_path / "tcp").mkdir()
    (tmp_path / "shared").mkdir()
    over_tcp = serve(no_intruder, tmp_path / "tcp", tcp=True)
    shared = serve(no_intruder, tmp_path / "shared")
    assert over_tcp.failure == shared.failure == ""
    assert torch.equal(over_tcp.weights, shared.weights)
    assert torch.equal(over_tcp.momentum, shared.momentum)
    assert [set(u.contributors) for u in over_tcp.trace.updates()] == [{0, 1}] * 3


def test_moved_bytes_are_in_the_trace(tmp_path):
    served = serve(no_intruder, tmp_path, tcp=True)
    size = 16 + 2 * 64  # one header, and two tensors that begin at multiples of 64 bytes
    for gradient in served.trace.gradients():
        assert (gradient.pulled_bytes, gradient.pushed_bytes) == (size, size)


@pytest.mark.parametrize("late", ["cancel", "finish"])
def test_gradient_that_is_announced_too_late_is_never_sent(tmp_path, late):
    def play(run):
        run.announce(0)
        run.announce(1)
        run.receive(0, 1)  # so the update is made without worker 2
        run.announce(2)
        run.receive(2)
        assert run.turns[2].notice.fate is Fate.LATE
        run.finish(0, 1)
        receive_assignments([run.workers[2]])

    served = serve_tcp(play, tmp_path, "backup:1", workers=3, late=late)
    assert served.failure == ""
    first = gradients(served, 2)[0]
    assert (first.fate, first.pushed_bytes) == (Fate.LATE, 0)
    assert first.pulled_bytes > 0


def test_gradient_that_is_not_finite_is_never_sent(tmp_path):
    def play(run):
        run.announce(0, sq_norm=None)
        run.receive(0)
        assert run.turns[0].notice.fate is Fate.NON_FINITE
        run.finish(0, 1)

    served = serve_tcp(play, tmp_path)
    assert gradients(served, 0)[0].pushed_bytes == 0


def test_worker_that_leaves_before_its_gradient_was_sent_is_forgotten(tmp_path):
    def play(run):
        run.announce(1)
        run.workers[1].close()
        run.finish(0)

    served = serve_tcp(play, tmp_path)
    assert served.failure == ""
    assert {u.contributors for u in served.trace.updates()} == {(0,)}


def test_second_announcement_breaks_the_protocol_and_others_go_on(tmp_path):
    def play(run):
        run.workers[1].send(run.workers[1].gradient(run.turns[1]))
        run.workers[1].send(run.workers[1].gradient(run.turns[1]))
        assert "a payload was announced before" in run.workers[1].wait_closed()
        run.finish(0)

    assert serve_tcp(play, tmp_path).failure == ""


def test_announcement_of_a_turn_that_is_not_due_breaks_the_protocol(tmp_path):
    def play(run):
        run.announce(1, turn=7)
        assert run.workers[1].wait_closed() == "no report is due for turn 7"
        run.finish(0)

    assert serve_tcp(play, tmp_path).failure == ""


def test_abandoned_turn_ends_without_a_transfer(tmp_path):
    def play(run):
        run.workers[1].send(messages.AbandonReport(run.turns[1].turn, 0.5))
        run.receive(1)
        run.finish(0, 1)

    served = serve_tcp(play, tmp_path)
    assert gradients(served, 1)[0].pushed_bytes == 0


def test_run_over_tcp_without_a_barrier_takes_every_gradient(tmp_path):
    def play(run):
        for worker in (0, 1, 0):
            run.announce(worker)
            run.receive(worker)
        run.announce(1)
        run.receive(0, 1)

    served = serve_tcp(play, tmp_path, "async", steps=4)
    assert [u.contributors for u in served.trace.updates()] == [(0,), (1,), (0,), (1,)]
