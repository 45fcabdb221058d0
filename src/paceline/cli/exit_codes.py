# SPDX-License-Identifier: BSD-3-Clause
"""What the help says about exit codes: all of them, and those that each verb can return.

`errors` defines the codes, and docs/runtime.md explains them. Any verb can also return 70, a bug in
Paceline, and 1 if its output can't be written.
"""

__all__ = ["EVERY_CODE", "VERB_CODES", "exit_codes_of"]

EVERY_CODE = (
    "Exit codes: 0 success; 1 the run stalled, failed or made no update, a script failed, or the "
    "output could not be written; 2 wrong input, or an optional package is not installed; 3 a "
    "trace can't be read or written, or is inconsistent or incomplete; 4 (only from a single "
    "process of a run) the server refused it; 5 (likewise) it lost the server; 6 a checkpoint "
    "can't be read or belongs to another script; 70 a bug in Paceline; 128 + the number of the "
    "signal that stopped the run, so 130 for Ctrl-C."
)

VERB_CODES = {
    "run": {
        "0": "success",
        "1": "the run or a script failed",
        "2": "wrong input",
        "3": "the trace of the run to resume can't be used",
        "6": "its checkpoint can't be used",
        "130": "stopped with Ctrl-C",
    },
    "serve": {
        "0": "success",
        "1": "the run failed",
        "2": "wrong input",
        "3": "the trace of the run to resume can't be used",
        "6": "its checkpoint can't be used",
        "130": "stopped with Ctrl-C",
    },
    "work": {
        "0": "success",
        "1": "the script failed",
        "2": "wrong input",
        "4": "the server refused these workers",
        "5": "no server was found, or it was lost",
        "130": "stopped with Ctrl-C",
    },
    "compare": {
        "0": "success",
        "1": "a rule failed",
        "2": "wrong input, or the value of --target was never logged",
        "130": "stopped with Ctrl-C",
    },
    "plan": {"0": "success", "2": "wrong input", "3": "the trace can't be read"},
    "simulate": {
        "0": "success",
        "1": "a rule made no update or didn't finish",
        "2": "wrong input",
        "3": "a trace can't be read or written",
    },
    "trace show": {"0": "success", "2": "wrong input", "3": "the trace can't be read"},
    "trace check": {
        "0": "the trace is consistent",
        "2": "wrong input",
        "3": "the trace can't be read, or is inconsistent or incomplete",
    },
    "lab list": {"0": "success"},
    "lab run": {
        "0": "success",
        "1": "an experiment failed",
        "2": "wrong input, a failed download, or a missing package",
        "130": "stopped with Ctrl-C",
    },
    "lab figures": {"0": "success", "2": "wrong input, or a missing package"},
}


def exit_codes_of(verb: str) -> str:
    """Return the paragraph about the exit codes of a verb."""
    codes = "; ".join(f"{code} {meaning}" for code, meaning in VERB_CODES[verb].items())
    return f"Exit codes: {codes}. paceline --help lists all."
