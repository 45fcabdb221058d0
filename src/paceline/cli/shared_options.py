# SPDX-License-Identifier: BSD-3-Clause
"""Command-line parameters that several verbs share, and the step from a class to a command.

`accepts` turns a dataclass of options into the parameters of a command, so that each option is
declared once and reaches its verb as a typed value. `paceline --help` loads this module: it must
import nothing heavy.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

__all__ = [
    "RULES",
    "Arguments",
    "AsJson",
    "ClipNorm",
    "ConnectAsServer",
    "Ema",
    "Epochs",
    "Experiments",
    "Faults",
    "HostOutput",
    "HostProcesses",
    "HostRestart",
    "LabOut",
    "Late",
    "Latency",
    "MinWorkers",
    "Network",
    "NumberOfWorker",
    "Plot",
    "RealLatency",
    "RealSeed",
    "RealWorkers",
    "Requeue",
    "Samples",
    "Seed",
    "ServerNumber",
    "Servers",
    "SimulatedBatch",
    "SimulatedLate",
    "TlsCa",
    "TlsCert",
    "TlsKey",
    "TraceFile",
    "Transport",
    "Wire",
    "WireParameters",
    "Workers",
    "accepts",
]

T = TypeVar("T")


def accepts(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Make a function of one options object a command with an option for each field."""

    def decorate(verb: Callable[[T], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            verb(options(**values))

        signature = inspect.signature(options)
        command.__name__, command.__doc__ = verb.__name__, verb.__doc__
        command.__signature__ = signature  # type: ignore[attr-defined] # functions may have it, and Typer reads it
        command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return command

    return decorate


RULES = (
    "sync (wait for all workers), backup:b (for all but the b slowest), batchsync:k (for the first "
    "k mini-batches from any worker), deadline:q (until a learnt deadline), delayed:k (for all, k "
    "updates later), softsync:c (for any c gradients), ssp:s (don't wait, but no worker gets more "
    "than s turns ahead), async (don't wait), or MODULE:CLASS (your own)"
)

Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", "-w", help="Number of workers. [default: 4, or as many as the trace has]"
    ),
]
Latency = Annotated[
    str | None,
    typer.Option(
        "--latency",
        "-l",
        help="How long a worker takes for one gradient: '50ms', 'exp:20ms,shift=50ms', "
        "'lognormal:1.4s,0.2', 'gamma:MEAN,SHAPE', 'pareto:SCALE,ALPHA', 'weibull:SCALE,SHAPE'. "
        "Add terms with +: '50ms + 5% exp:500ms' takes 500 ms longer on average in 5% of the "
        "cases. Mix with |: '95% 50ms | 5% exp:1s'. Append '; worker 7 x2.2' for a worker that is "
        "always slower, '; phases x3 for 5s every 60s' for slow phases. Add 'together' to phases "
        "that all workers have at the same time. 'trace:FILE' draws from the times of a recorded "
        "run. A number without a unit is in seconds. "
        "[default: 50ms + 5% exp:500ms]",
    ),
]
Network = Annotated[
    str,
    typer.Option(
        help="The cost of moving the model, such as "
        "'model=100MB, bandwidth=1.25GB, delay=0.5ms, servers=1'. Add 'workers_per_host=N' if "
        "several workers share the link of a host, 'beside=true' if server i runs on host i, "
        "beside its workers, 'transfers=N' for the number of gradients that are sent to "
        "a server at a time (2 by default, or 'all'), and '; worker 3 12.5MB' for a worker with "
        "another bandwidth. Without it, moving data is free."
    ),
]
Faults = Annotated[
    str,
    typer.Option(
        help="Faults to simulate: 'kill 3 at 10s for 5s; kill any every 10m for 1m; freeze 3 at "
        "10s for 5s; stall 3 at 10s for 5s'. A stall needs a network: no parameters or gradients "
        "of the worker move."
    ),
]
Late = Annotated[
    Literal["cancel", "finish"],
    typer.Option(
        help="What a late worker does: cancel its gradient, or finish it although it is dropped."
    ),
]
SimulatedLate = Annotated[
    Literal["cancel", "finish"] | None,
    typer.Option(
        help="What a late worker does: cancel its gradient, or finish it although it is dropped. "
        "[default: cancel, or as in the trace]"
    ),
]
SimulatedBatch = Annotated[
    int | None, typer.Option(help="Samples in a gradient. [default: 32, or as in the trace]")
]
Seed = Annotated[int, typer.Option(help="Random seed. The same seed gives the same result.")]
RealSeed = Annotated[
    int, typer.Option(help="Random seed for the order of the data and for injected delays.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Plot = Annotated[
    Path | None, typer.Option(help="Also draw a figure into this file (.png, .svg or .pdf).")
]
TraceFile = Annotated[
    Path, typer.Argument(help="A trace file (JSON lines), or the folder of a run.")
]
MinWorkers = Annotated[
    int, typer.Option(help="Pause the run while fewer workers than this are alive.")
]
Arguments = Annotated[
    list[str] | None, typer.Argument(help="Arguments for the script.", show_default=False)
]
RealWorkers = Annotated[int, typer.Option("--workers", "-w", help="Number of workers.")]
Samples = Annotated[
    int | None, typer.Option(help="Stop after this many samples have gone into updates.")
]
Epochs = Annotated[
    float | None,
    typer.Option(
        help="Stop after this many epochs. [default: as long as the script of worker 0 runs]"
    ),
]
Requeue = Annotated[
    bool,
    typer.Option(help="Train again on batches whose gradient was dropped, or skip them."),
]
Ema = Annotated[
    float | None,
    typer.Option(help="Keep an exponential moving average of the weights, e.g. 0.9999."),
]
ClipNorm = Annotated[
    float | None, typer.Option(help="Clip the averaged gradient of each update to this norm.")
]
RealLatency = Annotated[
    str,
    typer.Option(
        "--latency",
        "-l",
        help="Inject delays: each gradient takes at least this long, e.g. "
        "'50ms + 5% exp:500ms; worker 3 x2'. paceline simulate --help explains the format.",
    ),
]
Experiments = Annotated[
    list[str] | None,
    typer.Argument(help="Names of experiments. [default: all]", show_default=False),
]
LabOut = Annotated[
    Path, typer.Option(help="The folder for tables, figures and the cache of finished trials.")
]

Servers = Annotated[
    int,
    typer.Option(
        min=1,
        help="How many servers share the parameters and the traffic. With several, all workers use "
        "TCP.",
    ),
]
ConnectAsServer = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="Instead of starting a run, be another server of the run whose first server has this "
        "address. Then only --number, --listen, --token-file and the options for TLS count.",
    ),
]
ServerNumber = Annotated[
    int | None,
    typer.Option(min=1, help="With --connect: the number of this server, 1 to S-1."),
]
Transport = Annotated[
    Literal["auto", "tcp"],
    typer.Option(
        help="How gradients and parameters travel: through shared memory where workers are on "
        "the server's host and over TCP elsewhere, or always over TCP."
    ),
]

