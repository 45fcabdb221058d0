# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that end a run: `run.stop()`, and the end of worker 0's script."""

import pytest

from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.server.end_requests import SCRIPT_ENDED
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.schema import FINISHED, STOPPED, Left, Missing
from server_harness import serve


class TwoWorkers:
    """Two workers of a run, which have made one update."""

    def __init__(self, harness):
        self.harness = harness
        self.workers = [harness.connect().join(worker, harness.spec) for worker in range(2)]
        self.assignments = [worker.receive_assignment() for worker in self.workers]
        self.step(0)
        self.step(1)
        self.assignments = [worker.receive_assignment() for worker in self.workers]

    def step(self, worker):
        """Report the gradient of this worker."""
        peer = self.workers[worker]
        peer.send(peer.gradient(self.assignments[worker], *peer.parameters.parameters[0]))

    def leave(self, worker):
        self.workers[worker].close()

    def ends(self):
        """Return the version at which the run ends for each worker."""
        ends = [worker.receive_assignment() for worker in self.workers]
        assert all(isinstance(end, messages.RunEnded) for end in ends)
        return [end.version for end in ends]


def serve_two(play, folder, **options):
    """Serve a run without a goal, or with these options, to two workers that `play` controls."""
    settings = Settings(spec=RunSpec(workers=2, **options), checkpoint_every="0")
    return serve(lambda harness: play(TwoWorkers(harness)), folder, settings, alone=True)


@pytest.mark.parametrize("goal", [{}, {"steps": 9}, {"samples": 9}], ids=str)
@pytest.mark.parametrize("worker", [0, 1])
def test_any_worker_can_finish_the_run(tmp_path, capsys, worker, goal):
    def play(two):
        two.workers[worker].send(messages.StopRun())
        assert two.ends() == [1, 1]
        assert two.workers[worker].receive() == messages.StateReply(0)

    served = serve_two(play, tmp_path, **goal)
    assert served.failure == ""
    assert (served.trace.records[-1].version, served.trace.records[-1].reason) == (1, FINISHED)
    assert f"worker {worker} called run.stop()" in capsys.readouterr().out


def test_gradient_that_waits_for_an_update_is_not_used(tmp_path):
    """The last version is the one that the script has when it calls run.stop()."""

    def play(two):
        two.step(1)
        two.harness.connect().send(messages.Watch(1, waits=False)).receive()  # it has arrived
        two.workers[0].send(messages.StopRun())
        assert two.ends() == [1, 1]

    served = serve_two(play, tmp_path)
    assert served.trace.records[-1].unused == (1,)
    assert served.trace.records[-1].reason == FINISHED


def test_second_stop_is_answered_and_changes_nothing(tmp_path, capsys):
    def play(two):
        for worker in two.workers:
            worker.send(messages.StopRun())
        assert two.ends() == [1, 1]
        assert [worker.receive() for worker in two.workers] == [messages.StateReply(0)] * 2

    assert serve_two(play, tmp_path).failure == ""
    assert capsys.readouterr().out.count("called run.stop()") == 1


@pytest.mark.parametrize(
    ("goal", "reason"), [({}, FINISHED), ({"steps": 9}, STOPPED), ({"samples": 9}, STOPPED)]
)
def test_end_of_the_script_of_worker_0_finishes_a_run_without_a_goal(tmp_path, goal, reason):
    def play(two):
        two.workers[0].send(messages.ScriptEnded())
        assert two.ends() == [1, 1]

    served = serve_two(play, tmp_path, **goal)
    assert served.failure == ""
    assert (served.trace.records[-1].version, served.trace.records[-1].reason) == (1, reason)


def test_run_continues_after_the_end_of_another_script(tmp_path, capsys):
    def play(two):
        two.workers[1].send(messages.ScriptEnded()).wait_closed()
        two.step(0)
        two.assignments[0] = two.workers[0].receive_assignment()
        two.step(0)
        assert isinstance(two.workers[0].receive_assignment(), messages.RunEnded)

    served = serve_two(play, tmp_path, steps=3)
    contributors = [set(update.contributors) for update in served.trace.updates()]
    assert contributors == [{0, 1}, {0}, {0}]
    [left, _] = [record for record in served.trace.records if isinstance(record, Left)]
    assert (left.worker, left.reason) == (1, SCRIPT_ENDED)
    assert "worker 1 left" not in capsys.readouterr().out  # the launcher says what is worth saying


