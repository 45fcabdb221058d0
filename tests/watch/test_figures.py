# SPDX-License-Identifier: BSD-3-Clause
"""Figures are written in the promised formats, and need matplotlib only when drawn."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import SpecError
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Trace
from paceline.watch.figures import draw_comparison, draw_plan

Drawer = Callable[[Path], None]

BEGINNINGS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}

POLICIES = [
    "sync",
    "backup:1",
    "batchsync:3",
    "deadline",
    "ssp:3",
    "delayed:1",
    "softsync:2",
    "async",
]


def draw_some_plan(path: Path, workers: int = 4, arrivals: object = None) -> None:
    needed = list(range(1, workers + 1))
    seconds = [100.0 / n + n for n in needed]
    draw_plan(
        needed=needed,
        step_s={"cancel": [0.1 * n for n in needed], "finish": [0.2 * n for n in needed]},
        seconds=seconds,
        intervals=[(s - 1, s + 1) for s in seconds],
        arrivals=arrivals,
        path=path,
    )


def run(policy: str, latency: str = "50ms + 10% exp:300ms") -> Trace:
    return simulate(policy, Cluster.parse(latency), RunSpec(workers=3, steps=15))


def draw_some_comparison(path: Path) -> None:
    draw_comparison([run("sync"), run("backup:1")], path)


DRAWERS: list[Drawer] = [draw_some_plan, draw_some_comparison]


@pytest.mark.parametrize("ending", BEGINNINGS)
@pytest.mark.parametrize("draw", DRAWERS)
def test_ending_of_the_path_chooses_the_format(draw: Drawer, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"figure.{ending}"
    draw(path)
    content = path.read_bytes()
    assert content.startswith(BEGINNINGS[ending])
    assert len(content) > 1000


@pytest.mark.parametrize("workers", [1, 40])
def test_plan_of_any_size_is_drawn(workers: int, tmp_path: Path) -> None:
    draw_some_plan(tmp_path / "plan.png", workers, arrivals=np.linspace(0.05, 1.0, 99))
    assert (tmp_path / "plan.png").stat().st_size > 1000


def test_all_policies_are_drawn_even_with_equal_times(tmp_path: Path) -> None:
    draw_comparison([run(policy, "50ms") for policy in POLICIES], tmp_path / "rules.png")
    assert (tmp_path / "rules.png").stat().st_size > 1000


def test_more_runs_than_colours_are_drawn(tmp_path: Path) -> None:
    rules = [f"softsync:{c}" for c in range(1, 13)]
    draw_comparison([run(policy) for policy in rules], tmp_path / "many.png")
    assert (tmp_path / "many.png").stat().st_size > 1000


@pytest.mark.parametrize("name", ["figure.txt", ".png"])
@pytest.mark.parametrize("draw", DRAWERS)
def test_unknown_ending_is_refused(draw: Drawer, name: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"\.png.*\.svg.*\.pdf.*" + re.escape(repr(name))):
        draw(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("draw", "place"),
    [
        (draw_some_comparison, "nowhere/figure.png"),
        (draw_some_plan, "nowhere/figure.png"),
        (draw_some_plan, "file/figure.png"),
        (draw_some_plan, "directory.png"),
    ],
)
def test_unwritable_path_is_refused(draw: Drawer, place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory.png").mkdir()
    with pytest.raises(SpecError, match=re.escape(f"cannot write {tmp_path / place}: ")):
        draw(tmp_path / place)


def test_missing_matplotlib_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # makes the import fail
    with pytest.raises(SpecError, match=re.escape("pip install 'paceline[plot]'")):
        draw_some_plan(tmp_path / "plan.png")


def test_matplotlib_is_not_imported_before_a_figure_is_drawn() -> None:
    program = "import sys, paceline.watch.figures; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
