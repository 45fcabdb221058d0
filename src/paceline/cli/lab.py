# SPDX-License-Identifier: BSD-3-Clause
"""`paceline lab`: the papers' experiments, in virtual time."""

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

from paceline.errors import SpecError
from paceline.lab.bench import Bench
from paceline.lab.data.files import locate
from paceline.lab.experiment import Experiment, Lab, make_again, run_experiment
from paceline.lab.experiments import EXPERIMENTS

__all__ = ["figures", "list_experiments", "run"]

SEEDS, QUICK_SEEDS = 3, 1


def list_experiments() -> None:
    """Say what there is."""
    table = Table("experiment", "question", box=None, pad_edge=False)
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.question)
    Console().print(table)


def run(
    names: Sequence[str] | None,
    quick: bool,
    seeds: int | None,
    jobs: int | None,
    data: Path,
    out: Path,
) -> None:
    """Run experiments, one after the other."""
    chosen, data, out = _chosen(names), data.expanduser(), _tables(out, quick)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"nothing can be written into {out} ({error.strerror})") from error
    _fetch(chosen, data)
    try:
        for number, experiment in enumerate(chosen, start=1):
            place = f"{experiment.name} ({number} of {len(chosen)})"
            print(f"{place}: {experiment.question}", flush=True)
            with _Shown(experiment.name) as shown:
                lab = Lab(
                    data=data,
                    cache=out / ".data",
                    bench=Bench(out / ".trials", jobs),
                    seeds=range(seeds or (QUICK_SEEDS if quick else SEEDS)),
                    quick=quick,
                    progress=shown,
                )
                paragraph = run_experiment(experiment, lab, out)
            print(_wrapped(paragraph))
            print(f"Tables and figure are in {out / experiment.name}\n", flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        raise


def figures(names: Sequence[str] | None, quick: bool, out: Path) -> None:
    """Make figures and paragraphs again from the tables that are there."""
    out = _tables(out, quick)
    measured = [one for one in _chosen(names) if names or any((out / one.name).glob("*.csv"))]
    if not measured:
        raise SpecError(
            f"there are no tables in {out}; measure first: paceline lab run"
            + (" --quick" if quick else "")
        )
    for experiment in measured:
        make_again(experiment, out, quick=quick)
        print(out / experiment.name / "figure.png")


def _tables(out: Path, quick: bool) -> Path:
    """Where tables are; those of a quick look must not replace what was measured."""
    return out / "quick" if quick else out


def _chosen(names: Sequence[str] | None) -> list[Experiment]:
    if unknown := [name for name in names or () if name not in EXPERIMENTS]:
        raise SpecError(
            f"there is no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}"
        )
    return [EXPERIMENTS[name] for name in dict.fromkeys(names or EXPERIMENTS)]


def _fetch(experiments: Sequence[Experiment], data: Path) -> None:
    """Have all the data before hours are spent on a part of it."""
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
            locate(data, source, partial(_tell_fetched, bar, task, source.url))


def _tell_fetched(bar: Progress, task: TaskID, url: str, size: int, total: int | None) -> None:
    if size == 0:
        print(f"fetching {url}", file=sys.stderr, flush=True)
    bar.update(task, completed=size, total=total, visible=True)


def _wrapped(paragraph: str) -> str:
    return "\n".join(fill(line, 100) for line in paragraph.split("\n"))


class _Shown:
    """How far an experiment has come: a bar on a terminal, otherwise a line now and then."""

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
        self._began = self._told = monotonic()
        self._of, self._share, self._first = 0, 0.0, 0.0

    def __enter__(self) -> "_Shown":
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
        """So many trials are done, and this share of all the work."""
        text = f"{self._name}: {done} of {of} trials"
        now = monotonic()
        if of != self._of or share < self._share:  # others than before
            self._began, self._first = now, share  # what is remembered took no time
            self._bar.reset(self._task, completed=share)  # type: ignore[arg-type] # typed too narrowly
        self._of, self._share = of, share
        self._bar.update(self._task, description=text, completed=share)
        if self._bar.disable and now - self._told > self.LINE_EVERY_S and share > self._first:
            left = (now - self._began) * (1 - share) / (share - self._first)
            line = f"{text}, {share:.0%}; {left / 60:.0f} min left of these"
            print(line, file=sys.stderr, flush=True)
            self._told = now
