# SPDX-License-Identifier: BSD-3-Clause
"""One name for one thing: walk all options of all verbs.

`CONCEPTS` names the one option for each concept, and it must list every option. Before you add an
option, look here: its concept may already have a name.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
from typer.main import get_command

from paceline.cli import app, verb_options
from paceline.cli.exit_codes import VERB_CODES
from paceline.cli.verb_command import RENAMED
from paceline.run.settings import Settings
from paceline.spec import RunSpec

ROOT = Path(__file__).parents[2]

CONCEPTS = {
    # what runs
    "the script to train": "script",
    "what is passed to the script": "arguments",
    "experiments of the lab": "names",
    "a recorded run to read": "--trace",
    "the number of workers": "--workers",
    "the rule": "--policy",
    # when it ends
    "stop after a number of updates": "--steps",
    "stop after a number of samples": "--samples",
    "stop after a number of epochs": "--epochs",
    "stop at a virtual time": "--until",
    "a logged value to reach": "--target",
    # how it runs
    "how long a gradient takes": "--latency",
    "what moving data costs": "--network",
    "which workers die or freeze": "--faults",
    "what becomes of late work": "--late",
    "samples in a gradient": "--batch",
    "how few workers may be left": "--min-workers",
    "where random numbers begin": "--seed",
    "whether dropped batches are trained on again": "--requeue",
    "a moving average of the weights": "--ema",
    "the largest norm of a gradient": "--clip-norm",
    "how long a pause may last": "--patience",
    "how long a worker may run after the end": "--grace",
    "whether processes are restarted": "--restart",
    "how often checkpoints are saved": "--checkpoint-every",
    "the run to continue": "--resume",
    # several machines
    "how gradients and parameters travel": "--transport",
    "where the server can be reached": "--listen",
    "how many servers there are": "--servers",
    "the server to join": "--connect",
    "the secret of a run": "--token-file",
    "which worker or server this is": "--number",
    "how many workers of the run are on this host": "--processes",
    "a certificate to show": "--tls-cert",
    "the key of that certificate": "--tls-key",
    "a certificate to trust": "--tls-ca",
    "how gradients travel": "--wire",
    "how parameters travel": "--wire-parameters",
    # how many updates a number of gradients needs
    "the noise of the gradients": "--noise-scale",
    "updates that sync needs": "--updates",
    "measured numbers of updates": "--updates-table",
    # what comes out
    "where results go": "--out",
    "a figure of the result": "--plot",
    "a result for programs": "--json",
    "whose output is shown": "--output",
    # the lab
    "a smoke test": "--quick",
    "how often a comparison is repeated": "--seeds",
    "how many trials run at a time": "--jobs",
    "where data sets are": "--data",
    # of every program
    "help": "--help",
    "the version": "--version",
    "install shell completion": "--install-completion",
    "print shell completion": "--show-completion",
}

DIFFERENT_HELP = {
    "script": "run --resume needs none",
    "--policy": "one, or several with different defaults",
    "--workers": "simulations may take the number from a trace",
    "--steps": "a limit, with a warning where rules are compared",
    "--latency": "injected into a run, or simulated",
    "--trace": "times in their order, or drawn from it",
    "--out": "a folder or a file",
    "--late": "simulations may take it from a trace",
    "--seed": "simulations repeat exactly, runs in part",
    "--quick": "an experiment, or its tables",
    "--connect": "a worker always has one, a server only if it isn't the first",
    "--number": "of a worker, or of a server",
    "--restart": "workers of a host, or all processes of a run",
    "--output": "of the workers of a host, or of all processes of a run",
    "--token-file": "made by the server, copied to its workers",
    "--tls-cert": "of the server, or of a worker",
    "--tls-ca": "signs certificates of workers, or that of the server",
}
"""Options whose help depends on the verb, and why."""

OTHER_FIELDS = {
    "context": "of the parser",
    "out": "the folder, which isn't a setting",
    "resume": "the folder, which isn't a setting",
    "patience": "parsed into patience_s",
    "grace": "parsed into grace_s",
}
"""Options of `paceline run` that are no settings of the same name."""


class Given(NamedTuple):
    """An option or argument of one verb."""

    verb: str
    name: str  # the long name
    option: Any


def walk(command: Any, verb: str = "") -> Iterator[Given]:
    """Yield every option and argument of a command and of those below it."""
    for option in command.params:
        is_argument = option.param_type_name == "argument"
        long = [option.name] if is_argument else [o for o in option.opts if o.startswith("--")]
        assert len(long) == 1, f"{verb}: {option.opts} must have one long name"
        # The trace that `paceline trace` reads is its only argument.
        name = "--trace" if long == ["trace"] else long[0]
        yield Given(verb, name, option)
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, f"{verb} {name}".strip())


EVERYTHING = list(walk(get_command(app)))

BY_NAME: dict[str, list[Given]] = defaultdict(list)
for each in EVERYTHING:
    BY_NAME[each.name].append(each)

SHARED = sorted(name for name, found in BY_NAME.items() if len(found) > 1)


def test_walk_finds_every_verb() -> None:
    assert {given.verb for given in EVERYTHING} >= {*VERB_CODES} - {"lab list"}


def test_every_option_has_a_concept_of_its_own() -> None:
    names = list(CONCEPTS.values())
    assert len(names) == len(set(names))
    assert set(BY_NAME) | {"--help"} == set(names)


@pytest.mark.parametrize("name", SHARED)
def test_option_of_several_verbs_is_the_same_everywhere(name: str) -> None:
    found = [given.option for given in BY_NAME[name]]
    options = [o for o in found if o.param_type_name == "option"]
    assert len({tuple(o.opts) for o in options}) <= 1  # the short name, too
    assert len({tuple(o.secondary_opts) for o in options}) <= 1
    if name in DIFFERENT_HELP:
        assert len({o.help for o in found}) > 1, f"remove {name} from DIFFERENT_HELP"
    else:
        assert len({(o.help, str(o.default)) for o in found}) == 1


def test_field_of_one_name_has_one_type() -> None:
    """One may be optional, and one may be repeated."""
    types = defaultdict(set)
    for kind in (getattr(verb_options, name) for name in verb_options.__all__):
        for name, declared in get_type_hints(kind).items():
            types[name].add(base_type(declared))
    assert {name: found for name, found in types.items() if len(found) > 1} == {}


def base_type(declared: Any) -> Any:
    """Return the type without None and without the list that holds the values."""
    inner = [kind for kind in get_args(declared) if kind is not NoneType]
    is_wrapped = get_origin(declared) in (list, UnionType, Union) and len(inner) == 1
    return base_type(inner[0]) if is_wrapped else declared


@pytest.mark.parametrize("name", ["--workers", "--late", "--min-workers", "--seed", "--batch"])
def test_default_of_an_option_is_the_same_in_every_verb(name: str) -> None:
    """A default of None is resolved later, and the help says to what."""
    found = [given.option for given in BY_NAME[name]]
    defaults = {str(o.default) for o in found if o.default is not None}
    in_help = {
        text for o in found if o.default is None for text in re.findall(r"default: (\w+)", o.help)
    }
    assert len(defaults | in_help) == 1


def test_no_two_options_have_the_same_help() -> None:
    names = defaultdict(set)
    for given in EVERYTHING:
        names[given.option.help].add(given.name)
    assert {text: found for text, found in names.items() if len(found) > 1} == {}


def test_short_name_stands_for_one_option() -> None:
    names = defaultdict(set)
    for given in EVERYTHING:
        for short in (o for o in given.option.opts if re.fullmatch("-[a-z]", o)):
            names[short].add(given.name)
    assert names == {"-w": {"--workers"}, "-p": {"--policy"}, "-l": {"--latency"}}


def test_fields_have_the_names_of_their_options() -> None:
    for kind in (getattr(verb_options, name) for name in verb_options.__all__):
        named = {field.name.replace("_", "-").replace("as-json", "json") for field in fields(kind)}
        assert named - {"context"} <= {name.removeprefix("--") for name in BY_NAME}


def test_settings_of_a_run_have_the_names_of_their_options() -> None:
    options = {field.name for field in fields(verb_options.RunOptions)}
    settings = {*Settings.__struct_fields__, *(field.name for field in fields(RunSpec))}
    assert options - settings == set(OTHER_FIELDS)


def test_verb_command_are_gone_and_the_new_ones_are_there() -> None:
    assert not set(RENAMED) & set(BY_NAME)
    assert set(RENAMED.values()) <= set(BY_NAME)


def test_no_page_or_program_uses_an_old_name() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.py")]
    pages += [*(ROOT / "examples").glob("*.py"), *(ROOT / "bench").glob("*.py")]
    old = re.compile(rf"(?<![\w-])({'|'.join(RENAMED)})(?![\w-])")
    found = [f"{page.name}: {name}" for page in pages for name in old.findall(page.read_text())]
    assert found == []