Wire = Annotated[
    Literal["exact", "bfloat16", "float16"],
    typer.Option(
        help="How gradients travel over TCP: exactly, or rounded, in half the bytes. Each "
        "worker adds what rounding cuts off to its next gradient, so nothing is lost over "
        "time. Prefer bfloat16: float16 clips numbers above 65504. Shared memory is always "
        "exact."
    ),
]

WireParameters = Annotated[
    Literal["exact", "bfloat16", "float16"],
    typer.Option(
        help="How parameters travel to workers over TCP. If they are rounded, workers compute "
        "gradients at the rounded parameters; the server keeps the exact ones. Shared memory "
        "is always exact."
    ),
]

HostProcesses = Annotated[
    int, typer.Option(min=1, max=1000, help="How many workers to start on this host.")
]
NumberOfWorker = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="The number of the worker, if you want to choose it. Those of a run with W workers "
        "are 0 to W-1; more are additional backups. [default: one that is free]",
    ),
]
HostRestart = Annotated[
    bool,
    typer.Option(
        help="Restart workers that die: after 0.5 s, 1 s, 2 s and so on, up to 5 times in a row "
        "without progress."
    ),
]
HostOutput = Annotated[
    Literal["first", "all"],
    typer.Option(
        help="Whose standard output to show: that of the first worker of this host, or that of "
        "all. Errors are always shown."
    ),
]

TlsCert = Annotated[
    Path | None,
    typer.Option(
        help="Encrypt TCP connections with TLS: the file of the server's certificate. Needs "
        "--tls-key, and TCP."
    ),
]

TlsKey = Annotated[
    Path | None, typer.Option(help="The file of the key of --tls-cert, without a passphrase.")
]

TlsCa = Annotated[
    Path | None,
    typer.Option(
        help="The file of a CA's certificate. Both sides must then have a certificate of this "
        "CA; without it, workers trust exactly --tls-cert."
    ),
]