def test_launcher_reports_the_end_of_a_script_that_did_not(tmp_path):
    """It left with os._exit(0), or while there was no server."""

    def play(two):
        two.leave(0)
        two.harness.connect().send(messages.WorkerUnavailable(0, SCRIPT_ENDED, has_completed=True))
        assert isinstance(two.workers[1].receive_assignment(), messages.RunEnded)

    assert serve_two(play, tmp_path).trace.records[-1].reason == FINISHED


@pytest.mark.parametrize("has_completed", [False, True])
def test_run_continues_without_another_worker_that_is_unavailable(tmp_path, has_completed):
    def play(two):
        launcher = two.harness.connect()
        launcher.send(messages.WorkerUnavailable(1, "it is gone", has_completed))
        two.step(0)
        two.step(1)
        assert two.ends() == [2, 2]

    trace = serve_two(play, tmp_path, steps=2).trace
    assert trace.records[-1].reason == FINISHED
    assert not any(isinstance(record, Missing) for record in trace.records)  # it had joined


def leave(harness, worker, **who):
    """Ask the server, over a connection of its own, to let a worker leave."""
    other = harness.connect()
    other.send(messages.LeaveRun(worker, **who))
    assert other.receive() == messages.StateReply(0)
    other.close()


@pytest.mark.parametrize("worker", [0, 1])
def test_worker_leaves_with_notice_and_the_run_goes_on(tmp_path, capsys, worker):
    def play(harness):
        peers = [
            harness.connect().join(n, harness.spec, seat=b"%d" % n, session=b"process %d" % n)
            for n in range(2)
        ]
        assignments = [peer.receive_assignment() for peer in peers]
        leave(harness, worker, session=b"process %d" % worker)
        assert peers[worker].wait_closed() == ""
        other, assignment = peers[1 - worker], assignments[1 - worker]
        other.send(other.gradient(assignment, *other.parameters.parameters[0]))
        assert isinstance(other.receive_assignment(), messages.RunEnded)

    settings = Settings(spec=RunSpec(workers=2, steps=1), checkpoint_every="0")
    served = serve(play, tmp_path, settings, alone=True)
    assert served.failure == ""
    [left] = [record for record in served.trace.records if isinstance(record, Left)][:1]
    assert (left.worker, left.reason) == (worker, "with notice")
    assert left.working_since is not None
    assert f"worker {worker} left: with notice" in capsys.readouterr().out


def test_worker_that_has_a_number_now_does_not_leave_for_one_that_had_it_before(tmp_path):
    def play(harness):
        peer = harness.connect().join(0, harness.spec, seat=b"new", session=b"new process")
        for who in ({"session": b"old"}, {"seat": b"old"}, {}):
            leave(harness, 0, **who)
        leave(harness, 1, session=b"new process")
        assignment = peer.receive_assignment()
        peer.send(peer.gradient(assignment, *peer.parameters.parameters[0]))
        assert isinstance(peer.receive_assignment(), messages.RunEnded)

    settings = Settings(spec=RunSpec(workers=1, steps=1), checkpoint_every="0")
    assert serve(play, tmp_path, settings, alone=True).failure == ""


def test_number_of_a_worker_that_left_with_notice_is_free(tmp_path):
    def play(harness):
        launcher = harness.connect()
        launcher.send(messages.ReserveNumber(b"first", RELEASE))
        assert launcher.receive().number == 0
        harness.connect().join(0, harness.spec, seat=b"first")
        leave(harness, 0, seat=b"first")
        launcher.close()
        number = None
        while number != 0:  # the server may notice later that the launcher is gone
            other = harness.connect()
            other.send(messages.ReserveNumber(b"next", RELEASE, 0))
            number = other.receive().number
            if number:
                other.close()
        peer = harness.connect().join(0, harness.spec, seat=b"next")
        assignment = peer.receive_assignment()
        peer.send(peer.gradient(assignment, *peer.parameters.parameters[0]))
        assert isinstance(peer.receive_assignment(), messages.RunEnded)

    settings = Settings(spec=RunSpec(workers=1, steps=1), checkpoint_every="0")
    assert serve(play, tmp_path, settings, alone=True).failure == ""
