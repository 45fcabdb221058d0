# SPDX-License-Identifier: BSD-3-Clause
"""A worker gets SIGTERM: it says goodbye and exits with code 0, wherever it is; real processes."""

import pytest

from failures import assert_nothing_was_lost, joins_and_leaves, troubled
from paceline.trace.schema import Left

STEPS = 12

HELP = """
def go():
    tell("went", os.getpid())
    os.kill(os.getpid(), signal.SIGTERM)

def is_time(run):
    return run.worker == WHO and run.version == 4 and not was_told("went")
"""

IN_THE_LOOP = """
def trouble(run):
    if is_time(run):
        go()
"""

IN_A_BACKWARD_PASS = """
def trouble(run):
    if is_time(run):
        parameter = next(model.parameters())
        parameter.register_hook(lambda gradient: go())
"""

IN_A_WAIT = """
def trouble(run):
    if is_time(run):
        os.system(f"kill -TERM {os.getpid()}")
        tell("went")
        threading.Event().wait()

import threading
"""

CAUGHT = """
def trouble(run):
    if is_time(run):
        try:
            go()
        except BaseException:
            tell("caught")
"""


def source(place, who=1):
    return troubled(HELP.replace("WHO", str(who)) + place)


@pytest.mark.parametrize(
    "place",
    [IN_THE_LOOP, IN_A_BACKWARD_PASS, IN_A_WAIT, CAUGHT],
    ids=["loop", "backward", "wait", "caught"],
)
def test_worker_says_goodbye_and_the_run_goes_on_without_it(launch, place):
    ran = launch(source(place), workers=3, steps=STEPS)
    assert ran.code == 0, ran.err
    assert joins_and_leaves(ran.trace, 1) == ["joined", "with notice"]
    [left] = [one for one in ran.trace.records if isinstance(one, Left)][:1]
    assert left.working_since is not None
    assert "worker 1 left: with notice" in ran.out
    assert "restarting" not in ran.err
    assert "worker 1 failed" not in ran.err
    assert_nothing_was_lost(ran.trace)
    assert sorted(ran.kept) == [0, 2]


def test_first_worker_that_leaves_is_missed_at_the_end(launch):
    """What the script does only once isn't done."""
    ran = launch(source(IN_THE_LOOP, who=0), workers=3, steps=STEPS)
    assert ran.code == 1
    assert joins_and_leaves(ran.trace, 0) == ["joined", "with notice"]
    assert "worker 0 was lost, so what the script does only once" in ran.err
    assert [update.update for update in ran.trace.updates()][-1] == STEPS


def test_worker_that_has_not_joined_just_exits(launch):
    before = "if ROLE == 'worker' and WORKER == 1 and not was_told('went'): go()\n"
    early = "paceline.join()\nsettle = None\n"
    place = "def trouble(run): pass\n" + HELP + early.replace("settle = None", before.strip())
    ran = launch(troubled(place), workers=2, steps=STEPS)
    assert ran.code == 0, ran.err
    assert joins_and_leaves(ran.trace, 1) == []
    assert "restarting" not in ran.err


FORKS = """
def trouble(run):
    if run.worker == 1 and run.version == 4 and not was_told("forked"):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        os.kill(pid, signal.SIGTERM)
        tell("forked", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_processes_that_a_script_forks_die_of_the_signal_as_usual(launch, tmp_path):
    ran = launch(troubled(FORKS), workers=2, steps=STEPS)
    assert ran.code == 0, ran.err
    assert (ran.folder / "forked.word").read_text() == "-15"
    assert joins_and_leaves(ran.trace, 1)[:1] == ["joined"]
    assert "with notice" not in ran.out


OWN_HANDLER = """
signal.signal(signal.SIGTERM, lambda *_: tell(f"handled-{WORKER}"))

def trouble(run):
    if run.worker == 1 and run.version == 4:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for("handled-1")
"""


def test_script_may_handle_the_signal_itself(launch):
    ran = launch(troubled(OWN_HANDLER), workers=2, steps=STEPS)
    assert ran.code == 0, ran.err
    assert "with notice" not in ran.out
