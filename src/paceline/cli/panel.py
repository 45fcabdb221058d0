# SPDX-License-Identifier: BSD-3-Clause
"""A live panel at the bottom of the terminal that shows the state of a run.

It is drawn on standard error from the trace alone, whenever `tick` is called, without a thread. The
output of processes goes above it. When it is closed it disappears, and the report of the run takes
its place.
"""

from pathlib import Path
from time import monotonic
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live as Screenful
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.run.settings import Settings
from paceline.watch.live_numbers import Live, Moment
from paceline.watch.words import human_seconds, named_workers, percent, plural, three_digits

__all__ = ["Panel", "draw"]

NARROW = 64  # columns; with fewer, the progress bar gets a separate line
BAR_MIN = 8  # columns
SILENT_S = 10.0  # mention it if nothing happened for this long
SLOWER = 1.1  # mention a worker that takes this many times the median
SCALARS_MAX = 6
NAMED = 5  # workers that are listed

Part = tuple[str, str]  # text and style


class Panel:
    """Shows the state of a run at the bottom of the terminal."""

    def __init__(self, settings: Settings, trace: Path, console: Console | None = None) -> None:
        self._settings = settings
        self._console = Console(stderr=True) if console is None else console
        self._live = Live(trace)
        self._screen = Screenful(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._screen.start()

    def line(self, text: str, to: TextIO) -> None:
        """Print a line above the panel, or to its stream if that isn't a terminal."""
        if not (to.isatty() and self._console.is_terminal):
            to.write(f"{text}\n")
            to.flush()
            return
        # Keep colours, but remove whatever would move the cursor.
        self._console.print(
            Text.from_ansi(text), soft_wrap=True, markup=False, highlight=False, emoji=False
        )

    def tick(self) -> None:
        """Read what is new in the trace, and redraw."""
        now = monotonic()
        self._live.read(now)
        moment = self._live.moment(now)
        self._screen.update(draw(moment, self._settings, self._console.width), refresh=True)

    def close(self) -> None:
        """Remove the panel and restore the terminal."""
        self._screen.stop()


def draw(moment: Moment, settings: Settings, width: int) -> RenderableType:
    """Return the panel for a terminal of this width."""
    lines: list[RenderableType] = []
    head, share = _head(moment, settings), _share(moment, settings)
    if share is None:
        lines += _pack(head, width)
    else:
        lines += _with_bar(ProgressBar(1.0, share), head, width)
    lines += _pack(_work(moment, settings), width)
    lines += _pack(_logged(moment), width)
    lines += _pack(_problems(moment), width)
    return Group(*lines)


def _share(moment: Moment, settings: Settings) -> float | None:
    """Return which share of its goal the run has reached; None: the script alone decides."""
    shares = []
    if settings.spec.steps is not None:
        shares.append(moment.version / settings.spec.steps)
    if moment.samples_goal is not None:
        shares.append(moment.samples / moment.samples_goal)
    elif settings.epochs is not None:  # the server doesn't know yet how large an epoch is
        shares.append(0.0)
    return min(1.0, max(shares)) if shares else None


def _with_bar(bar: ProgressBar, head: list[Part], width: int) -> list[RenderableType]:
    """Return the progress bar and its numbers, on one line if they fit."""
    numbers = _join(head)
    is_wide = width >= max(NARROW, numbers.cell_len + 2 + BAR_MIN)
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(ratio=1)
    if is_wide:
        grid.add_column(no_wrap=True)
        grid.add_row(bar, numbers)
        return [grid]
    grid.add_row(bar)
    return [grid, *_pack(head, width)]


def _head(moment: Moment, settings: Settings) -> list[Part]:
    """Return the progress, the rate and the remaining time."""
    steps = settings.spec.steps
    of = "" if steps is None else f" of {steps:,}"
    parts = [(f"update {moment.version:,}{of}", "bold"), *_amount(moment, settings)]
    if moment.rate is not None and not moment.paused:
        parts.append((f"{three_digits(moment.rate)}/s", ""))
        if moment.left_s:
            parts.append((f"{human_seconds(moment.left_s)} left", ""))
    return parts


def _amount(moment: Moment, settings: Settings) -> list[Part]:
    """Return how much data has been used: in epochs if their size is known, else in samples."""
    goal, epochs, size = moment.samples_goal, settings.epochs, moment.epoch_samples
    if settings.spec.steps is not None:
        return []
    if epochs is not None and goal is not None:
        return [(f"epoch {moment.samples / goal * epochs:.1f} of {epochs:g}", "")]
    if goal is not None:
        return [(f"{moment.samples:,} of {goal:,} samples", "")]
    return [] if size is None else [(f"epoch {moment.samples / size:.1f}", "")]


def _work(moment: Moment, settings: Settings) -> list[Part]:
    """Return the number of workers, the share of dropped gradients, and the slowest worker."""
    parts = [(f"{settings.policy}", "bold")]
    parts.append((f"{moment.workers} of {plural(settings.spec.workers, 'worker')}", ""))
    if moment.wanted > 1:
        few = moment.contributors < moment.wanted
        words = f"last update from {moment.contributors} of {plural(moment.wanted, 'gradient')}"
        parts.append((words, "yellow" if few else ""))
    if moment.dropped:
        parts.append((f"{moment.dropped:,} dropped ({percent(moment.dropped_share)})", ""))
    if moment.staleness:
        parts.append((f"gradients {moment.staleness:.1f} updates stale", ""))
    slowest = moment.slowest
    if slowest is not None and slowest.ratio >= SLOWER:
        least = ">" if slowest.is_bound else ""
        took, ratio = human_seconds(slowest.mean_s), f"{slowest.ratio:.1f} x median"
        parts.append((f"slowest worker {slowest.worker}: {least}{took}, {least}{ratio}", ""))
    return parts


def _logged(moment: Moment) -> list[Part]:
    """Return what the scripts logged last."""
    shown = list(moment.scalars.items())[:SCALARS_MAX]
    return [
        (f"{name} not finite", "red") if value is None else (f"{name} {value:.4g}", "cyan")
        for name, value in shown
    ]


def _problems(moment: Moment) -> list[Part]:
    """Return what is wrong, or why nothing happens."""
    parts = []
    if moment.non_finite:
        parts.append((f"{plural(moment.non_finite, 'gradient')} not finite", "red"))
    if moment.restorations:
        lost = f"{plural(moment.lost, 'update')} lost" if moment.lost else "nothing lost"
        parts.append((f"{plural(moment.restorations, 'server restart')}, {lost}", "yellow"))
    if moment.ended:
        parts.append((moment.ended, "bold"))
    elif moment.paused:
        parts.append((moment.paused, "yellow"))
    elif moment.waiting_s:
        longest = human_seconds(max(moment.waiting_s.values()))
        named = named_workers(sorted(moment.waiting_s), NAMED)
        parts.append((f"waiting for {named[0].lower()}{named[1:]} for {longest}", "yellow"))
    elif moment.silent_s >= SILENT_S:
        parts.append((f"no news for {human_seconds(moment.silent_s)}", "yellow"))
    return parts


def _join(parts: list[Part]) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    for i, (words, style) in enumerate(parts):
        text.append(f"{', ' if i else ''}")
        text.append(words, style)
    return text


def _pack(parts: list[Part], width: int) -> list[Text]:
    """Pack parts into lines of this width; a part that is too long for a line is cut."""
    lines: list[list[Part]] = []
    for part in parts:
        if lines and _join([*lines[-1], part]).cell_len <= width:
            lines[-1].append(part)
        else:
            lines.append([part])
    return [_join(line) for line in lines]
