# SPDX-License-Identifier: BSD-3-Clause
"""What a run is told, and who a process is: every odd value is named before anything starts."""

from pathlib import Path

import pytest

from paceline.errors import SpecError
from paceline.run.launch.environment import Identity, adopt, identity, threads, variables
from paceline.run.net.channel import new_token
from paceline.run.settings import Settings
from paceline.spec import RunSpec

SPEC = RunSpec(workers=4, steps=10)


def test_what_was_written_is_read(tmp_path):
    given = Settings(
        spec=RunSpec(workers=4, min_workers=2, late="finish", seed=2**53),
        policy="backup:1",
        samples=1000,
        ema=0.999,
        clip_norm=1.0,
        slow="50ms",
        requeue=False,
        restart=False,
        script="/here/train.py",
        arguments=("--lr", "0.1"),
        folder="/here",
    )
    given.write(tmp_path / "spec.json")
    assert Settings.read(tmp_path / "spec.json") == given


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"policy": "nonsense"}, "nonsense"),
        ({"policy": "backup:4"}, "b must be smaller than the number of workers"),
        ({"slow": "nonsense"}, "nonsense"),
        ({"samples": 0}, "samples must be >= 1, got 0"),
        ({"samples": -5}, "samples must be >= 1, got -5"),
        ({"epochs": 0.0}, "epochs must be > 0 and finite, got 0.0"),
        ({"epochs": float("nan")}, "epochs must be > 0 and finite, got nan"),
        ({"epochs": float("inf")}, "epochs must be > 0 and finite, got inf"),
        ({"ema": 1.0}, "ema must be between 0 and 1, got 1.0"),
        ({"ema": -0.1}, "ema must be between 0 and 1, got -0.1"),
        ({"ema": float("nan")}, "ema must be between 0 and 1, got nan"),
        ({"clip_norm": 0.0}, "clip_norm must be > 0, got 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm must be > 0, got nan"),
        ({"spec": RunSpec(workers=1, seed=2**53 + 1)}, "seed must be at most 9007199254740992"),
    ],
)
def test_a_bad_value_is_named(options, what):
    with pytest.raises(SpecError, match=what):
        Settings(**{"spec": SPEC, **options})


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff\xfe", "malformed"),
        (b'{"spec": {"workers": 4}, "policy": "\xff"}', "utf-8"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `spec`"),
        (b'{"spec": {}}', "missing required field `workers`"),
        (b'{"spec": {"workers": 0}}', "workers must be"),
        (b'{"spec": {"workers": "4"}}', "Expected `int`, got `str`"),
        (b'{"spec": {"workers": 4}, "colour": "red"}', "unknown field `colour`"),
        (b'{"spec": {"workers": 4}, "ema": 2}', "ema must be between 0 and 1"),
        (b'{"spec": {"workers": 4}, "policy": "backup:9"}', "b must be smaller"),
    ],
)
def test_a_file_that_is_no_spec_is_named_with_what_is_wrong(tmp_path, text, what):
    path = tmp_path / "spec.json"
    path.write_bytes(text)
    with pytest.raises(SpecError, match=rf"(?s){path}: .*{what}"):
        Settings.read(path)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path):
    path = tmp_path / "nowhere" / "spec.json"
    with pytest.raises(SpecError, match=f"cannot read {path}: No such file"):
        Settings.read(path)
    with pytest.raises(SpecError, match=f"cannot write {path}: No such file"):
        Settings(spec=SPEC).write(path)


# -------------------------------------------------------------------------- who this process is

SERVER = Identity("unix:@name", Path("/run/token"), Path("/run"), None)
WORKER = Identity("unix:@name", Path("/run/token"), Path("/run"), 3)


@pytest.mark.parametrize("who", [SERVER, WORKER])
def test_a_process_knows_from_its_environment_who_it_is(who):
    assert identity(variables(who)) == who


def test_who_was_started_by_hand_is_nobody():
    assert identity({"PACELINE_ADDRESS": "unix:@name", "HOME": "/"}) is None


@pytest.mark.parametrize(
    ("who", "changes", "what"),
    [
        (SERVER, {"PACELINE_ROLE": "boss"}, "must be 'server' or 'worker', got 'boss'"),
        (SERVER, {"PACELINE_ROLE": ""}, "must be 'server' or 'worker', got ''"),
        (SERVER, {"PACELINE_ADDRESS": None}, "'server', but PACELINE_ADDRESS is not set"),
        (SERVER, {"PACELINE_TOKEN_FILE": ""}, "'server', but PACELINE_TOKEN_FILE is not set"),
        (SERVER, {"PACELINE_RUN_DIR": None}, "'server', but PACELINE_RUN_DIR is not set"),
        (WORKER, {"PACELINE_WORKER": None}, "'worker', but PACELINE_WORKER is not set"),
        (
            WORKER,
            {"PACELINE_WORKER": None, "PACELINE_ADDRESS": None},
            "'worker', but PACELINE_ADDRESS, PACELINE_WORKER is not set",
        ),
        (WORKER, {"PACELINE_WORKER": "-1"}, "the number of a worker, got '-1'"),
        (WORKER, {"PACELINE_WORKER": "first"}, "the number of a worker, got 'first'"),
        (WORKER, {"PACELINE_WORKER": "²"}, "the number of a worker, got '²'"),
    ],
)
def test_an_odd_environment_is_named(who, changes, what):
    environ = {**variables(who), **changes}
    with pytest.raises(SpecError, match=what):
        identity({name: value for name, value in environ.items() if value is not None})


def test_a_worker_needs_no_folder():
    environ = variables(WORKER)
    del environ["PACELINE_RUN_DIR"]
    assert identity(environ).run_dir == Path()


def test_who_is_adopted_is_found(monkeypatch):
    for name in (*variables(WORKER), "PACELINE_THREADS"):
        monkeypatch.setenv(name, "")  # so that they are as they were in the end
    adopt(WORKER, threads=2)
    assert (identity(), threads()) == (WORKER, 2)


@pytest.mark.parametrize("told", ["", "0", "-1", "many", "1.5", "²"])
def test_a_number_of_threads_that_is_none_says_nothing(monkeypatch, told):
    monkeypatch.setenv("PACELINE_THREADS", told)
    assert threads() is None


def test_the_token_is_read_from_its_file(tmp_path):
    path = tmp_path / "token"
    who = Identity("unix:@name", path, tmp_path, None)
    token = new_token()
    path.write_text(f"{token}\n", encoding="ascii")
    assert who.token() == token


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "cannot read the token in .*No such file"),
        (b"\xff", "cannot read the token in .*ascii"),
        (b"", "the token file .* is empty"),
        (b" \n", "the token file .* is empty"),
    ],
)
def test_a_token_that_is_none_is_named(tmp_path, content, what):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError, match=what):
        Identity("unix:@name", path, tmp_path, None).token()


def test_tokens_are_long_and_never_the_same():
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {64}
