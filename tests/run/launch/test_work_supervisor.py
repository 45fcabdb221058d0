# SPDX-License-Identifier: BSD-3-Clause
"""Decisions about the workers of one host, one by one; test_work_launcher.py has real processes."""

import signal
from pathlib import Path

import pytest

from fake_head import FakeHead, FakeProcesses
from paceline.errors import PeerLost, ProtocolError, SpecError
from paceline.run.launch import restarts
from paceline.run.launch.environment import Identity
from paceline.run.launch.stop_signals import StopSignals
from paceline.run.launch.work_supervisor import LEAVE_S, REPORT_S, WorkSupervisor
from paceline.run.net.messages import LeaveRun, ReserveNumber, WorkerUnavailable
from paceline.run.net.server_wait import LIMIT_S
from paceline.run.settings import Settings
from paceline.spec import RunSpec

WHO = Identity("tcp:10.0.0.5:29400", Path("token"), Path(), None)


@pytest.fixture(autouse=True)
def _token(tmp_path, monkeypatch):
    """With it, a launcher finds out whether the head is on its host."""
    (tmp_path / "token").write_text("a" * 64)
    monkeypatch.chdir(tmp_path)


class HostOfWorkers:
    """A supervisor with its head and its processes."""

    def __init__(self, processes=1, number=None, **options):
        self.head = FakeHead()
        self.processes = FakeProcesses()
        self.signals = StopSignals()
        who = Identity(WHO.address, WHO.token_file, WHO.run_dir, number)
        settings = Settings(spec=RunSpec(workers=processes), **options)
        self.supervisor = WorkSupervisor(
            who, settings, self.processes, self.head.link, self.signals, self.head.system
        )
        self.supervisor.start()
        self.supervisor.step()

    def begin(self, *numbers):
        """Give the seats these numbers, so that their workers start."""
        self.head.reserve(*numbers)
        self.head.report()
        self.supervisor.step()

    def exit(self, worker, code=0, error_code=0, **fields):
        self.processes.exit(f"worker {worker}", code, error_code, **fields)
        self.supervisor.step()

    def later(self, seconds=1.0):
        self.head.now += seconds
        self.supervisor.step()
        self._end_agent()

    def _end_agent(self):
        """Let the agent of several workers exit, if it was told to."""
        if (
            "agent",
            signal.SIGTERM,
        ) in self.processes.signals and "agent" in self.processes.running:
            self.processes.exit("agent")
            self.supervisor.step()

    def stop(self, number):
        self.signals.count += 1
        self.signals.last = number
        self.supervisor.step()

    @property
    def numbers(self):
        """The numbers of the workers that were started, in order."""
        return [who.worker for who in self.workers]

    @property
    def workers(self):
        """The identities of the workers that were started, in order."""
        return [who for who in self.processes.started if not who.is_agent]

    @property
    def running_workers(self):
        return [child for child in self.processes.running.values() if not child.who.is_agent]

    @property
    def end(self):
        self.supervisor.step()
        self._end_agent()
        assert self.supervisor.is_done
        return self.supervisor.exit_code()

    @property
    def unavailable(self):
        return [one for one in self.head.sent if isinstance(one, WorkerUnavailable)]


def test_workers_start_with_the_numbers_that_they_get():
    host = HostOfWorkers(2)
    assert host.numbers == []
    host.begin(1, 3)
    assert host.numbers == [1, 3]
    assert [(who.workers, len(who.seat)) for who in host.workers] == [(4, 16)] * 2
    assert host.processes.seed == 7
    assert host.head.said == [f"starting worker {n} of a run with 4 workers" for n in (1, 3)]


def test_only_the_first_worker_of_a_host_is_shown():
    host = HostOfWorkers(3)
    host.begin(4, 2, 3)
    assert [child.is_quiet for child in host.running_workers] == [False, True, True]
    assert "starting worker 4, an additional backup, of a run with 4 workers" in host.head.said


def test_fixed_number_is_asked_for():
    host = HostOfWorkers(number=2)
    [request] = [one for one in host.head.sent if isinstance(one, ReserveNumber)]
    assert (request.wanted, request.is_fixed) == (2, True)


