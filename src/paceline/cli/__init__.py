# SPDX-License-Identifier: BSD-3-Clause
"""The command line: parse, call, print, exit code.

The options of every verb are declared here, so that help comes at once; what a verb does is in the
file of its name, which is loaded when the verb is called.
"""

import os
import sys
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import options
from paceline.errors import PacelineError
from paceline.release import RELEASE

__all__ = ["EXIT_FAILED", "app", "main"]

EXIT_FAILED = PacelineError.exit_code

EPILOG = (
    "Exit codes: 0 done; 1 the run stalled, failed or made no update, a script failed, or the "
    "output could not be written; 2 wrong input; 3 a trace that cannot be read or written, or is "
    "not sound; 4 (of a process of a run alone) the server refused it; 5 (likewise) it lost the "
    "server; 6 a checkpoint that cannot be read, or is of another script; 70 a bug of ours; 128 + "
    "the number of the signal that stopped a run, so 130 at Ctrl-C."
)

app = typer.Typer(
    help="Data-parallel training that does not wait for slow workers: plan it before you run it.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
trace_app = typer.Typer(
    help="Look into traces.", epilog=EPILOG, no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(trace_app, name="trace")
lab_app = typer.Typer(
    help="The experiments of the papers, on real data, in virtual time.",
    epilog=EPILOG,
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
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say which."),
    ] = False,
) -> None:
    """Data-parallel training that does not wait for slow workers: plan it before you run it."""


@app.command(epilog=EPILOG)
def simulate(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            help="The rule; give it several times to compare: sync, backup:b, batchsync:k, "
            "deadline:q, async, softsync:c, ssp:s, delayed:k. Without it: a round of them.",
        ),
    ] = None,
    workers: options.Workers = None,
    latency: options.Latency = None,
    steps: Annotated[
        int | None,
        typer.Option(help="How many updates to make. [default: 1000, or no limit with --until]"),
    ] = None,
    until: Annotated[
        str,
        typer.Option(
            help="Stop at this virtual time, e.g. 10m, once the update in the making is made."
        ),
    ] = "",
    replay: Annotated[
        Path | None,
        typer.Option(
            help="What if: take the very computation times of this recorded run, its trace or its "
            "folder."
        ),
    ] = None,
    network: options.Network = "",
    faults: options.Faults = "",
    late: options.Late = "cancel",
    batch: options.Batch = 32,
    min_workers: Annotated[int, typer.Option(help="With fewer alive the run pauses.")] = 1,
    seed: options.Seed = 0,
    save: Annotated[
        Path | None, typer.Option(help="Save the trace in this file; needs one --policy.")
    ] = None,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Simulate a run under one rule or several, on a virtual clock.

    Answers what a rule would do on a cluster: updates a second, waiting, staleness, wasted work,
    traffic. Example: paceline simulate -w 40 -l "1.4s + 2% exp:1.2s" -p sync -p backup:2
    """
    _load("simulate").run(**locals())


@app.command(epilog=EPILOG)
def plan(
    workers: options.Workers = None,
    latency: options.Latency = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Plan from the trace of a pilot run, or from its folder, instead of a latency."
        ),
    ] = None,
    noise_scale: Annotated[
        float | None,
        typer.Option(
            help="The gradient noise scale in samples; with --batch it tells how many more updates "
            "a smaller N needs."
        ),
    ] = None,
    updates_table: Annotated[
        Path | None, typer.Option(help="A file of lines 'N,updates' that you measured.")
    ] = None,
    updates: Annotated[
        float, typer.Option(help="How many updates sync needs to reach the target.")
    ] = 1000,
    policies: Annotated[
        str,
        typer.Option(
            help="Compare the throughput of other rules as well: sync,backup,softsync:4,async."
        ),
    ] = "",
    network: options.Network = "",
    faults: options.Faults = "",
    late: options.Late = "cancel",
    batch: Annotated[
        int | None, typer.Option(help="Samples in a gradient. [default: 32, or as in the trace]")
    ] = None,
    seed: options.Seed = 0,
    plot: options.Plot = None,
    as_json: options.AsJson = False,
) -> None:
    """Choose the number of backup workers before you run.

    For every N of the W workers: the time of an update, the updates needed, hence the time and the
    machine-hours to the target. Example: paceline plan -w 40 -l "1.4s + exp:150ms + 2% exp:1.2s"
    """
    _load("plan").run(**locals())


@app.command(epilog=EPILOG, context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    script: options.ScriptToRun = None,
    arguments: options.Arguments = None,
    workers: options.RealWorkers = 4,
    policy: options.Policy = "sync",
    steps: options.Steps = None,
    samples: options.Samples = None,
    epochs: options.Epochs = None,
    late: options.Late = "cancel",
    requeue: options.Requeue = True,
    ema: options.Ema = None,
    clip_norm: options.ClipNorm = None,
    slow: options.Slow = "",
    min_workers: options.MinWorkers = 1,
    patience: options.Patience = "60s",
    restart: options.Restart = True,
    checkpoint_every: options.CheckpointEvery = "60s",
    seed: options.Seed = 0,
    run_dir: options.RunDir = None,
    resume: options.Resume = None,
) -> None:
    """Train: run a script with many workers on this machine.

    What comes after the script is given to it. Example: paceline run -w 8 -p backup:1 --steps 500
    train.py --lr 0.1. Stop it with Ctrl-C; go on: paceline run --resume runs/train-1
    """
    _load("run").run(**locals(), load=_load)


@app.command(epilog=EPILOG, context_settings={"allow_interspersed_args": False})
def compare(
    script: options.Script,
    arguments: options.Arguments = None,
    policy: options.ComparedPolicies = None,
    workers: options.RealWorkers = 8,
    steps: options.ComparedSteps = None,
    samples: options.Samples = None,
    epochs: options.Epochs = None,
    late: options.Late = "cancel",
    requeue: options.Requeue = True,
    ema: options.Ema = None,
    clip_norm: options.ClipNorm = None,
    slow: options.Slow = "",
    target: options.Target = "",
    seed: options.Seed = 0,
    out: options.Out = None,
) -> None:
    """Train a script under several rules, one after the other, and show what each made of it.

    A table (updates a second, staleness, what was dropped, the time to a target), figures and a
    report. End them with --samples or --epochs, so that all learn from as many samples. With
    --slow, also what the simulator predicts. Example: paceline compare -w 8
    --epochs 10 --slow "50ms + 5% exp:500ms; worker 7 x2" --target "accuracy>=0.95" train.py
    """
    _load("compare").run(**locals(), load=_load)


@trace_app.command("show", epilog=EPILOG)
def trace_show(file: options.TraceFile) -> None:
    """Tell a run in plain words: how it went, who was slow, whom it waited for, what b is best.

    Made from the trace alone, of a simulated run or a real one, also while it goes on. Example:
    paceline trace show runs/train-1
    """
    _load("trace").show(**locals())


@trace_app.command("check", epilog=EPILOG)
def trace_check(
    file: options.TraceFile,
    as_json: options.AsJson = False,
) -> None:
    """Read a trace, replay it through its own policy, and say whether it is sound."""
    _load("trace").check(**locals())


@lab_app.command("list", epilog=EPILOG)
def lab_list() -> None:
    """Say which experiments there are, and what each of them asks."""
    _load("lab").list_experiments()


@lab_app.command("run", epilog=EPILOG)
def lab_run(
    names: options.Experiments = None,
    quick: options.Quick = False,
    seeds: options.Seeds = None,
    jobs: options.Jobs = None,
    data: options.Data = Path("~/.cache/paceline/data"),
    out: options.LabOut = Path("lab-out"),
) -> None:
    """Run experiments: tables, a figure, and a paragraph on what was expected and what was seen.

    All of them take about four hours on two cores. Whatever was computed is remembered: run it
    again after Ctrl-C, and it goes on, a minute earlier at most. Example: paceline lab run
    staleness --quick
    """
    _load("lab").run(**locals())


@lab_app.command("figures", epilog=EPILOG)
def lab_figures(
    names: options.Experiments = None,
    quick: options.QuickTables = False,
    out: options.LabOut = Path("lab-out"),
) -> None:
    """Make figures and paragraphs again, from the tables that are there."""
    _load("lab").figures(**locals())


def _load(name: str) -> Any:
    """A module of the command line; numpy and the rest are loaded only now."""
    return import_module(f"paceline.cli.{name}")


def main() -> None:
    """Run the command line; errors of ours are one line and an exit code, never a traceback."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no lines gets no error
    try:
        try:
            app(prog_name="paceline")
        finally:
            sys.stdout.flush()
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:  # reading and writing files is told by the errors above
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or it would fail again at the very end
        where = "the output" if error.filename is None else error.filename
        print(f"paceline: cannot write {where}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
