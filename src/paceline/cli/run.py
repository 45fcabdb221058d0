# SPDX-License-Identifier: BSD-3-Clause
"""`paceline run`: train a script with several workers on this machine."""

import sys
from collections.abc import Callable, Set
from dataclasses import asdict
from math import inf
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from paceline.cli.verb_options import CompareOptions, RunOptions
from paceline.errors import SpecError
from paceline.latency import parse_latency
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher, Reachable
from paceline.run.launch.outer_launcher import is_announced
from paceline.run.launch.run_folder import finished_at, new_run_dir
from paceline.run.launch.screen import ignoring_closed_stream
from paceline.run.settings import Settings
from paceline.spec import RunSpec, parse_seconds
from paceline.watch.words import join_words, plural

__all__ = ["Load", "launch", "new_settings", "run", "start"]

ENDS = frozenset({"steps", "samples", "epochs"})  # each of these says when a run ends
SPEC_OPTIONS = frozenset({"workers", "steps", "samples", "min_workers", "late", "seed"})
PLAIN_OPTIONS = frozenset(
    {
        "policy",
        "epochs",
        "ema",
        "clip_norm",
        "latency",
        "requeue",
        "restart",
        "checkpoint_every",
        "output",
        "servers",
        "transport",
        "wire",
        "wire_parameters",
    }
)
TLS_OPTIONS = frozenset({"tls_cert", "tls_key", "tls_ca"})

Load = Callable[[str], Any]
"""Imports a module of the command line; slow imports happen while other processes start."""


def run(options: RunOptions, load: Load) -> None:
    """Start or resume the run, wait until it ends, exit with its code."""
    start(options, load, lambda _: None)


def start(
    options: RunOptions, load: Load, find_reachable: Callable[[Path], Reachable | None]
) -> None:
    """Start or resume a run, wait until it ends, exit with its code.

    `find_reachable`: says how workers reach the server if they are elsewhere; called with the
    folder of the run.
    """
    is_resumed = options.resume is not None
    if options.resume is None:
        settings = _new_run_settings(options)
        run_dir = new_run_dir(options.out, Path(settings.script))
    else:
        run_dir = options.resume
        settings = _resumed_settings(run_dir, options)
        if _is_over(run_dir, options):
            return
    if options.script is not None:
        arguments = tuple(options.arguments or ())
        settings = msgspec.structs.replace(settings, arguments=arguments)
        _warn_about_misplaced_options(options)
    sys.exit(_run(settings, run_dir, load, is_resumed, find_reachable(run_dir)))


def new_settings(options: RunOptions | CompareOptions, policy: str) -> Settings:
    """Return the settings of a new run under this rule."""
    script = options.script
    if script is None:
        raise SpecError(
            "no script given; start a run with: paceline run train.py, or continue one that was "
            "stopped or killed with: paceline run --resume runs/train-1"
        )
    if not script.is_file():
        raise SpecError(f"script {script} does not exist")
    _check_ends(options)
    settings = Settings(
        spec=RunSpec(
            workers=options.workers,
            steps=options.steps,
            samples=options.samples,
            late=options.late,
            seed=options.seed,
        ),
        script=str(script),
        policy=policy,
        epochs=options.epochs,
        ema=options.ema,
        clip_norm=options.clip_norm,
        latency=options.latency,
        requeue=options.requeue,
    )
    return _with_short_policy(settings)


def _with_short_policy(settings: Settings) -> Settings:
    """Return the settings with the shortest string of their rule, which the trace has as well."""
    return msgspec.structs.replace(settings, policy=str(settings.parse_policy()))


def _new_run_settings(options: RunOptions) -> Settings:
    settings = new_settings(options, options.policy)
    spec = asdict(settings.spec) | {"min_workers": options.min_workers}
    return msgspec.structs.replace(
        settings,
        spec=RunSpec(**spec),
        patience_s=parse_seconds(options.patience, "patience"),
        grace_s=parse_seconds(options.grace, "grace"),
        servers=options.servers,
        transport=options.transport,
        wire=options.wire,
        wire_parameters=options.wire_parameters,
        **_tls_paths(options, TLS_OPTIONS),
        restart=options.restart,
        checkpoint_every=options.checkpoint_every,
        output=options.output,
    )