def test_worker_that_dies_is_restarted_with_its_number():
    host = HostOfWorkers()
    host.begin(3)
    host.exit(3, -signal.SIGKILL)
    pause = f"{restarts.FIRST_PAUSE_S:g} s"  # shorter in tests
    assert host.head.said[-1] == (
        f"worker 3 was killed by SIGKILL; restarting in {pause} (attempt 1 of 5)"
    )
    host.later(0.5)
    assert host.numbers == [3, 3]
    assert len({who.seat for who in host.workers}) == 1


def test_worker_without_progress_is_given_up_and_the_head_is_told():
    host = HostOfWorkers()
    host.begin(3)
    for _ in range(6):
        host.exit(3, 1)
        host.later(30.0)
    assert host.numbers == [3] * 6
    assert host.head.said[-1] == (
        "worker 3 failed with exit code 1; gave up after 5 failed restarts"
    )
    assert host.unavailable == [WorkerUnavailable(3, "failed with exit code 1")]
    assert host.end == 1


def test_progress_gives_a_worker_more_restarts():
    host = HostOfWorkers()
    host.begin(3)
    for attempt in range(8):
        host.head.report(accepted={3: attempt})
        host.exit(3, 1)
        host.later(30.0)
    assert len(host.numbers) == 9


@pytest.mark.parametrize("fields", [{"restart": False}, {}], ids=["no restart", "broken"])
def test_worker_that_is_not_restarted_is_given_up(fields):
    """A script that writes to its read-only parameters would do so again."""
    host = HostOfWorkers(**fields)
    host.begin(3)
    host.exit(3, -signal.SIGSEGV, is_broken=not fields)
    host.later()
    assert host.numbers == [3]
    assert host.unavailable == [WorkerUnavailable(3, "was killed by SIGSEGV")]
    assert host.end == 1


def test_end_of_a_script_is_reported_before_the_launcher_ends():
    """The worker may have lost the server just before it could say so."""
    host = HostOfWorkers()
    host.begin(0)
    host.head.die()
    host.head.is_there = True
    host.exit(0)
    assert not host.supervisor.is_done
    host.later()
    host.head.report()
    host.later()
    assert host.unavailable == [WorkerUnavailable(0, "its script ended", True)]
    assert host.end == 0


@pytest.mark.parametrize("way", ["over", "gone", "late", "signal"])
def test_launcher_does_not_wait_long_for_a_head_that_needs_nothing(way):
    host = HostOfWorkers()
    host.begin(1)
    if way == "over":
        host.head.report(is_over=True)
    host.head.die()
    host.head.error = None if way == "gone" else PeerLost("no route to host")
    host.exit(1)
    host.later(REPORT_S + 1 if way == "late" else 0.1)
    if way == "signal":
        host.stop(signal.SIGTERM)
    assert host.supervisor.is_done


def test_worker_whose_number_was_taken_gets_another_one():
    host = HostOfWorkers()
    host.begin(3)
    host.exit(3, ProtocolError.exit_code, ProtocolError.exit_code)
    assert host.numbers == [3]
    host.begin(5)
    assert host.numbers == [3, 5]


def test_worker_that_was_refused_for_another_reason_is_not_started_again():
    host = HostOfWorkers()
    host.begin(3)
    host.exit(3, ProtocolError.exit_code, ProtocolError.exit_code)
    host.begin(3)
    assert host.numbers == [3]
    host.head.report(is_over=True)
    assert host.end == ProtocolError.exit_code


@pytest.mark.parametrize("code", [ProtocolError.exit_code, PeerLost.exit_code])
def test_worker_that_cannot_come_back_is_not_restarted(code):
    host = HostOfWorkers(number=3)
    host.begin(3)
    host.exit(3, code, code)
    host.later(60.0)
    assert host.numbers == [3]
    assert host.end == code


def test_wrong_token_ends_the_launcher_with_one_line():
    host = HostOfWorkers(2)
    host.head.tell(ProtocolError("the server has a different token"))
    host.supervisor.step()
    assert host.head.said == ["the server has a different token"]
    assert host.end == ProtocolError.exit_code


def test_launcher_gives_up_when_no_server_appears():
    host = HostOfWorkers()
    host.head.die()
    while not host.supervisor.is_done:
        host.later(0.5)
    assert LIMIT_S < host.head.now < LIMIT_S + 2
    assert host.head.said[-1].startswith("gave up after 10 minutes: no server at tcp:10.0.0.5")
    assert host.end == PeerLost.exit_code


