# SPDX-License-Identifier: BSD-3-Clause
"""`paceline lab`: the experiments of the papers, in virtual time."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from paceline.cli.verb_options import LabFiguresOptions, LabRunOptions
from paceline.errors import SpecError
from paceline.lab.data.download import locate
from paceline.lab.experiment import Experiment, Lab, rebuild_report, run_experiment
from paceline.lab.experiments import EXPERIMENTS
from paceline.lab.extras import check_installed
from paceline.lab.trial_pool import TrialPool

__all__ = ["figures", "list_experiments", "run"]

SEEDS, QUICK_SEEDS = 3, 1


def list_experiments() -> None:
    """Print the experiments and their questions."""
    table = Table("experiment", "question", box=None, pad_edge=False)
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.question)
    Console().print(table)


def run(options: LabRunOptions) -> None:
    """Run experiments, one after the other."""
    check_installed()  # before anything is downloaded
    chosen, data = _chosen(options.names), options.data.expanduser()
    out = _tables(options.out, options.quick)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"cannot write to {out}: {error.strerror}") from error
    _fetch(chosen, data)
    try:
        for number, experiment in enumerate(chosen, start=1):
            title = f"{experiment.name} ({number} of {len(chosen)})"
            print(f"{title}: {experiment.question}", flush=True)
            with _TrialProgress(experiment.name) as progress:
                lab = Lab(
                    data=data,
                    cache=out / ".data",
                    pool=TrialPool(out / ".trials", options.jobs),
                    seeds=range(options.seeds or (QUICK_SEEDS if options.quick else SEEDS)),
                    quick=options.quick,
                    progress=progress,
                )
                paragraph = run_experiment(experiment, lab, out)
            print(_wrapped(paragraph))
            print(f"Tables and figure: {out / experiment.name}\n", flush=True)
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue", file=sys.stderr)
        raise


def figures(options: LabFiguresOptions) -> None:
    """Redraw figures and rewrite paragraphs from the existing tables."""
    check_installed()
    names, quick, out = options.names, options.quick, _tables(options.out, options.quick)
    measured = [one for one in _chosen(names) if names or any((out / one.name).glob("*.csv"))]
    if not measured:
        raise SpecError(
            f"there are no tables in {out}; create them with: paceline lab run"
            + (" --quick" if quick else "")
        )
    for experiment in measured:
        rebuild_report(experiment, out, quick=quick)
        print(out / experiment.name / "figure.png")


def _tables(out: Path, quick: bool) -> Path:
    """Return the folder for tables; a quick run must not overwrite real results."""
    return out / "quick" if quick else out


def _chosen(names: Sequence[str] | None) -> list[Experiment]:
    if unknown := [name for name in names or () if name not in EXPERIMENTS]:
        raise SpecError(f"unknown experiment {unknown[0]!r}; choose from {', '.join(EXPERIMENTS)}")
    return [EXPERIMENTS[name] for name in dict.fromkeys(names or EXPERIMENTS)]


def _fetch(experiments: Sequence[Experiment], data: Path) -> None:
    """Download all data sets first, so that a missing one doesn't fail hours later."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        for source in dict.fromkeys(source for one in experiments for source in one.needs):
            task = bar.add_task(source.path, visible=False)
            locate(data, source, partial(_show_download, bar, task, source.url))


def _show_download(bar: Progress, task: TaskID, url: str, size: int, total: int | None) -> None:
    if size == 0:
        print(f"downloading {url}", file=sys.stderr, flush=True)
    bar.update(task, completed=size, total=total, visible=True)


def _wrapped(paragraph: str) -> str:
    return "\n".join(fill(line, 100) for line in paragraph.split("\n"))


class _TrialProgress:
    """The progress of an experiment: a bar on a terminal, otherwise a line every 30 seconds."""

    LINE_EVERY_S = 30.0

    def __init__(self, name: str) -> None:
        self._name = name
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(name, total=1.0)
        self._began = self._printed_at = monotonic()
        self._total, self._share, self._first_share = 0, 0.0, 0.0

    def __enter__(self) -> "_TrialProgress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, done: int, of: int, share: float) -> None:
        """Show that `done` of `of` trials are finished, which is this share of the work."""
        text = f"{self._name}: {done} of {of} trials"
        now = monotonic()
        if of != self._total or share < self._share:  # another batch of trials
            self._began, self._first_share = now, share  # cached trials took no time
            self._bar.reset(self._task, completed=share)  # type: ignore[arg-type] # it also accepts floats
        self._total, self._share = of, share
        self._bar.update(self._task, description=text, completed=share)
        is_due = now - self._printed_at > self.LINE_EVERY_S
        if self._bar.disable and is_due and share > self._first_share:
            left_s = (now - self._began) * (1 - share) / (share - self._first_share)
            line = f"{text}, {share:.0%}; about {left_s / 60:.0f} min left"
            print(line, file=sys.stderr, flush=True)
            self._printed_at = now
