# SPDX-License-Identifier: BSD-3-Clause
"""The live panel: exact text for a given state, at any width."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from paceline.cli.panel import Panel, draw
from paceline.run.settings import Settings
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Trace, write_trace
from paceline.watch.live_numbers import Live, Moment, Slowest

MOMENT = Moment(
    version=400,
    rate=14.72,
    left_s=40.76,
    samples=12_800,
    epoch_samples=5000,
    samples_goal=None,
    contributors=7,
    wanted=7,
    gradients=3200,
    dropped=400,
    non_finite=0,
    workers=8,
    slowest=Slowest(7, 0.0921, 1.84),
    staleness=0.0,
    scalars={"loss": 0.41234, "accuracy": 0.91},
    paused="",
    restorations=0,
    lost=0,
    ended="",
    silent_s=0.2,
)

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor


def settings(
    workers: int = 8,
    steps: int | None = 1000,
    policy: str = "backup:1",
    epochs: float | None = None,
) -> Settings:
    return Settings(spec=RunSpec(workers=workers, steps=steps), policy=policy, epochs=epochs)


def drawn(moment: Moment, width: int = 80, given: Settings | None = None) -> list[str]:
    """Return the lines of the panel on a console of this width, without colours."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, legacy_windows=False)
    console.print(draw(moment, given or settings(), width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


# ---- what it shows ----


def test_panel_at_eighty_columns() -> None:
    assert drawn(MOMENT) == [
        "━━━━━━━━━━━━━━━                         update 400 of 1,000, 14.7/s, 40.8 s left",
        "backup:1, 8 of 8 workers, last update from 7 of 7 gradients, 400 dropped (12 %)",
        "slowest worker 7: 92.1 ms, 1.8 x median",
        "loss 0.4123, accuracy 0.91",
    ]


def test_narrow_terminal_puts_the_bar_on_a_separate_line() -> None:
    assert drawn(MOMENT, 40) == [
        "━━━━━━━━━━━━━━━━",
        "update 400 of 1,000, 14.7/s, 40.8 s left",
        "backup:1, 8 of 8 workers",
        "last update from 7 of 7 gradients",
        "400 dropped (12 %)",
        "slowest worker 7: 92.1 ms, 1.8 x median",
        "loss 0.4123, accuracy 0.91",
    ]


def test_sixty_four_workers_take_no_more_lines() -> None:
    many = replace(MOMENT, workers=63, contributors=60, wanted=60, slowest=Slowest(42, 1.2, 3.0))
    assert drawn(many, given=settings(workers=64, policy="backup:4"))[1:] == [
        "backup:4, 63 of 64 workers, last update from 60 of 60 gradients",
        "400 dropped (12 %), slowest worker 42: 1.2 s, 3.0 x median",
        "loss 0.4123, accuracy 0.91",
    ]


def test_goal_in_samples_has_a_bar() -> None:
    moment = replace(MOMENT, samples_goal=51_200)
    assert drawn(moment, given=settings(steps=None))[0] == (
        "━━━━━                  update 400, 12,800 of 51,200 samples, 14.7/s, 40.8 s left"
    )


def test_goal_in_epochs_has_a_bar() -> None:
    moment = replace(MOMENT, samples_goal=50_000)
    assert drawn(moment, given=settings(steps=None, epochs=10))[0] == (
        "━━━━━━━╸                        update 400, epoch 2.6 of 10, 14.7/s, 40.8 s left"
    )


def test_bar_in_epochs_is_empty_until_their_size_is_known() -> None:
    moment = replace(MOMENT, version=0, rate=None, samples=0, epoch_samples=None)
    assert drawn(moment, given=settings(steps=None, epochs=10))[0].strip() == "update 0"


def test_there_is_no_bar_if_the_script_alone_decides_when_to_end() -> None:
    moment = replace(MOMENT, left_s=None)
    assert drawn(moment, given=settings(steps=None))[0] == "update 400, epoch 2.6, 14.7/s"
    unknown = replace(moment, epoch_samples=None)
    assert drawn(unknown, given=settings(steps=None))[0] == "update 400, 14.7/s"


def test_panel_before_the_first_update() -> None:
    nothing = replace(
        MOMENT,
        version=0,
        rate=None,
        left_s=None,
        wanted=0,
        dropped=0,
        workers=2,
        slowest=None,
        scalars={},
        paused="waiting for workers",
    )
    lines = drawn(nothing)
    assert lines[0].strip() == "update 0 of 1,000"
    assert lines[1:] == ["backup:1, 2 of 8 workers", "waiting for workers"]


def test_pause_has_a_reason_and_no_rate() -> None:
    lines = drawn(replace(MOMENT, paused="1 of at least 2 workers; waits for 1"))
    assert lines[0].endswith("update 400 of 1,000")
    assert lines[-1] == "1 of at least 2 workers; waits for 1"


def test_only_long_silence_is_mentioned() -> None:
    assert drawn(replace(MOMENT, silent_s=9.0)) == drawn(MOMENT)
    assert drawn(replace(MOMENT, silent_s=31.0))[-1] == "no news for 31 s"


def test_problems_are_shown() -> None:
    state = replace(MOMENT, non_finite=3, restorations=1, lost=20, ended="stopped")
    assert drawn(state)[-1] == (
        "3 gradients not finite, 1 server restart, 20 updates lost, stopped"
    )


def test_staleness_and_a_loss_that_is_not_finite_are_shown() -> None:
    lines = drawn(replace(MOMENT, staleness=6.94, wanted=1, scalars={"loss": None}))
    assert "gradients 6.9 updates stale" in lines[1]
    assert lines[-1] == "loss not finite"


def test_lower_bound_is_marked() -> None:
    cut = replace(MOMENT, slowest=Slowest(7, 0.022, 1.84, is_bound=True))
    assert drawn(cut)[2] == "slowest worker 7: >22 ms, >1.8 x median"


def test_slightly_slower_worker_is_not_named() -> None:
    assert not any(
        "slowest" in line for line in drawn(replace(MOMENT, slowest=Slowest(7, 1, 1.05)))
    )


@pytest.mark.parametrize("width", [20, 30, 50, 64, 80, 81, 120, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    moment = replace(MOMENT, paused="a long reason " * 9, scalars={"a name " * 9: 1.0})
    assert all(len(line) <= width for line in drawn(moment, width))


def test_markup_in_names_is_shown_literally() -> None:
    assert drawn(replace(MOMENT, scalars={"[red]loss[/]": 1.0}))[-1] == "[red]loss[/] 1"


# ---- on a terminal ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def panel(terminal: Terminal, tmp_path: Path) -> Iterator[Callable[[], Panel]]:
    """Open panels on the terminal, which are closed at the end."""
    opened: list[Panel] = []

    def make() -> Panel:
        console = Console(
            file=terminal, width=80, force_terminal=True, color_system=None, legacy_windows=False
        )
        opened.append(Panel(settings(4, 60), tmp_path / "trace.jsonl", console))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_tick_draws_the_state_of_the_trace(
    panel: Callable[[], Panel], terminal: Terminal, tmp_path: Path
) -> None:
    trace = simulate("backup:1", Cluster.parse("50ms + exp:5ms"), RunSpec(workers=4, steps=60))
    thirtieth = next(i for i, r in enumerate(trace.records, 1) if getattr(r, "update", 0) == 30)
    half = Trace(trace.header, trace.records[:thirtieth])
    shown = panel()
    shown.tick()
    assert "waiting for workers" in terminal.getvalue()
    write_trace(half, tmp_path / "trace.jsonl")
    shown.tick()
    assert "update 30 of 60" in terminal.getvalue()
    write_trace(trace, tmp_path / "trace.jsonl")
    shown.tick()
    assert "update 60 of 60" in terminal.getvalue()


def test_closed_panel_restores_the_terminal(panel: Callable[[], Panel], terminal: Terminal) -> None:
    shown = panel()
    shown.tick()
    assert terminal.getvalue().startswith(HIDE)
    shown.close()
    before = terminal.getvalue()
    assert before.rindex(SHOW) > before.rindex(HIDE)
    assert before.rindex("\x1b[2K") > before.rindex("waiting for workers")  # the line is erased
    shown.close()
    assert terminal.getvalue() == before


def test_line_is_printed_literally(panel: Callable[[], Panel], terminal: Terminal) -> None:
    shown = panel()
    shown.tick()
    text = "worker 3  | [bold]loss[/bold] = 0.5 :smile: {'a': None} http://x.y " + "long " * 30
    shown.line(text, terminal)
    assert f"{text.rstrip()}" in terminal.getvalue()


def test_line_cannot_move_the_cursor(panel: Callable[[], Panel], terminal: Terminal) -> None:
    panel().line("50 %\r\x1b[2J\x1b[10;10H100 %", terminal)
    assert "\x1b[2J" not in terminal.getvalue()
    assert "\x1b[10;10H" not in terminal.getvalue()
    assert "100 %" in terminal.getvalue()


def test_line_for_a_stream_that_is_not_a_terminal_goes_to_the_stream(
    panel: Callable[[], Panel], terminal: Terminal
) -> None:
    out = io.StringIO()
    panel().line("hello \x1b[31m[red]", out)
    assert out.getvalue() == "hello \x1b[31m[red]\n"
    assert "hello" not in terminal.getvalue()


def test_panel_stays_below_printed_lines(panel: Callable[[], Panel], terminal: Terminal) -> None:
    shown = panel()
    shown.tick()
    shown.line("hello", terminal)
    after = terminal.getvalue().rpartition("hello")[2]
    assert "waiting for workers" in after


@pytest.mark.parametrize("workers", [8, 64])
def test_simulated_run_always_fits_in_a_few_lines(workers: int, tmp_path: Path) -> None:
    cluster = Cluster.parse("45ms + exp:5ms + 5% exp:500ms; worker 7 x1.8")
    trace = simulate("backup:1", cluster, RunSpec(workers=workers, steps=40))
    path = tmp_path / "trace.jsonl"
    live = Live(path)
    for tenth in range(1, 11):
        records = trace.records[: len(trace.records) * tenth // 10]
        write_trace(Trace(trace.header, records), path)
        live.read(0.0)
        lines = drawn(live.moment(0.0), given=settings(workers, 40))
        assert len(lines) <= 4
        assert all(len(line) <= 80 for line in lines)


def test_panel_names_the_workers_that_the_run_waits_for() -> None:
    waiting = replace(MOMENT, silent_s=12.0, waiting_s={2: 12.0})
    assert drawn(waiting)[-1] == "waiting for worker 2 for 12 s"
    waiting = replace(MOMENT, silent_s=12.0, waiting_s=dict.fromkeys(range(6), 61.0))
    assert drawn(waiting)[-1] == "waiting for 6 workers for 61 s"