def _resumed_settings(run_dir: Path, options: RunOptions) -> Settings:
    """Return the settings that the run had, changed by the options on the command line."""
    given = options.given
    if "out" in given:
        raise SpecError("give --resume or --out, not both: a resumed run keeps its folder")
    if not (run_dir / "spec.json").is_file():
        raise SpecError(
            f"there is no run in {run_dir}: it has no spec.json; give --resume the folder of a "
            "run, such as runs/train-1"
        )
    before = Settings.read(run_dir / "spec.json")
    _check_ends(options)
    if given & ENDS:  # a new end replaces the old one, whichever kind that was
        given |= ENDS
    changed = _changed(options, given)
    if options.script is not None:
        changed |= {"script": str(options.script), "folder": ""}
    elif not before.script:
        raise SpecError(
            f"{run_dir / 'spec.json'} does not name the script; add it to the end of the command"
        )
    spec = asdict(before.spec) | {name: getattr(options, name) for name in SPEC_OPTIONS & given}
    return _with_short_policy(msgspec.structs.replace(before, spec=RunSpec(**spec), **changed))


def _changed(options: RunOptions, given: Set[str]) -> dict[str, Any]:
    """Return the fields of `Settings`, other than the spec, that these options change."""
    changed = {name: getattr(options, name) for name in PLAIN_OPTIONS & given}
    changed |= _tls_paths(options, TLS_OPTIONS & given)
    if "patience" in given:
        changed["patience_s"] = parse_seconds(options.patience, "patience")
    if "grace" in given:
        changed["grace_s"] = parse_seconds(options.grace, "grace")
    return changed


def _tls_paths(options: RunOptions, names: Set[str]) -> dict[str, Any]:
    """Return these fields of `Settings`, with paths that hold in any working directory."""
    found = {name: getattr(options, name) for name in names}
    return {name: str(path.absolute()) if path else "" for name, path in found.items()}


def _check_ends(options: RunOptions | CompareOptions) -> int:
    """Return how many options say when the run ends: none or one."""
    count = sum(end is not None for end in (options.steps, options.samples, options.epochs))
    if count > 1:
        raise SpecError("give only one of --steps, --samples and --epochs: each ends the run")
    return count


def _warn_about_misplaced_options(options: RunOptions) -> None:
    """Warn if the script gets options that look like ours, such as `train.py --workers 8`."""
    ours = {
        name
        for option in options.context.command.params
        if option.name not in options.given
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("-")
    }
    found = dict.fromkeys(word.partition("=")[0] for word in options.arguments or ())
    misplaced = [word for word in found if word in ours]
    if misplaced:
        print(
            "note: everything after the script is passed to it, including "
            f"{join_words(misplaced)}; put options for paceline before the script",
            file=sys.stderr,
        )


def _warn_about_unused_wire(settings: Settings) -> None:
    """Warn if gradients or parameters should be rounded, but every worker will share memory."""
    named = {"--wire": settings.wire, "--wire-parameters": settings.wire_parameters}
    unused = [name for name, wire in named.items() if wire != "exact"]
    if unused and settings.transport == "auto" and settings.servers == 1:
        have = "has" if len(unused) == 1 else "have"
        print(
            f"note: {join_words(unused)} {have} no effect, because all workers share memory with "
            "the server; to use TCP on one machine, add --transport tcp",
            file=sys.stderr,
        )


def _run(
    settings: Settings,
    run_dir: Path,
    load: Load,
    is_resumed: bool,
    reachable: Reachable | None,
) -> int:
    if reachable is None:
        _warn_about_unused_wire(settings)
    weights_before, trace = _weights(run_dir), run_dir / "trace.jsonl"
    size_before = _size(trace)
    to_continue = _to_continue(run_dir, reachable)
    with ForkServer(Path(settings.script)) as forkserver:
        first_line = _first_line(settings, run_dir, is_resumed)
        code = launch(settings, run_dir, forkserver, load, first_line, reachable)
    with ignoring_closed_stream(sys.stdout):
        if _size(trace) != size_before:  # otherwise nothing ran, and the trace is an older one
            load("end_of_run").print_report(trace)
            sys.stdout.flush()
    with ignoring_closed_stream(sys.stderr):
        _print_files(run_dir, _weights(run_dir) - weights_before, to_continue)
    return code


