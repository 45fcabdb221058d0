# SPDX-License-Identifier: BSD-3-Clause
"""The command line: parse the options, call the verb, print, exit with a code.

The verbs and their options are declared here and in `verb_options.py`, so that help is instant. The
code of a verb is in the module of its name, which is imported only when you call the verb.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from paceline.cli.exit_codes import EVERY_CODE, exit_codes_of
from paceline.cli.shared_options import accepts
from paceline.cli.verb_command import VerbCommand
from paceline.cli.verb_options import (
    CompareOptions,
    LabFiguresOptions,
    LabRunOptions,
    PlanOptions,
    RunOptions,
    ServeOptions,
    SimulateOptions,
    TraceCheckOptions,
    TraceShowOptions,
    WorkOptions,
)
from paceline.errors import PacelineError, SpecError
from paceline.interrupts import raise_on_interrupt
from paceline.release import RELEASE

__all__ = ["EXIT_FAILED", "app", "main"]

EXIT_FAILED = PacelineError.exit_code

app = typer.Typer(
    epilog=EVERY_CODE,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
trace_app = typer.Typer(
    help="Inspect the trace of a run.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(trace_app, name="trace")
lab_app = typer.Typer(
    help="Run the experiments of the papers on real data, in virtual time.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(lab_app, name="lab")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(RELEASE)
        raise typer.Exit


@app.callback()
def paceline(
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Data-parallel training for PyTorch that doesn't wait for stragglers.

    \b
    Train a script with four workers, one of them a backup:
      paceline run -w 4 -p backup:1 train.py
    Find out which rule suits it best:
      paceline compare -w 4 --epochs 10 train.py
    Each verb has its own help, with an example:
      paceline run --help
    """


@app.command(
    cls=VerbCommand,
    epilog=exit_codes_of("run"),
    context_settings={"allow_interspersed_args": False},
)
@accepts(RunOptions)
def run(options: RunOptions) -> None:
    """Train: run a script with several workers on this machine.

    Everything after the script's name is passed to the script. Stop with Ctrl-C and continue with
    --resume.

    \b
    Examples:
      paceline run -w 4 -p backup:1 --steps 100 examples/digits.py
      paceline run --resume runs/digits-1 --steps 200
    """
    _load("run").run(options, _load)


