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
from typing import Annotated, Any, Literal

import typer

from paceline.errors import PacelineError
from paceline.release import RELEASE

__all__ = ["EXIT_FAILED", "app", "main"]

EXIT_FAILED = PacelineError.exit_code

EPILOG = (
    "Exit codes: 0 done; 1 the run stalled, failed or made no update, a script failed, or the "
    "output could not be written; 2 wrong input; 3 a trace that cannot be read or written, or is "
    "not sound; 4 a peer broke the protocol; 5 a peer was lost; 70 a bug of ours; 130 interrupted."
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

Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", "-w", help="How many workers there are. [default: 8, or all in the trace]"
    ),
]
Latency = Annotated[
    str | None,
    typer.Option(
        "--latency",
        "-l",
        help="How long a worker computes: '50ms', 'exp:20ms,shift=50ms', 'lognormal:1.4s,0.2', "
        "'gamma:MEAN,SHAPE', 'pareto:SCALE,ALPHA', 'weibull:SCALE,SHAPE'. Sums: '50ms + 5% "
        "exp:500ms' (in 5 of 100 cases an extra). Mixtures: '95% 50ms | 5% exp:1s'. Add '; worker "
        "7 x2.2' for one that is always slower, '; phases x3 for 5s every 60s' for slow phases. "
        "Or 'trace:FILE' for the times of a recorded run. [default: 50ms + 5% exp:500ms]",
    ),
]
Network = Annotated[
    str,
    typer.Option(
        help="What moving a model costs: 'model=100MB,bandwidth=1.25GB,delay=0.5ms,servers=1'."
    ),
]
Faults = Annotated[
    str,
    typer.Option(
        help="What goes wrong: 'kill 3 at 10s for 5s; kill any every 10m for 1m; freeze 3 at 10s "
        "for 5s'."
    ),
]
Late = Annotated[
    Literal["cancel", "finish"],
    typer.Option(help="Late work is cancelled at once, or finished and then dropped."),
]
Batch = Annotated[int, typer.Option(help="Samples in a gradient.")]
Seed = Annotated[int, typer.Option(help="The same seed gives the same result.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Plot = Annotated[
    Path | None, typer.Option(help="Draw a figure into this file (.png, .svg or .pdf).")
]


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
    workers: Workers = None,
    latency: Latency = None,
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
        typer.Option(help="What if: take the very computation times of this recorded run."),
    ] = None,
    network: Network = "",
    faults: Faults = "",
    late: Late = "cancel",
    batch: Batch = 32,
    min_workers: Annotated[int, typer.Option(help="With fewer alive the run pauses.")] = 1,
    seed: Seed = 0,
    save: Annotated[
        Path | None, typer.Option(help="Save the trace in this file; needs one --policy.")
    ] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a run under one rule or several, on a virtual clock.

    Answers what a rule would do on a cluster: updates a second, waiting, staleness, wasted work,
    traffic. Example: paceline simulate -w 40 -l "1.4s + 2% exp:1.2s" -p sync -p backup:2
    """
    _verb("simulate").run(**locals())


@app.command(epilog=EPILOG)
def plan(
    workers: Workers = None,
    latency: Latency = None,
    trace: Annotated[
        Path | None, typer.Option(help="Plan from the trace of a pilot run instead of a latency.")
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
    network: Network = "",
    faults: Faults = "",
    late: Late = "cancel",
    batch: Annotated[
        int | None, typer.Option(help="Samples in a gradient. [default: 32, or as in the trace]")
    ] = None,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Choose the number of backup workers before you run.

    For every N of the W workers: the time of an update, the updates needed, hence the time and the
    machine-hours to the target. Example: paceline plan -w 40 -l "1.4s + exp:150ms + 2% exp:1.2s"
    """
    _verb("plan").run(**locals())


@app.command(epilog=EPILOG, context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(help="A PyTorch script that calls paceline.join().")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="What the script is given.", show_default=False)
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", help="How many workers.")] = 4,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            "-p",
            help="The rule: sync, backup:b, batchsync:k, deadline:q, async, softsync:c, ssp:s, "
            "delayed:k.",
        ),
    ] = "sync",
    steps: Annotated[int | None, typer.Option(help="End after so many updates.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="End when so many samples have come into updates.")
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="End when so many times the data has. [default: 1, if nothing else]"),
    ] = None,
    late: Late = "cancel",
    requeue: Annotated[
        bool, typer.Option(help="Whether batches whose gradient was dropped come again.")
    ] = True,
    ema: Annotated[
        float | None, typer.Option(help="Keep a moving average of the weights, e.g. 0.9999.")
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="Clip the averaged gradient to this norm.")
    ] = None,
    slow: Annotated[
        str,
        typer.Option(
            help="Let each gradient take at least as long as this latency says, e.g. "
            "'50ms + 5% exp:500ms; worker 3 x2'; see paceline simulate --help."
        ),
    ] = "",
    min_workers: Annotated[int, typer.Option(help="With fewer alive the run pauses.")] = 1,
    seed: Seed = 0,
    run_dir: Annotated[
        Path | None, typer.Option(help="The folder of the run. [default: runs/SCRIPT-NUMBER]")
    ] = None,
) -> None:
    """Train: run a script with many workers on this machine.

    What comes after the script is given to it. Example: paceline run -w 8 -p backup:1 --steps 500
    train.py --lr 0.1
    """
    _verb("run").run(**locals())


@trace_app.command("check", epilog=EPILOG)
def trace_check(
    file: Annotated[Path, typer.Argument(help="The trace, JSON lines.")],
    as_json: AsJson = False,
) -> None:
    """Read a trace, replay it through its own policy, and say whether it is sound."""
    _verb("trace").check(**locals())


def _verb(name: str) -> Any:
    """The module that does what a verb says; numpy and the rest are loaded only now."""
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
        print(f"paceline: cannot write the output: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
