# SPDX-License-Identifier: BSD-3-Clause
"""The options of each verb: one frozen dataclass per verb, with types, defaults and help.

`paceline --help` loads this module: it must import nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli.completion import complete_policy
from paceline.cli.shared_options import (
    RULES,
    Arguments,
    AsJson,
    ClipNorm,
    ConnectAsServer,
    Ema,
    Epochs,
    Experiments,
    Faults,
    HostOutput,
    HostProcesses,
    HostRestart,
    LabOut,
    Late,
    Latency,
    MinWorkers,
    Network,
    NumberOfWorker,
    Plot,
    RealLatency,
    RealSeed,
    RealWorkers,
    Requeue,
    Samples,
    Seed,
    ServerNumber,
    Servers,
    SimulatedBatch,
    SimulatedLate,
    TlsCa,
    TlsCert,
    TlsKey,
    TraceFile,
    Transport,
    Wire,
    WireParameters,
    Workers,
)

__all__ = [
    "CompareOptions",
    "LabFiguresOptions",
    "LabRunOptions",
    "PlanOptions",
    "RunOptions",
    "ServeOptions",
    "SimulateOptions",
    "TraceCheckOptions",
    "TraceShowOptions",
    "WorkOptions",
]


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of `paceline simulate`."""

    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            autocompletion=complete_policy,
            help=f"The rule: {RULES}. Repeat the option to compare rules. [default: one of each]",
        ),
    ] = None
    workers: Workers = None
    latency: Latency = None
    steps: Annotated[
        int | None,
        typer.Option(help="Stop after this many updates. [default: 1000, no limit with --until]"),
    ] = None
    until: Annotated[
        str,
        typer.Option(help="Stop at this virtual time, e.g. 10m, after the current update."),
    ] = ""
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Ask 'what if': take the computation times of this recorded run, given by its "
            "trace or its folder, in the order in which they were measured."
        ),
    ] = None
    network: Network = ""
    faults: Faults = ""
    late: SimulatedLate = None
    batch: SimulatedBatch = None
    min_workers: MinWorkers = 1
    seed: Seed = 0
    out: Annotated[
        Path | None, typer.Option(help="The file for the trace. Needs a single --policy.")
    ] = None
    plot: Plot = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `paceline plan`."""

    workers: Workers = None
    latency: Latency = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Plan from a pilot run instead of --latency. Give its trace or its folder, or a "
            "file.csv of arrivals: one row per update, one column per worker, in seconds."
        ),
    ] = None
    noise_scale: Annotated[
        float | None,
        typer.Option(
            help="The gradient noise scale, in samples. Together with --batch it says how many "
            "more updates a smaller N needs."
        ),
    ] = None
    updates_table: Annotated[
        Path | None,
        typer.Option(help="A file with lines 'N,updates': the updates you measured for some N."),
    ] = None
    updates: Annotated[
        float, typer.Option(help="Number of updates that sync needs to reach the target.")
    ] = 1000
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            autocompletion=complete_policy,
            help="Also show the throughput of this rule, e.g. softsync:4; 'backup' alone has the "
            "recommended b. Repeat the option to compare rules.",
        ),
    ] = None
    network: Network = ""
    faults: Faults = ""
    late: SimulatedLate = None
    batch: SimulatedBatch = None
    seed: Seed = 0
    plot: Plot = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of `paceline run`."""

    context: typer.Context
    script: Annotated[
        Path | None,
        typer.Argument(
            help="A PyTorch script that calls paceline.join(). Not needed with --resume.",
            show_default=False,
        ),
    ] = None
    arguments: Arguments = None
    workers: RealWorkers = 4
    policy: Annotated[
        str,
        typer.Option("--policy", "-p", autocompletion=complete_policy, help=f"The rule: {RULES}."),
    ] = "sync"
    steps: Annotated[int | None, typer.Option(help="Stop after this many updates.")] = None
    samples: Samples = None
    epochs: Epochs = None
    late: Late = "cancel"
    requeue: Requeue = True
    ema: Ema = None
    clip_norm: ClipNorm = None
    latency: RealLatency = ""
    min_workers: MinWorkers = 1
    patience: Annotated[
        str, typer.Option(help="End a run that has been paused for this long: seconds, or '10m'.")
    ] = "60s"
    grace: Annotated[
        str,
        typer.Option(
            help="Kill workers that are still running this long after the last update; worker 0 "
            "only if it has used no processor time for this long, or is still in its last turn."
        ),
    ] = "60s"
    servers: Servers = 1
    transport: Transport = "auto"
    wire: Wire = "exact"
    wire_parameters: WireParameters = "exact"
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_ca: TlsCa = None
    restart: Annotated[
        bool,
        typer.Option(
            help="Restart workers that die and a server that is killed: after 0.5 s, 1 s, 2 s and "
            "so on, up to 5 times in a row without progress."
        ),
    ] = True
    checkpoint_every: Annotated[
        str,
        typer.Option(
            help="How often to save a checkpoint: every '100' updates or every '60s'; '0' for "
            "never."
        ),
    ] = "60s"
    output: Annotated[
        Literal["first", "all"],
        typer.Option(
            help="Whose output to show: that of the server and worker 0, or that of all workers. "
            "Errors of all workers are always shown, and everything is saved in the run's folder."
        ),
    ] = "first"
    seed: RealSeed = 0
    out: Annotated[
        Path | None, typer.Option(help="The folder for all results. [default: runs/SCRIPT-NUMBER]")
    ] = None
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Continue the run in this folder from its last checkpoint. The script, its "
            "arguments, its working folder and all options stay as they were, except those you "
            "give here."
        ),
    ] = None

    @property
    def given(self) -> frozenset[str]:
        """The options that are on the command line, as opposed to defaults."""
        sources = {name: self.context.get_parameter_source(name) for name in self.context.params}
        return frozenset(
            name for name, source in sources.items() if source and source.name == "COMMANDLINE"
        )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(RunOptions):
    """The options of `paceline serve`: those of `paceline run`, and how workers reach it."""

    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where workers reach the server. Other hosts can't reach 127.0.0.1; port 0 is any "
            "free port.",
        ),
    ] = "127.0.0.1:0"
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="The file with the secret that workers need to join. It is created if there is "
            "none; copy it to their hosts. [default: a new one in the folder of the run]"
        ),
    ] = None
    connect: ConnectAsServer = ""
    number: ServerNumber = None


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """The options of `paceline work`."""

    script: Annotated[
        Path, typer.Argument(help="The script that the server trains.", show_default=False)
    ]
    arguments: Arguments = None
    connect: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The address that `paceline serve` shows.")
    ]
    token_file: Annotated[Path, typer.Option(help="A copy of the server's file with the secret.")]
    processes: HostProcesses = 1
    number: NumberOfWorker = None
    restart: HostRestart = True
    output: HostOutput = "first"
    tls_cert: Annotated[
        Path | None,
        typer.Option(help="This worker's certificate, if the server asks for one (--tls-ca)."),
    ] = None
    tls_key: TlsKey = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="Encrypt the connection with TLS: the file of the certificate that the server's "
            "must be, or be signed with."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The options of `paceline compare`."""

    script: Annotated[
        Path,
        typer.Argument(help="A PyTorch script that calls paceline.join().", show_default=False),
    ]
    arguments: Arguments = None
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            autocompletion=complete_policy,
            help=f"The rule: {RULES}. Repeat the option to compare rules. [default: sync, "
            "backup:1, backup:2, softsync:W/2 and async, as far as W workers allow]",
        ),
    ] = None
    workers: RealWorkers = 4
    steps: Annotated[
        int | None,
        typer.Option(
            help="Stop each run after this many updates. Prefer --samples or --epochs: an update "
            "of async uses one gradient, an update of sync one from every worker, so with --steps "
            "the rules train on different numbers of samples."
        ),
    ] = None
    samples: Samples = None
    epochs: Epochs = None
    late: Late = "cancel"
    requeue: Requeue = True
    ema: Ema = None
    clip_norm: ClipNorm = None
    latency: RealLatency = ""
    target: Annotated[
        str,
        typer.Option(
            help="Report the time until a logged value reaches this: 'accuracy>=0.95', 'loss<=0.1'."
        ),
    ] = ""
    seed: RealSeed = 0
    out: Annotated[
        Path | None,
        typer.Option(help="The folder for all results. [default: runs/compare-SCRIPT-NUMBER]"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TraceShowOptions:
    """The options of `paceline trace show`."""

    trace: TraceFile
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class TraceCheckOptions:
    """The options of `paceline trace check`."""

    trace: TraceFile
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class LabRunOptions:
    """The options of `paceline lab run`."""

    names: Experiments = None
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A smoke test of about half a minute per experiment. Its numbers are not results "
            "and go into a subfolder 'quick'.",
        ),
    ] = False
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Repetitions of each comparison. [default: 3, with --quick 1]"),
    ] = None
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Trials to run at a time. [default: one per core]")
    ] = None
    data: Annotated[
        Path,
        typer.Option(
            envvar="PACELINE_DATA",
            help="The folder with the data sets. Missing ones are downloaded into it.",
        ),
    ] = Path("~/.cache/paceline/data")
    out: LabOut = Path("lab-out")


@dataclass(frozen=True, kw_only=True)
class LabFiguresOptions:
    """The options of `paceline lab figures`."""

    names: Experiments = None
    quick: Annotated[bool, typer.Option("--quick", help="Use the tables of --quick.")] = False
    out: LabOut = Path("lab-out")
