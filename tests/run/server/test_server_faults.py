# SPDX-License-Identifier: BSD-3-Clause
"""Workers are killed, raise, or compute nonsense: real kills of real processes."""

import pytest

from failures import assert_nothing_was_lost, counts, last_left, troubled
from paceline.run.launch import supervisor
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec

STEPS = 12

MOMENTS = {
    "before it joins": """
if WORKER in (1, 3):
    strike(SIGNAL)
""",
    "before its first step": """
def at_step(run):
    if run.worker in (1, 3):
        strike(SIGNAL)
""",
    "while it computes": """
def at_step(run):
    if run.worker in (1, 3) and run.version >= 4:
        model[0].weight.register_hook(lambda grad: strike(SIGNAL))
""",
}

WAIT_FOR_BOTH_SIGNALS = """
at_step = globals().get("at_step", lambda run: None)

def trouble(run):
    tell(f"here-{run.worker}")
    wait_for("here-0")  # or fewer than N workers would be left for a moment
    wait_for("here-2")
    at_step(run)
    if run.worker == 0 and run.version == 9:  # the run needs this worker to continue
        wait_for("struck-1")
        wait_for("struck-3")
"""


@pytest.mark.parametrize(
    ("signal_name", "moment"),
    [
        ("SIGKILL", "before it joins"),
        ("SIGKILL", "before its first step"),
        ("SIGKILL", "while it computes"),
        ("SIGSTOP", "before its first step"),
        ("SIGSTOP", "while it computes"),
    ],
)
def test_losing_any_b_workers_costs_no_update_and_no_contribution(
    launch, moment, signal_name, monkeypatch
):
    # Stopped workers are killed at the end; don't wait long for them.
    monkeypatch.setattr(supervisor, "GRACE_S", 0.1)
    trouble = f"SIGNAL = signal.{signal_name}\n" + MOMENTS[moment] + WAIT_FOR_BOTH_SIGNALS
    ran = launch(troubled(trouble), workers=4, steps=STEPS, policy="backup:2")
    assert ran.code == 0, ran.err
    assert counts(ran.trace) == [2] * STEPS
    assert_nothing_was_lost(ran.trace)
    assert ran.kept.keys() == {0, 2}
    for worker in (1, 3):
        was_killed = signal_name == "SIGKILL"
        how = "was killed by SIGKILL" if was_killed else "was still running and was killed"
        assert f"worker {worker} {how}" in ran.err
    assert "continuing with" not in ran.out


def test_run_continues_with_fewer_workers_if_more_than_b_are_killed(launch):
    trouble = """
def trouble(run):
    if run.worker in (1, 2) and run.version >= 3:
        strike()
    if run.worker == 0 and run.version == 9:
        wait_for("struck-1")
        wait_for("struck-2")
"""
    ran = launch(troubled(trouble), workers=3, steps=STEPS, policy="backup:1")
    assert ran.code == 0, ran.err
    assert len(counts(ran.trace)) == STEPS
    assert counts(ran.trace)[:3] == [2] * 3
    last = list(ran.trace.updates())[-1]
    assert (last.contributors, last.wanted) == ((0,), 2)
    assert "continuing with 1 worker; an update should take 2" in ran.out
    assert_nothing_was_lost(ran.trace)


def test_sync_continues_without_a_worker_that_was_killed(launch):
    trouble = """
def trouble(run):
    if run.worker == 2 and run.version == 5:
        strike()
"""
    ran = launch(troubled(trouble), workers=3, steps=STEPS)
    assert ran.code == 0, ran.err
    assert counts(ran.trace) == [3] * 5 + [2] * (STEPS - 5)
    assert {update.wanted for update in ran.trace.updates()} == {3}
    assert "worker 2 left: " in ran.out
    assert "continuing with 2 workers; an update should take 3" in ran.out
    assert last_left(ran.trace, 2).working_since is not None


def test_gradient_counts_even_if_its_worker_is_killed_while_it_waits(launch):
    trouble = """
tell(f"pid-{WORKER}", os.getpid())

def trouble(run):
    if run.worker == 0 and run.version == 5:
        wait_until(lambda: in_the_trace(type="gradient", worker=1, version=5))
        os.kill(int(wait_for("pid-1")), signal.SIGKILL)
        wait_until(lambda: in_the_trace(type="left", worker=1))
"""
    ran = launch(troubled(trouble), workers=2, steps=STEPS)
    assert ran.code == 0, ran.err
    assert counts(ran.trace) == [2] * 6 + [1] * (STEPS - 6)
    assert last_left(ran.trace, 1).working_since is None
    assert_nothing_was_lost(ran.trace)


def test_run_fails_if_all_workers_are_killed(launch):
    trouble = """
def trouble(run):
    if run.version == 3:
        strike()
"""
    ran = launch(troubled(trouble), workers=2, steps=STEPS)
    assert ran.code == 1
    assert counts(ran.trace) == [2] * 3
    assert ran.trace.records[-1].version == 3


