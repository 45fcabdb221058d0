# SPDX-License-Identifier: BSD-3-Clause
"""Rules for every test: it leaves no thread, changes no environment variable and never sleeps."""

import gc
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from fakes import make_decider
from paceline import core, sim
from paceline.core.decider import Decider
from paceline.core.policy import Policy

# As plugins, they serve several folders, and one fork server is enough for all of them.
pytest_plugins = ["cli_fixtures", "data_fixtures", "run_fixtures"]

# A busy machine must not fail a test.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

# Tests of a closed terminal need it, also if they were started with `nohup`.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What is imported stays. Looking for garbage among it would double the time of the imports.
gc.disable()

OUR_CODE = (
    str(Path(__file__).parent),
    str(Path(__file__).parent.parent / "src"),
)

SET_BY_OTHERS = (
    "PYTEST_CURRENT_TEST",
    "TORCHINDUCTOR_CACHE_DIR",  # set once by torch
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # set once by scikit-learn
)


@contextmanager
def without_coverage() -> Iterator[None]:
    """Measure no coverage for a while; it slows everything down."""
    tracer, tracer_of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type] # turns it off
    yield
    sys.settrace(tracer)
    threading.settrace(tracer_of_threads)  # type: ignore[arg-type] # None turns it off


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Measure coverage of the measured modules' own import, but not while tests are collected."""
    for package in (core, sim):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    with without_coverage():
        yield
    gc.enable()
    gc.freeze()  # neither does any test need to look for garbage there


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure coverage only in the tests of core and sim, except the long ones.

    Coverage triples the time of a simulation, and pytest-cov's own marker has no effect under
    pytest-xdist.
    """
    is_covered = {"core", "sim"} & set(item.path.relative_to(Path(__file__).parent).parts)
    if is_covered and not item.get_closest_marker("uncounted"):
        yield
    else:
        with without_coverage():
            yield


@pytest.fixture(autouse=True)
def _no_leftover_threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(timeout=1.0)  # let it finish if it is about to
    names = [thread.name for thread in left if thread.is_alive()]
    if names:
        pytest.fail(f"the test left threads behind: {', '.join(names)}")


@pytest.fixture(autouse=True)
def _unchanged_environment() -> Iterator[None]:
    def variables() -> dict[str, str]:
        return {k: v for k, v in os.environ.items() if k not in SET_BY_OTHERS}

    before = variables()
    yield
    after = variables()
    changed = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    for name in changed:  # restore it, or the next test would fail too
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    if changed:
        pytest.fail(f"the test changed the environment: {', '.join(changed)}")


@pytest.fixture(autouse=True)
def _no_sleep() -> Iterator[None]:
    """Fail tests that sleep: use an event instead. The standard library may (subprocess does)."""
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
    if slept:  # it was called on another thread, or the test caught the failure
        pytest.fail(f"the test slept at {', '.join(slept)}")


@pytest.fixture
def decide() -> Iterator[Callable[..., Decider]]:
    """Create deciders, and check all of their invariants when the test ends."""
    made: list[Decider] = []

    def make(policy: str | Policy, workers: int = 3, **spec: Any) -> Decider:
        made.append(make_decider(policy, workers, **spec))
        return made[-1]

    yield make
    for decider in made:
        decider.check()
