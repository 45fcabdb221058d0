# SPDX-License-Identifier: BSD-3-Clause
"""`paceline run`: a script on this machine, with many workers."""

import sys
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict
from math import inf
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec
import typer

from paceline.core.policies import parse_policy
from paceline.errors import SpecError
from paceline.latency import parse_latency
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.launch.output import patience_with
from paceline.run.launch.run_folder import finished_at, new_run_dir
from paceline.run.settings import Settings
from paceline.spec import RunSpec, parse_seconds
from paceline.watch.words import join_words, plural

__all__ = ["Load", "described", "launch", "run"]

ENDS = {"steps", "samples", "epochs"}  # each says when a run ends
SPEC = {"workers", "steps", "min_workers", "late", "seed"}
REST = {"samples", "epochs", "ema", "clip_norm", "slow", "requeue", "restart", "checkpoint_every"}

Load = Callable[[str], Any]
"""Gives a module of the command line: what takes long to load is loaded while others start."""


def run(
    script: Path | None,
    arguments: list[str] | None,
    context: typer.Context,
    load: Load,
    **options: Any,
) -> None:
    """Start the run or resume it, wait for its end, exit with its code."""
    given = {name for name in options if _is_given(context, name)}
    if options["resume"] is None:
        settings = described(script, options)
        run_dir = new_run_dir(options["run_dir"], Path(settings.script))
    else:
        run_dir = options["resume"]
        settings = _resumed(run_dir, script, options, given)
        if script is None and _is_over(run_dir, options, given):
            return
    if script is not None:
        settings = msgspec.structs.replace(settings, arguments=tuple(arguments or ()), folder="")
        _hint_at_options(context, given, settings.arguments)
    sys.exit(_run(settings, run_dir, load, options["resume"] is not None))


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether this option stands on the command line, so that it is not a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def described(script: Path | None, options: dict[str, Any]) -> Settings:
    """The settings of a new run; what no option says is as `Settings` has it."""
    if script is None:
        raise SpecError(
            "which script? call it as: paceline run train.py; or go on with a run that was stopped "
            "or killed: paceline run --resume runs/train-1"
        )
    if not script.is_file():
        raise SpecError(f"there is no script {script}")
    _check_ends(options)
    if all(options.get(name) is None for name in ENDS):
        options = options | {"epochs": 1.0}
    spec = RunSpec(**{name: options[name] for name in SPEC & set(options)})
    return Settings(spec=spec, script=str(script), **_rest(options, set(options)))


def _resumed(
    run_dir: Path, script: Path | None, options: dict[str, Any], given: Set[str]
) -> Settings:
    """The settings that a run had, but for what the command line gives."""
    if "run_dir" in given:
        raise SpecError("give --resume or --run-dir: a run goes on in the folder that it has")
    if not (run_dir / "spec.json").is_file():
        raise SpecError(
            f"there is no run in {run_dir}, for it has no spec.json; give --resume the folder of a "
            "run, such as runs/train-1"
        )
    before = Settings.read(run_dir / "spec.json")
    _check_ends(options)
    if given & ENDS:  # another end takes the place of the one that it had
        given = given | ENDS
    spec = asdict(before.spec) | {name: options[name] for name in SPEC & given}
    changed = _rest(options, given)
    if script is not None:
        changed["script"] = str(script)
    elif not before.script:
        raise SpecError(f"{run_dir / 'spec.json'} does not tell the script; name it at the end")
    return msgspec.structs.replace(before, spec=RunSpec(**spec), **changed)


def _check_ends(options: dict[str, Any]) -> None:
    if sum(options.get(name) is not None for name in ENDS) > 1:
        raise SpecError("give one of --steps, --samples and --epochs: each says when the run ends")


def _rest(options: dict[str, Any], names: Set[str]) -> dict[str, Any]:
    """What settings have beside the spec, of these options."""
    found = {name: options[name] for name in REST & names}
    if "policy" in names:
        found["policy"] = str(parse_policy(options["policy"]))
    if "patience" in names:
        found["patience_s"] = parse_seconds(options["patience"], "patience")
    return found