def test_exit_code_is_that_of_the_only_kind_of_failure():
    host = HostOfWorkers(2, restart=False)
    host.begin(0, 1)
    host.exit(0)
    host.exit(1, SpecError.exit_code, SpecError.exit_code)
    host.later()
    assert host.end == SpecError.exit_code
    host = HostOfWorkers(2, restart=False)
    host.begin(0, 1)
    host.exit(0, 3)
    host.exit(1, SpecError.exit_code, SpecError.exit_code)
    host.later()
    assert host.end == 1


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_workers_leave_with_notice_after_a_signal(number, code):
    """The head knows it at once, also if they are in a long computation."""
    host = HostOfWorkers(2)
    host.begin(0, 1)
    seats = [who.seat for who in host.workers]
    host.stop(number)
    told = [one for one in host.head.sent if isinstance(one, LeaveRun)]
    assert told == [LeaveRun(0, seat=seats[0]), LeaveRun(1, seat=seats[1])]
    assert host.processes.signals == [("worker 0", signal.SIGTERM), ("worker 1", signal.SIGTERM)]
    host.exit(0, has_left=True)
    host.exit(1, -signal.SIGTERM)  # it was still loading its data
    assert host.end == code


def test_worker_that_left_with_notice_is_neither_restarted_nor_reported():
    """Another host may have a worker with its number."""
    host = HostOfWorkers(2)
    host.begin(0, 1)
    host.exit(1, has_left=True)
    host.later(60.0)
    assert host.numbers == [0, 1]
    assert host.unavailable == []
    host.exit(0)
    host.head.report(is_over=True)
    assert host.end == 0


def test_workers_that_do_not_leave_are_killed():
    host = HostOfWorkers()
    host.begin(0)
    host.stop(signal.SIGTERM)
    host.later(LEAVE_S - 0.1)
    assert host.processes.running
    host.later(0.2)
    host.supervisor.step()
    assert host.supervisor.is_done


def test_second_signal_kills():
    host = HostOfWorkers()
    host.begin(0)
    host.stop(signal.SIGINT)
    host.stop(signal.SIGINT)
    host.supervisor.step()
    assert host.end == 128 + signal.SIGINT


def test_signal_before_there_is_a_server_ends_the_launcher():
    host = HostOfWorkers()
    host.stop(signal.SIGINT)
    assert host.end == 128 + signal.SIGINT


def test_worker_that_waits_for_its_restart_is_not_started_after_a_signal():
    host = HostOfWorkers()
    host.begin(0)
    host.exit(0, 1)
    host.stop(signal.SIGINT)
    host.later(10.0)
    assert host.numbers == [0]
    assert host.supervisor.is_done


def test_worker_that_fails_after_the_last_update_is_not_restarted():
    host = HostOfWorkers()
    host.begin(1)
    host.head.report(is_over=True)
    host.exit(1, 1)
    assert host.end == 1


def test_worker_that_does_not_end_after_the_last_update_is_killed():
    host = HostOfWorkers(2)
    host.begin(1, 2)
    host.head.report(is_over=True, is_told=True)
    host.exit(1)
    host.later(59.0)
    assert host.processes.running
    host.later(2.0)
    host.supervisor.step()
    assert "worker 2 was still running long after the last update and was killed" in host.head.said
    assert host.end == 0


def test_nothing_is_started_after_everything_was_killed():
    host = HostOfWorkers()
    host.begin(1)
    host.supervisor.kill_all()
    host.supervisor.step()
    host.later(60.0)
    assert host.numbers == [1]


def test_several_workers_share_an_agent_that_ends_after_them():
    host = HostOfWorkers(2)
    host.begin(1, 3)
    [agent] = [who for who in host.processes.started if who.is_agent]
    assert agent.address == WHO.address
    assert [who.address for who in host.workers] == [agent.listen] * 2
    host.exit(1)
    assert host.processes.signals == []
    host.exit(3)
    assert host.processes.signals == [("agent", signal.SIGTERM)]


def test_agent_that_dies_is_restarted():
    host = HostOfWorkers(2)
    host.begin(1, 3)
    host.processes.exit("agent", -signal.SIGKILL)
    host.later()
    host.later()
    assert len([who for who in host.processes.started if who.is_agent]) == 2
    assert host.numbers == [1, 3]


def test_single_worker_needs_no_agent():
    host = HostOfWorkers()
    host.begin(1)
    assert [who.address for who in host.processes.started] == [WHO.address]
