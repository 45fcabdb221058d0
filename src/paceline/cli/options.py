# SPDX-License-Identifier: BSD-3-Clause
"""The options of the verbs: their types, names and help, each in one place."""

from pathlib import Path
from typing import Annotated, Literal

import typer

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
        "Or 'trace:FILE' for the times of a recorded run. A number without a unit is in seconds. "
        "[default: 50ms + 5% exp:500ms]",
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
TraceFile = Annotated[
    Path, typer.Argument(help="The trace, JSON lines; or the folder of a run, which has one.")
]


# ----------------------------------------------------------------------------- of real runs

Script = Annotated[
    Path,
    typer.Argument(help="A PyTorch script that calls paceline.join().", show_default=False),
]
ScriptToRun = Annotated[
    Path | None,
    typer.Argument(
        help="A PyTorch script that calls paceline.join(); with --resume it need not be named.",
        show_default=False,
    ),
]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="What the script is given.", show_default=False)
]
RealWorkers = Annotated[int, typer.Option("--workers", "-w", help="How many workers.")]
Policy = Annotated[
    str,
    typer.Option(
        "--policy",
        "-p",
        help="The rule: sync, backup:b, batchsync:k, deadline:q, async, softsync:c, ssp:s, "
        "delayed:k.",
    ),
]
ComparedPolicies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "-p",
        help="A rule; give it several times. [default: sync, backup:1, backup:2, softsync:W/2, "
        "async, of which those that fit the number W of workers]",
    ),
]
Steps = Annotated[int | None, typer.Option(help="End after so many updates.")]
ComparedSteps = Annotated[
    int | None,
    typer.Option(
        help="End each after so many updates. Better use --samples or --epochs: an update of async "
        "is of one gradient, one of sync of as many as there are workers, so that with --steps "
        "they learn from unequal numbers of samples."
    ),
]
Samples = Annotated[
    int | None, typer.Option(help="End when so many samples have come into updates.")
]
Epochs = Annotated[
    float | None,
    typer.Option(help="End when so many times the data has. [default: 1, if nothing else]"),
]
Requeue = Annotated[
    bool, typer.Option(help="Whether batches whose gradient was dropped come again.")
]
Ema = Annotated[
    float | None, typer.Option(help="Keep a moving average of the weights, e.g. 0.9999.")
]
ClipNorm = Annotated[float | None, typer.Option(help="Clip the averaged gradient to this norm.")]
Slow = Annotated[
    str,
    typer.Option(
        help="Let each gradient take at least as long as this latency says, e.g. "
        "'50ms + 5% exp:500ms; worker 3 x2'; see paceline simulate --help."
    ),
]
MinWorkers = Annotated[int, typer.Option(help="With fewer alive the run pauses.")]
Patience = Annotated[
    str, typer.Option(help="A run that has paused for so long ends: seconds, or '10m'.")
]
Restart = Annotated[
    bool,
    typer.Option(
        help="Whether a worker that dies, or a server that is killed, is started again: after "
        "0.5 s, 1 s, 2 s and so on, and up to 5 times in a row without getting on."
    ),
]
CheckpointEvery = Annotated[
    str,
    typer.Option(
        help="How often the run is saved, so that it can go on after a kill: every '100' "
        "updates, or every '60s'; '0' for never."
    ),
]
RunDir = Annotated[
    Path | None, typer.Option(help="The folder of the run. [default: runs/SCRIPT-NUMBER]")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        help="Go on with the run in this folder, from its last checkpoint: with its script, "
        "arguments, working folder and options, but for those that are given here."
    ),
]
Target = Annotated[
    str,
    typer.Option(
        help="What is to be reached of something that the script logs: 'accuracy>=0.95', "
        "'loss<=0.1'."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(help="The folder for everything. [default: runs/compare-SCRIPT-NUMBER]"),
]


# ------------------------------------------------------------------------------- of the lab

Experiments = Annotated[
    list[str] | None,
    typer.Argument(help="Which, by name; all if none is named.", show_default=False),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="A quick look, half a minute each: it shows that all works, and is no result. Its "
        "tables are in a folder 'quick' of their own.",
    ),
]
QuickTables = Annotated[bool, typer.Option("--quick", help="Those of a quick look.")]
Seeds = Annotated[
    int | None,
    typer.Option(min=1, help="How often each comparison is repeated. [default: 3, with --quick 1]"),
]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="How many trials at a time. [default: as many as there are cores]"),
]
Data = Annotated[
    Path,
    typer.Option(
        envvar="PACELINE_DATA",
        help="Where the data sets are; what is missing there is downloaded.",
    ),
]
LabOut = Annotated[
    Path,
    typer.Option(help="The folder for tables, figures, and what is remembered of trials."),
]
