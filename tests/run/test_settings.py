# SPDX-License-Identifier: BSD-3-Clause
"""The settings of a run: bad values are named before anything starts."""

import pytest

from paceline.errors import SpecError
from paceline.run.settings import Settings
from paceline.spec import RunSpec

SPEC = RunSpec(workers=4, steps=10)


def test_written_settings_are_read_back(tmp_path):
    given = Settings(
        spec=RunSpec(workers=4, samples=1000, min_workers=2, late="finish", seed=2**53),
        policy="backup:1",
        ema=0.999,
        clip_norm=1.0,
        latency="50ms",
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
        ({"latency": "nonsense"}, "nonsense"),
        ({"epochs": 0.0}, "epochs must be > 0 and finite, got 0.0"),
        ({"epochs": float("nan")}, "epochs must be > 0 and finite, got nan"),
        ({"epochs": float("inf")}, "epochs must be > 0 and finite, got inf"),
        ({"ema": 1.0}, "ema must be between 0 and 1, got 1.0"),
        ({"ema": -0.1}, "ema must be between 0 and 1, got -0.1"),
        ({"ema": float("nan")}, "ema must be between 0 and 1, got nan"),
        ({"clip_norm": 0.0}, "clip_norm must be > 0, got 0.0"),
        ({"clip_norm": float("nan")}, "clip_norm must be > 0, got nan"),
        ({"spec": RunSpec(workers=1_000_001)}, "workers must be at most 1000 .* got 1000001"),
        ({"spec": RunSpec(workers=1, seed=2**53 + 1)}, "seed must be at most 9007199254740992"),
    ],
)
def test_bad_value_is_named(options, what):
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
        (b'{"spec": {"workers": 4}, "slow": "5ms"}', "`slow`.*with another release of Paceline"),
        (b'{"spec": {"workers": 4}, "ema": 2}', "ema must be between 0 and 1"),
        (b'{"spec": {"workers": 4}, "policy": "backup:9"}', "b must be smaller"),
    ],
)
def test_bad_file_is_named_with_the_reason(tmp_path, text, what):
    path = tmp_path / "spec.json"
    path.write_bytes(text)
    with pytest.raises(SpecError, match=rf"(?s){path}: .*{what}"):
        Settings.read(path)


def test_unreadable_or_unwritable_file_is_named(tmp_path):
    path = tmp_path / "nowhere" / "spec.json"
    with pytest.raises(SpecError, match=f"cannot read {path}: No such file"):
        Settings.read(path)
    with pytest.raises(SpecError, match=f"cannot write {path}: No such file"):
        Settings(spec=SPEC).write(path)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"script": "gone.py"}, "there is no script .*gone.py"),
        ({"folder": "gone"}, "working directory .*gone no longer exists; create it, or name"),
        ({"arguments": ("\udcff",)}, "must be UTF-8"),
    ],
)
def test_script_that_cannot_run_is_refused(tmp_path, changes, what):
    (tmp_path / "train.py").touch()
    given = {"script": "train.py", **changes}
    paths = {name: str(tmp_path / given[name]) for name in ("script", "folder") if name in given}
    with pytest.raises(SpecError, match=what):
        Settings(spec=SPEC, **{**given, **paths}).with_absolute_paths()


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    settings = Settings(spec=SPEC, script="train.py").with_absolute_paths()
    assert (settings.script, settings.folder) == (str(tmp_path / "train.py"), str(tmp_path))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"tls_cert": "c", "transport": "tcp"}, "TLS needs both --tls-cert and --tls-key"),
        ({"tls_key": "k", "transport": "tcp"}, "TLS needs both --tls-cert and --tls-key"),
        ({"tls_ca": "a", "transport": "tcp"}, "TLS needs both --tls-cert and --tls-key"),
    ],
)
def test_incomplete_tls_is_refused(given, what):
    with pytest.raises(SpecError, match=what):
        Settings(spec=SPEC, **given)