def _to_continue(run_dir: Path, reachable: Reachable | None) -> str:
    """Return the command that continues the run in this folder."""
    words = f"--resume {quote(str(run_dir))}"
    if is_announced():
        return f"PACELINE_OPTIONS={quote(words)} torchrun ..."
    return f"paceline {'run' if reachable is None else 'serve'} {words}"


def _size(path: Path) -> int | None:
    """Return the size of a file, or None if it doesn't exist."""
    return path.stat().st_size if path.exists() else None


def launch(
    settings: Settings,
    run_dir: Path,
    forkserver: ForkServer,
    load: Load,
    first_line: str = "",
    reachable: Reachable | None = None,
) -> int:
    """Run to the end, with a live panel on a terminal; return the exit code."""
    is_live = sys.stderr.isatty() and not is_announced()  # other processes write there, too
    settings = msgspec.structs.replace(settings, progress=not is_live)
    launcher = Launcher(settings, run_dir, forkserver, reachable)
    forkserver.start()  # it imports torch while we import the panel
    screen = load("panel").Panel(settings, run_dir / "trace.jsonl") if is_live else None
    return launcher.run(screen, first_line)


def _first_line(settings: Settings, run_dir: Path, is_resumed: bool) -> str:
    """Return the line that says what is about to run."""
    workers = plural(settings.spec.workers, "worker")
    verb = "continuing" if is_resumed else "training"
    # Print the delay as it was understood: it shows a unit that was forgotten.
    delays = (
        f", at least {parse_latency(settings.latency)} per gradient" if settings.latency else ""
    )
    return (
        f"{verb} {settings.script} with {workers} under {settings.policy}{delays}; folder {run_dir}"
    )


def _weights(run_dir: Path) -> set[tuple[Path, int, int]]:
    """Return the weight files, each with an identity that changes when it is rewritten."""
    stats = {path: path.stat() for path in run_dir.glob("weights*.pt")}
    return {(path, stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def _has_checkpoint(run_dir: Path) -> bool:
    return any((run_dir / "checkpoints").glob("*.ckpt"))


def _is_over(run_dir: Path, options: RunOptions) -> bool:
    """Return whether the run has already reached its end, and if so print how to extend it.

    Raises SpecError if its weights are missing and there is no checkpoint to write them from.
    """
    version = finished_at(run_dir)
    if version is None or (options.given & ENDS and (options.steps or inf) > version):
        return False
    weights, checkpoint = _weights(run_dir), _has_checkpoint(run_dir)
    if checkpoint and (options.script is not None or not weights):
        return False  # continue with another script, or write the weights again
    if not weights:
        raise SpecError(
            f"the run in {run_dir} has finished after {plural(version, 'update')}, but its "
            "weights.pt is missing, and there is no checkpoint to write it from; start a new run"
        )
    print(
        f"The run in {run_dir} has already finished after {plural(version, 'update')}. To train "
        f"longer: paceline run --resume {quote(str(run_dir))} --steps {2 * version}",
        file=sys.stderr,
    )
    return True


def _print_files(run_dir: Path, written: set[tuple[Path, int, int]], to_continue: str) -> None:
    """Print where the results are, and how to continue a run that did not finish."""
    trace, weights = run_dir / "trace.jsonl", sorted(path for path, *_ in written)
    if trace.exists():  # a run that failed before it started has none
        print(f"Trace: {trace}", file=sys.stderr)
    if weights:
        print(f"Weights: {', '.join(map(str, weights))}", file=sys.stderr)
    if finished_at(run_dir) is None and _has_checkpoint(run_dir):
        print(f"Continue with: {to_continue}", file=sys.stderr)
