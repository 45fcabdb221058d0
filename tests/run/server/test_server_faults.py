# SPDX-License-Identifier: BSD-3-Clause
"""Workers that are killed, that raise, or that compute nonsense: real kills on real processes."""

import pytest

from failures import assert_nothing_was_lost, counts, last_left, troubled
from paceline.run.launch import launcher
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec

STEPS = 12

MOMENTS = {
    "before it joins": """
if WORKER in (1, 3):
    strike(STROKE)
""",
    "before its first step": """
def at_step(run):
    if run.worker in (1, 3):
        strike(STROKE)
""",
    "while it computes": """
def at_step(run):
    if run.worker in (1, 3) and run.version >= 4:
        model[0].weight.register_hook(lambda grad: strike(STROKE))
""",
}

UNTIL_BOTH_ARE_STRUCK = """
at_step = globals().get("at_step", lambda run: None)

def trouble(run):
    tell(f"here-{run.worker}")
    wait_for("here-0")  # or those that are left would be fewer than N, for a moment
    wait_for("here-2")
    at_step(run)
    if run.worker == 0 and run.version == 9:  # the run does not get beyond this without it
        wait_for("struck-1")
        wait_for("struck-3")
"""


@pytest.mark.parametrize(
    ("stroke", "moment"),
    [
        ("SIGKILL", "before it joins"),
        ("SIGKILL", "before its first step"),
        ("SIGKILL", "while it computes"),
        ("SIGSTOP", "before its first step"),
        ("SIGSTOP", "while it computes"),
    ],
)
def test_any_b_workers_gone_cost_no_update_and_no_contribution(launch, moment, stroke, monkeypatch):
    # Those that are stopped for ever are killed at the end; nothing is gained by waiting for them.
    monkeypatch.setattr(launcher, "GRACE_S", 0.1)
    trouble = f"STROKE = signal.{stroke}\n" + MOMENTS[moment] + UNTIL_BOTH_ARE_STRUCK
    ran = launch(troubled(trouble), workers=4, steps=STEPS, policy="backup:2")
    assert ran.code == 0, ran.err
    assert counts(ran.trace) == [2] * STEPS
    assert_nothing_was_lost(ran.trace)
    assert ran.kept.keys() == {0, 2}
    for worker in (1, 3):
        how = "was killed by SIGKILL" if stroke == "SIGKILL" else "was still running and was killed"
        assert f"worker {worker} {how}" in ran.err
    assert "going on with" not in ran.out


def test_more_than_b_killed_go_on_with_fewer_and_say_so(launch):
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
    assert "going on with 1 worker; an update should take 2" in ran.out
    assert_nothing_was_lost(ran.trace)


def test_sync_goes_on_without_a_worker_that_was_killed(launch):
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
    assert "going on with 2 workers; an update should take 3" in ran.out
    assert last_left(ran.trace, 2).working_since is not None


def test_what_a_worker_gave_counts_even_if_it_is_killed_while_it_waits(launch):
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


def test_when_all_workers_are_killed_the_run_ends_and_fails(launch):
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
def launch_in_vain(script, tmp_path, capsys, forkserver):
    """Run a script whose server comes to a bad end, so that there is no whole trace."""

    def run(source):
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        told = {"script": str(script(source)), "arguments": (str(run_dir),), "restart": False}
        settings = Settings(spec=RunSpec(workers=2, steps=STEPS), **told)
        code = Launcher(settings, run_dir, forkserver).run()
        return code, capsys.readouterr().err

    return run


def test_when_the_server_is_killed_the_run_fails_and_nobody_is_left(launch_in_vain):
    trouble = """
def trouble(run):
    if run.worker == 0 and run.version == 3:
        os.kill(server_pid(), signal.SIGKILL)
"""
    code, err = launch_in_vain(troubled(trouble))
    assert code == 1
    assert "server was killed by SIGKILL" in err


@pytest.mark.parametrize("also_in_workers", [True, False])
def test_a_script_that_raises_in_the_server_ends_the_run(launch_in_vain, also_in_workers):
    """Workers that are still waiting for the server are not waited for."""
    trouble = f"""
if ROLE == "server" or {also_in_workers}:
    raise ValueError("out of luck")

def trouble(run):
    pass
"""
    code, err = launch_in_vain(troubled(trouble))
    assert code == 1
    assert err.count("  | ValueError: out of luck") == 1
    assert "paceline  | server failed " in err


def test_a_script_that_raises_in_every_worker_fails(launch):
    trouble = """
def trouble(run):
    raise ValueError(f"out of luck in {run.worker}")
"""
    ran = launch(troubled(trouble), workers=2, steps=STEPS)
    assert ran.code == 1
    for worker in (0, 1):
        assert f"worker {worker}  | ValueError: out of luck in {worker}" in ran.err
        assert f"worker {worker} failed with exit code 1" in ran.err
    assert counts(ran.trace) == []


def test_a_script_that_raises_in_one_worker_leaves_the_others_alone(launch):
    trouble = """
def trouble(run):
    if run.worker == 1 and run.version == 4:
        raise ValueError("out of luck")
"""
    ran = launch(troubled(trouble), workers=3, steps=STEPS)
    assert ran.code == 1
    assert "worker 1 failed with exit code 1" in ran.err
    assert counts(ran.trace) == [3] * 4 + [2] * (STEPS - 4)


def test_a_script_that_raises_in_every_worker_before_it_joins_ends_the_run(launch):
    trouble = """
if ROLE == "worker":
    raise ValueError("out of luck")
"""
    ran = launch(troubled(trouble), workers=2, steps=STEPS)
    assert ran.code == 1
    assert ran.err.count("  | ValueError: out of luck") == 1
    assert "all workers failed in the same way; ending the run" in ran.err


def test_a_gradient_that_is_not_finite_is_refused_and_its_update_is_made_of_the_others(launch):
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


def test_a_model_that_gives_nothing_but_nan_ends_the_run_with_a_reason(launch):
    trouble = """
model[0].weight.register_hook(lambda grad: grad * float("inf"))

def trouble(run):
    pass
"""
    ran = launch(troubled(trouble), workers=2, steps=STEPS)
    assert ran.code == 1
    assert "the run failed: the last 200 gradients all had a NaN or an infinity in them" in ran.err
    assert counts(ran.trace) == []
    assert "accepted" not in {gradient.fate for gradient in ran.trace.gradients()}


def test_writing_to_a_parameter_kills_that_worker_alone_and_the_launcher_explains_it(launch):
    trouble = """
def trouble(run):
    if run.worker == 1 and run.version == 4:
        model[0].weight.data.clamp_(-1, 1)
"""
    ran = launch(troubled(trouble), workers=3, steps=STEPS)
    assert ran.code == 0
    assert (
        "worker 1 was killed by SIGSEGV; its script may have written to the parameters" in ran.err
    )
    assert "in trouble" in ran.err  # the line that wrote is told, as Python's fault handler does
    assert counts(ran.trace) == [3] * 4 + [2] * (STEPS - 4)


def test_what_is_made_after_an_update_that_failed_is_not_saved(launch):
    """Under this rule an update more is in the making then, and is made."""
    trouble = """
class Breaks(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 3:
            raise ValueError("out of luck")
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
    assert saved[-1] in (1, 2)  # while one is being written, no other is begun
