# SPDX-License-Identifier: BSD-3-Clause
"""`paceline run`: a script on this machine, with many workers."""

import sys
from collections.abc import Callable, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import typer

from paceline.core.policies import parse_policy
from paceline.errors import SpecError
from paceline.run.folder import new_run_dir
from paceline.run.launch import Launch
from paceline.run.nursery import Nursery
from paceline.run.output import patience_with
from paceline.run.settings import Settings
from paceline.spec import RunSpec, parse_seconds

__all__ = ["Load", "described", "run"]

ENDS = {"steps", "samples", "epochs"}  # each says when a run ends
SPEC = {"workers", "steps", "min_workers", "late", "seed"}
REST = {"samples", "epochs", "ema", "clip_norm", "slow", "requeue", "checkpoint_every"}

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
    if script is not None:
        settings = msgspec.structs.replace(settings, arguments=tuple(arguments or ()))
    sys.exit(_launch(settings, run_dir, load, options["restart"]))


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


def _launch(settings: Settings, run_dir: Path, load: Load, restart: bool) -> int:
    is_live = sys.stderr.isatty()
    settings = msgspec.structs.replace(settings, progress=not is_live)
    script = Path(settings.script)
    with Nursery(script) as nursery:
        launch = Launch(settings, script, settings.arguments, run_dir, nursery, restart)
        nursery.start()  # so that it loads what it needs while we do
        screen = load("panel").Panel(settings, run_dir / "trace.jsonl") if is_live else None
        code = launch.run(screen)
    with patience_with(sys.stderr), patience_with(sys.stdout):
        if (run_dir / "trace.jsonl").exists():
            load("report").print_report(run_dir / "trace.jsonl")
            sys.stdout.flush()
        _tell_what_came_of_it(run_dir, code)
    return code


def _tell_what_came_of_it(run_dir: Path, code: int) -> None:
    """Say where things are, and how to go on with a run that has not come to its end."""
    trace, weights = run_dir / "trace.jsonl", sorted(run_dir.glob("weights*.pt"))
    if trace.exists():  # a run that failed before it began has none
        print(f"The trace is {trace}", file=sys.stderr)
    if weights:
        print(f"The weights are {', '.join(map(str, weights))}", file=sys.stderr)
    if code and any((run_dir / "checkpoints").glob("*.ckpt")):
        print(f"To go on: paceline run --resume {run_dir}", file=sys.stderr)
