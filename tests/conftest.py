# SPDX-License-Identifier: BSD-3-Clause
"""What holds for every test: no thread, no environment variable and no sleep is left to chance."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fakes import make_decider
from paceline.core.decider import Decider
from paceline.core.policy import Policy

OUR_CODE = (
    str(Path(__file__).parent),
    str(Path(__file__).parent.parent / "src"),
)

SET_BY_OTHERS = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",  # by torch, once
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # by scikit-learn, once
)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count the lines of core and simulator in their own tests alone, and not in the long ones.

    It triples the time of a simulation. The marker of pytest-cov has no effect under pytest-xdist.
    """
    counter = sys.gettrace()
    is_theirs = {"core", "sim"} & set(item.path.relative_to(Path(__file__).parent).parts)
    if not is_theirs or item.get_closest_marker("uncounted"):
        sys.settrace(None)
    yield
    sys.settrace(counter)


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(timeout=1.0)  # one that is just ending may end
    names = [thread.name for thread in left if thread.is_alive()]
    if names:
        pytest.fail(f"the test left threads behind: {', '.join(names)}")


@pytest.fixture(autouse=True)
def _the_environment_is_as_it_was() -> Iterator[None]:
    def variables() -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k not in SET_BY_OTHERS}

    before = variables()
    yield
    after = variables()
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    for name in changed:  # so that the next test is not blamed as well
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if changed:
        pytest.fail(f"the test changed the environment: {', '.join(changed)}")


@pytest.fixture(autouse=True)
def _nobody_sleeps() -> Iterator[None]:
    """Tests hold a race open with an event. The standard library may sleep (subprocess does)."""
    real_sleep = time.sleep
    slept: list[str] = []

    def sleep(seconds: float) -> None:
        caller = sys._getframe(1)
        if not caller.f_code.co_filename.startswith(OUR_CODE):
            real_sleep(seconds)
            return
        slept.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        pytest.fail(f"time.sleep({seconds}) was called in a test at {slept[-1]}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        yield
    if slept:  # also when it was called on another thread, or the failure was caught
        pytest.fail(f"the test slept at {', '.join(slept)}")


@pytest.fixture
def decide() -> Iterator[Callable[..., Decider]]:
    """Make deciders; whatever a test does with them, every invariant holds at its end."""
    made: list[Decider] = []

    def make(policy: str | Policy, workers: int = 3, **spec: Any) -> Decider:
        made.append(make_decider(policy, workers, **spec))
        return made[-1]

    yield make
    for decider in made:
        decider.check()
