# SPDX-License-Identifier: BSD-3-Clause
"""`paceline run`: a script on this machine, with many workers."""

import sys
from pathlib import Path
from typing import Any

from paceline.core.policies import parse_policy
from paceline.errors import SpecError
from paceline.run.launch import Launch, new_run_dir
from paceline.run.settings import Settings
from paceline.spec import RunSpec

__all__ = ["run"]


def run(script: Path, arguments: list[str] | None, **options: Any) -> None:
    """Start the run, wait for its end, exit with its code."""
    if not script.is_file():
        raise SpecError(f"there is no script {script}")
    ends = [options[name] for name in ("steps", "samples", "epochs")]
    if sum(end is not None for end in ends) > 1:
        raise SpecError("give one of --steps, --samples and --epochs: each says when the run ends")
    spec = RunSpec(
        workers=options["workers"],
        steps=options["steps"],
        min_workers=options["min_workers"],
        late=options["late"],
        seed=options["seed"],
    )
    settings = Settings(
        spec=spec,
        policy=str(parse_policy(options["policy"])),
        samples=options["samples"],
        epochs=1.0 if all(end is None for end in ends) else options["epochs"],
        ema=options["ema"],
        clip_norm=options["clip_norm"],
        slow=options["slow"],
        requeue=options["requeue"],
    )
    run_dir = new_run_dir(options["run_dir"], script)
    code = Launch(settings, script, tuple(arguments or ()), run_dir).run()
    trace = run_dir / "trace.jsonl"
    if trace.exists():  # a run that failed before it began has none
        print(f"The trace is {trace}", file=sys.stderr)
    sys.exit(code)