@pytest.fixture
def launch_to_fail(script, tmp_path, capsys, forkserver):
    """Run a script whose server dies, so that there is no complete trace."""

    def run(source):
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        options = {"script": str(script(source)), "arguments": (str(run_dir),), "restart": False}
        settings = Settings(spec=RunSpec(workers=2, steps=STEPS), **options)
        code = Launcher(settings, run_dir, forkserver).run()
        return code, capsys.readouterr().err

    return run


def test_run_fails_if_the_server_is_killed(launch_to_fail):
    trouble = """
def trouble(run):
    if run.worker == 0 and run.version == 3:
        os.kill(server_pid(), signal.SIGKILL)
"""
    code, err = launch_to_fail(troubled(trouble))
    assert code == 1
    assert "server was killed by SIGKILL" in err


@pytest.mark.parametrize("also_in_workers", [True, False])
def test_script_that_raises_in_the_server_ends_the_run(launch_to_fail, also_in_workers):
    """The launcher doesn't wait for workers that wait for the server."""
    trouble = f"""
if ROLE == "server" or {also_in_workers}:
    raise ValueError("bad luck")

def trouble(run):
    pass
"""
    code, err = launch_to_fail(troubled(trouble))
    assert code == 1
    assert err.count("  | ValueError: bad luck") == 1
    assert "paceline  | server failed " in err


def test_run_fails_if_the_script_raises_in_every_worker(launch):
    trouble = """
def trouble(run):
    raise ValueError(f"bad luck in {run.worker}")
"""
    ran = launch(troubled(trouble), workers=2, steps=STEPS)
    assert ran.code == 1
    for worker in (0, 1):
        assert f"worker {worker}  | ValueError: bad luck in {worker}" in ran.err
        assert f"worker {worker} failed with exit code 1" in ran.err
    assert counts(ran.trace) == []


def test_script_that_raises_in_one_worker_does_not_affect_the_others(launch):
    trouble = """
def trouble(run):
    if run.worker == 1 and run.version == 4:
        raise ValueError("bad luck")
"""
    ran = launch(troubled(trouble), workers=3, steps=STEPS)
    assert ran.code == 1
    assert "worker 1 failed with exit code 1" in ran.err
    assert counts(ran.trace) == [3] * 4 + [2] * (STEPS - 4)


def test_script_that_raises_in_every_worker_before_it_joins_ends_the_run(launch):
    trouble = """
if ROLE == "worker":
    raise ValueError("bad luck")
"""
    ran = launch(troubled(trouble), workers=2, steps=STEPS)
    assert ran.code == 1
    assert ran.err.count("  | ValueError: bad luck") == 1
    assert "all workers failed in the same way; ending the run" in ran.err


def test_non_finite_gradient_is_refused_and_the_update_is_made_of_the_others(launch):
    trouble = """
model[0].weight.register_hook(
    lambda grad: grad * float("nan") if run.worker == 2 and run.version % 2 else grad
)

def trouble(run):
    pass
"""
    ran = launch(troubled(trouble), workers=3, steps=STEPS)
    assert ran.code == 0, ran.err
    both = [(0, 1, 2), (0, 1)]
    assert [tuple(sorted(u.contributors)) for u in ran.trace.updates()] == both * (STEPS // 2)
    refused = {g.version for g in ran.trace.gradients() if g.fate == "non-finite"}
    assert refused == set(range(1, STEPS, 2))
    assert all(weight.isfinite().all() for weight in ran.kept[2]["weights"])


def test_run_fails_if_all_gradients_are_non_finite(launch):
    trouble = """
model[0].weight.register_hook(lambda grad: grad * float("inf"))

def trouble(run):
    pass
"""
    ran = launch(troubled(trouble), workers=2, steps=STEPS)
    assert ran.code == 1
    assert "the run failed: the last 200 gradients all contained NaN or infinity" in ran.err
    assert counts(ran.trace) == []
    assert "accepted" not in {gradient.fate for gradient in ran.trace.gradients()}


def test_versions_after_a_failed_update_are_not_saved(launch):
    """Under this rule another update is pending then, and is made."""
    trouble = """
class Breaks(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 3:
            raise ValueError("bad luck")
        return super().step(closure)

optimizer = Breaks(model.parameters(), lr=0.1)
turn = 0

def trouble(run):
    global turn
    turn += 1
    if run.worker == 1 and turn == 3:
        wait_until(lambda: in_the_trace(type="gradient", worker=0, turn=4))
"""
    ran = launch(troubled(trouble), steps=20, policy="delayed:2", checkpoint_every="1")
    assert ran.code == 1
    assert [update.update for update in ran.trace.updates()][-1] > 3
    saved = sorted(int(path.stem) for path in (ran.folder / "checkpoints").glob("*.ckpt"))
    assert saved[-1] in (1, 2)  # no checkpoint begins while another is being written
