# SPDX-License-Identifier: BSD-3-Clause
"""`paceline lab`: the papers' experiments, in virtual time."""

import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from time import monotonic
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from paceline.errors import SpecError
from paceline.lab.bench import Bench
from paceline.lab.experiment import Experiment, Lab, make_again, run_experiment
from paceline.lab.experiments import EXPERIMENTS

__all__ = ["figures", "list_experiments", "run"]

QUICK_SEEDS = 1


def list_experiments() -> None:
    """Say what there is."""
    table = Table("experiment", "question", box=None, pad_edge=False)
    for experiment in EXPERIMENTS.values():
        table.add_row(experiment.name, experiment.question)
    Console().print(table)


def run(
    names: Sequence[str] | None, quick: bool, seeds: int, jobs: int | None, data: Path, out: Path
) -> None:
    """Run experiments, one after the other."""
    chosen = _chosen(names or ())
    if quick:  # a look at the directions, which must not replace what was measured
        out = out / "quick"
    for number, experiment in enumerate(chosen, start=1):
        print(f"{experiment.name} ({number} of {len(chosen)}): {experiment.question}", flush=True)
        with _Shown(experiment.name) as shown:
            lab = Lab(
                data=data.expanduser(),
                cache=out / ".data",
                bench=Bench(out / ".trials", jobs),
                seeds=range(QUICK_SEEDS if quick else seeds),
                quick=quick,
                progress=shown,
            )
            paragraph = run_experiment(experiment, lab, out)
        print(_wrapped(paragraph))
        print(f"Tables and figure are in {out / experiment.name}\n")


def figures(names: Sequence[str] | None, out: Path) -> None:
    """Make figures and paragraphs again from the tables that are there."""
    chosen = _chosen(names or ())
    measured = [one for one in chosen if names or (out / one.name).is_dir()]
    if not measured:
        raise SpecError(f"there are no tables in {out}; measure first: paceline lab run")
    for experiment in measured:
        make_again(experiment, out)
        print(out / experiment.name / "figure.png")


def _chosen(names: Sequence[str]) -> list[Experiment]:
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        raise SpecError(
            f"there is no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}"
        )
    return [EXPERIMENTS[name] for name in names or EXPERIMENTS]


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
        self._of, self._share = 0, 0.0

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
            self._began = now
            self._bar.reset(self._task)
        self._of, self._share = of, share
        self._bar.update(self._task, description=text, completed=share)
        if self._bar.disable and now - self._told > self.LINE_EVERY_S and share > 0:
            left = (now - self._began) * (1 / share - 1)
            print(f"{text}, {share:.0%}; {left / 60:.0f} min left", file=sys.stderr, flush=True)
            self._told = now