def _hint_at_options(context: typer.Context, given: Set[str], arguments: Sequence[str]) -> None:
    """Say where options of ours stand that were given to the script, and may be meant for us."""
    ours = {
        name
        for option in context.command.params
        if option.name not in given
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("-")
    }
    found = dict.fromkeys(word.partition("=")[0] for word in arguments)
    meant = [word for word in found if word in ours]
    if meant:
        print(
            f"what comes after the script is the script's own, {join_words(meant)} too; options "
            "of paceline come before it",
            file=sys.stderr,
        )


def _run(settings: Settings, run_dir: Path, load: Load, is_resumed: bool) -> int:
    before, trace = _weights(run_dir), run_dir / "trace.jsonl"
    size_before = _size(trace)
    with ForkServer(Path(settings.script)) as forkserver:
        code = launch(
            settings, run_dir, forkserver, load, _first_line(settings, run_dir, is_resumed)
        )
    with patience_with(sys.stderr), patience_with(sys.stdout):
        if _size(trace) != size_before:  # otherwise nothing was run, and it is of an earlier time
            load("report").print_report(trace)
            sys.stdout.flush()
        _tell_what_came_of_it(run_dir, _weights(run_dir) - before)
    return code


def _size(path: Path) -> int | None:
    """How long a file is; None: there is none."""
    return path.stat().st_size if path.exists() else None


def launch(
    settings: Settings, run_dir: Path, forkserver: ForkServer, load: Load, first_line: str = ""
) -> int:
    """Run this to its end, with a panel where there is a terminal; return the exit code."""
    is_live = sys.stderr.isatty()
    settings = msgspec.structs.replace(settings, progress=not is_live)
    one = Launcher(settings, run_dir, forkserver)
    forkserver.start()  # so that it loads what it needs while we do
    screen = load("panel").Panel(settings, run_dir / "trace.jsonl") if is_live else None
    return one.run(screen, first_line)


def _first_line(settings: Settings, run_dir: Path, is_resumed: bool) -> str:
    """Say what is run."""
    workers = settings.spec.workers
    s = "s" if workers == 1 else ""
    verb = f"go{'es' if s else ''} on with" if is_resumed else f"train{s}"
    # A latency says its units, which whoever wrote a bare number may have forgotten.
    slow = f", a gradient takes at least {parse_latency(settings.slow)}" if settings.slow else ""
    who = f"{plural(workers, 'worker')} under {settings.policy}"
    return f"{who} {verb} {settings.script}{slow}; folder {run_dir}"


def _weights(run_dir: Path) -> set[tuple[Path, int, int]]:
    """The files with weights, each with what changes when it is written anew."""
    stats = {path: path.stat() for path in run_dir.glob("weights*.pt")}
    return {(path, stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def _is_over(run_dir: Path, options: dict[str, Any], given: Set[str]) -> bool:
    """Whether nothing is left to do, by the end that the run had or is given; if so, say it."""
    version = finished_at(run_dir)
    if version is None or (given & ENDS and (options["steps"] or inf) > version):
        return False
    print(
        f"The run in {run_dir} has come to its end, with {plural(version, 'update')}; to train on: "
        f"paceline run --resume {quote(str(run_dir))} --steps {2 * version}",
        file=sys.stderr,
    )
    return True


def _tell_what_came_of_it(run_dir: Path, written: set[tuple[Path, int, int]]) -> None:
    """Say where things are, and how to go on with a run that has not come to its end."""
    trace, weights = run_dir / "trace.jsonl", sorted(path for path, *_ in written)
    if trace.exists():  # a run that failed before it began has none
        print(f"The trace is {trace}", file=sys.stderr)
    if weights:
        print(f"The weights are {', '.join(map(str, weights))}", file=sys.stderr)
    if finished_at(run_dir) is None and any((run_dir / "checkpoints").glob("*.ckpt")):
        print(f"To go on: paceline run --resume {quote(str(run_dir))}", file=sys.stderr)