@app.command(
    cls=VerbCommand,
    epilog=exit_codes_of("serve"),
    context_settings={"allow_interspersed_args": False},
)
@accepts(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Train on several machines: start the server of a run, which workers join from anywhere.

    Prints its address. Start each worker with `paceline work`, before or after the server. Workers
    on the server's own machine share memory with it, those on other machines use TCP.

    \b
    Example:
      paceline serve -w 4 -p backup:1 --listen 10.0.0.5:29400 --token-file token train.py
    """
    _load("serve").run(options, _load)


@app.command(
    cls=VerbCommand,
    epilog=exit_codes_of("work"),
    context_settings={"allow_interspersed_args": False},
)
@accepts(WorkOptions)
def work(options: WorkOptions) -> None:
    """Start workers for a run whose server is on another machine.

    The script and its arguments must be those of the server. Waits until the server is there; it
    gives each worker a number. Workers that lose the server join again, those that die are
    restarted.

    \b
    Examples:
      paceline work --connect 10.0.0.5:29400 --token-file token train.py
      paceline work --connect 10.0.0.5:29400 --token-file token --processes 4 train.py
    """
    _load("work").run(options)


@app.command(
    cls=VerbCommand,
    epilog=exit_codes_of("compare"),
    context_settings={"allow_interspersed_args": False},
)
@accepts(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Train a script under several rules and compare them.

    The rules train one after the other. Prints a table (updates per second, staleness, dropped
    gradients, time to a target) and writes figures and a report. Use --samples or --epochs, so that
    every rule trains on the same number of samples. With --latency the table also has what the
    simulator predicts.

    \b
    Example:
      paceline compare -p sync -p backup:1 --epochs 2 -l "20ms; worker 3 x2" \\
          --target "accuracy>=0.8" examples/digits.py
    """
    _require_matplotlib("paceline compare")
    _load("compare").run(options, _load)


@app.command(cls=VerbCommand, epilog=exit_codes_of("plan"))
@accepts(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Choose the number of backup workers before you train.

    For each number N of gradients per update: the time of an update, the updates needed, and from
    these the time and the machine-hours to the target. Give the delays of your cluster with
    --latency, or the trace of a pilot run with --trace.

    \b
    Example:
      paceline plan -w 40 -l "1.4s + exp:150ms + 2% exp:1.2s"
    """
    if options.plot is not None:
        _require_matplotlib("--plot")
    _load("plan").run(options)


@app.command(cls=VerbCommand, epilog=exit_codes_of("simulate"))
@accepts(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Simulate one or several rules on a virtual clock.

    Shows what a rule would do on a cluster: updates per second, waiting, staleness, wasted work and
    traffic.

    \b
    Example:
      paceline simulate -w 40 -l "1.4s + 2% exp:1.2s" -p sync -p backup:2
    """
    if options.plot is not None:
        _require_matplotlib("--plot")
    _load("simulate").run(options)


@trace_app.command("show", cls=VerbCommand, epilog=exit_codes_of("trace show"))
@accepts(TraceShowOptions)
def trace_show(options: TraceShowOptions) -> None:
    """Describe a run in words: its progress, its stragglers, the time spent waiting, the best b.

    Works on the trace of a real or a simulated run, even while it is in progress.

    \b
    Example:
      paceline trace show runs/digits-1
    """
    _load("trace").show(options.trace, options.as_json)


@trace_app.command("check", cls=VerbCommand, epilog=exit_codes_of("trace check"))
@accepts(TraceCheckOptions)
def trace_check(options: TraceCheckOptions) -> None:
    """Replay a trace through its own rule and check that it is consistent.

    Every decision must be the one that the rule makes, and every gradient must have one fate. No
    record may be missing.

    \b
    Example:
      paceline trace check runs/digits-1
    """
    _load("trace").check(options.trace, options.as_json)


@lab_app.command("list", cls=VerbCommand, epilog=exit_codes_of("lab list"))
def lab_list() -> None:
    """List the experiments and the question that each one answers.

    \b
    Example:
      paceline lab list
    """
    _load("lab").list_experiments()


@lab_app.command("run", cls=VerbCommand, epilog=exit_codes_of("lab run"))
@accepts(LabRunOptions)
def lab_run(options: LabRunOptions) -> None:
    """Run experiments: each writes tables, a figure and a paragraph that explains the result.

    All experiments together take about four hours on two cores. Finished trials are cached: after
    Ctrl-C, run the same command again and lose at most a minute.

    \b
    Example:
      paceline lab run staleness --quick
    """
    _load("lab").run(options)


@lab_app.command("figures", cls=VerbCommand, epilog=exit_codes_of("lab figures"))
@accepts(LabFiguresOptions)
def lab_figures(options: LabFiguresOptions) -> None:
    """Redraw figures and rewrite paragraphs from the existing tables.

    \b
    Example:
      paceline lab figures staleness --quick
    """
    _load("lab").figures(options)


def _load(name: str) -> Any:
    """Import the module of a verb, and with it numpy, torch or whatever the verb needs."""
    module = import_module(f"paceline.cli.{name}")
    raise_on_interrupt()  # from now on, the verb handles it
    return module


def _require_matplotlib(what: str) -> None:
    """Raise SpecError unless figures can be drawn; call it before work that ends with a figure."""
    if find_spec("matplotlib") is None:
        raise SpecError(
            f"{what} needs matplotlib, which is not installed; "
            "install it with: pip install 'paceline[plot]'"
        )


def main() -> None:
    """Run the command line. Our own errors become one line and an exit code, not a traceback."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal can't print box characters
    try:
        try:
            app(prog_name="paceline")
        finally:
            sys.stdout.flush()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # only output fails like this: other files raise errors of our own
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or flushing at exit would fail again
        where = "the output" if error.filename is None else error.filename
        print(f"paceline: cannot write {where}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
