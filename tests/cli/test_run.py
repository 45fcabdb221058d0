# SPDX-License-Identifier: BSD-3-Clause
"""`paceline run`: its first line, and hints about its options."""

import pytest

from failures import LOOP, TRAINING

pytestmark = pytest.mark.usefixtures("shared_forkserver")

QUIET = "def trouble(run): pass\n"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("-w", 1), "training script.py with 1 worker under sync; folder run"),
        (
            ("-w", 2, "-p", "backup:1"),
            "training script.py with 2 workers under backup:1; folder run",
        ),
        (
            ("-w", 1, "--latency", "0.002"),
            "training script.py with 1 worker under sync, at least 2ms per gradient; folder run",
        ),
    ],
)
def test_first_line_says_what_is_run(call, script, options, line):
    script(TRAINING + QUIET + LOOP)
    words = ("--steps", 2, "--out", "run", "script.py", ".")
    code, _, err = call("run", *options, *words)
    assert code == 0, err
    assert err.splitlines()[0] == line


@pytest.mark.parametrize(
    ("given", "to_script", "hint"),
    [
        (["-w", 1], ["--lr", "0.1"], ""),
        (["-w", 1], ["--seed=4", "--latency", "1s", "--seed", "3"], "--seed and --latency"),
        (
            ["-w", 1],
            ["--workers", "8"],
            "",
        ),  # -w was given before the script
        (["-w", 1], ["-p", "--no-restart"], "-p and --no-restart"),
    ],
)
def test_our_options_after_the_script_get_a_hint(call, script, given, to_script, hint):
    path = script(TRAINING + QUIET + LOOP + "print(sys.argv[2:])")
    code, out, err = call("run", *given, "--steps", 2, path, ".", *to_script)
    assert code == 0, err
    assert f"worker 0  | {to_script}" in out.splitlines()
    expected = (
        f"note: everything after the script is passed to it, including {hint}; put options for "
        "paceline before the script"
    )
    assert err.splitlines().count(expected) == bool(hint)
