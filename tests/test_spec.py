# SPDX-License-Identifier: BSD-3-Clause
"""The spec of a run, and the grammar of command-line strings."""

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError, SpecError
from paceline.spec import RunSpec, parse_bytes, parse_number, parse_seconds, split_call

# ------------------------------------------------------------------------------------- RunSpec


def test_only_the_number_of_workers_is_required():
    spec = RunSpec(workers=4)
    assert (spec.steps, spec.min_workers, spec.late, spec.seed) == (None, 1, "cancel", 0)


def test_spec_is_frozen():
    spec = RunSpec(workers=4)
    with pytest.raises(FrozenInstanceError):
        spec.workers = 5
    assert spec == RunSpec(workers=4)
    assert hash(spec) == hash(RunSpec(workers=4))


def test_limits_are_inclusive():
    RunSpec(workers=1, steps=1, min_workers=1, late="finish", seed=0)
    RunSpec(workers=3, min_workers=3)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"workers": 0}, "workers must be >= 1, got 0"),
        ({"workers": -2}, "workers must be >= 1, got -2"),
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"samples": 0}, "samples must be >= 1, got 0"),
        ({"samples": -5}, "samples must be >= 1, got -5"),
        ({"min_workers": 0}, "min_workers must be between 1 and workers=3, got 0"),
        ({"min_workers": 4}, "min_workers must be between 1 and workers=3, got 4"),
        ({"late": "drop"}, "late must be 'cancel' or 'finish', got 'drop'"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
    ],
)
def test_invalid_spec_is_refused_with_its_value(wrong, complaint):
    with pytest.raises(SpecError) as error:
        RunSpec(**{"workers": 3} | wrong)
    assert str(error.value) == complaint


def test_spec_error_is_a_paceline_error_and_a_value_error():
    assert issubclass(SpecError, PacelineError)
    assert issubclass(SpecError, ValueError)


# ---------------------------------------------------------------------------------- split_call


@pytest.mark.parametrize(
    ("text", "name", "values", "named"),
    [
        ("sync", "sync", [], {}),
        ("sync:", "sync", [], {}),
        ("", "", [], {}),
        ("backup:2", "backup", ["2"], {}),
        ("a:1,2,x=3,y=4", "a", ["1", "2"], {"x": "3", "y": "4"}),
        (" a : 1 , x = 3 ", "a", ["1"], {"x": "3"}),
        ("a:b:c", "a", ["b:c"], {}),
        ("a:x=y=z", "a", [], {"x": "y=z"}),
        ("a:,", "a", ["", ""], {}),
    ],
)
def test_call_is_split_into_name_values_and_named_values(text, name, values, named):
    assert split_call(text) == (name, values, named)


def test_name_given_twice_is_refused():
    with pytest.raises(SpecError, match="'a:x=1,x=2' gives x twice"):
        split_call("a:x=1,x=2")


def test_plain_value_after_a_named_one_is_refused():
    with pytest.raises(SpecError, match="plain value '2' after a named one; name it too"):
        split_call("a:x=1,2")


# -------------------------------------------------------------------------------- parse_number


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("-0.5", -0.5), ("1e3", 1000.0)])
def test_number_is_parsed(text, value):
    assert parse_number(text, "x") == value


@pytest.mark.parametrize("text", ["", "one", "1,5", "1s", "--1"])
def test_invalid_number_is_refused_by_its_name(text):
    with pytest.raises(SpecError) as error:
        parse_number(text, "alpha")
    assert str(error.value) == f"alpha must be a number, got {text!r}"


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999"])
def test_number_must_be_finite(text):
    with pytest.raises(SpecError, match="alpha must be a finite number"):
        parse_number(text, "alpha")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_number_survives_its_string(value):
    assert parse_number(str(value), "x") == value


# ------------------------------------------------------------------------------- parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05),
        ("20us", 20e-6),
        ("1.4s", 1.4),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("3", 3.0),
        ("0", 0.0),
        (" 7 s ", 7.0),
        ("1e-3s", 1e-3),
    ],
)
def test_duration_is_parsed_to_seconds(text, seconds):
    assert parse_seconds(text, "x") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "ms", "5 parsecs", "1s2ms", "nan", "infs", "1e999"])
def test_invalid_duration_is_refused_with_an_example(text):
    with pytest.raises(SpecError, match="delay must be a duration such as 50ms") as error:
        parse_seconds(text, "delay")
    assert repr(text) in str(error.value)


def test_duration_is_never_negative():
    with pytest.raises(SpecError, match=r"delay must be >= 0.*'-1s'"):
        parse_seconds("-1s", "delay")


def test_duration_is_always_finite():
    """The number is finite, but not after it is multiplied by the unit."""
    with pytest.raises(SpecError, match=r"delay must be a duration.*'1e308h', which is too large"):
        parse_seconds("1e308h", "delay")


@given(st.floats(0, 1e12), st.sampled_from(["us", "ms", "s", "m", "h", ""]))
def test_every_formatted_duration_is_parsed(number, unit):
    scale = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "": 1}[unit]
    assert parse_seconds(f"{number}{unit}", "x") == pytest.approx(number * scale)


# --------------------------------------------------------------------------------- parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("100", 100), ("1KB", 1000), ("100MB", 1e8), ("1.5GiB", 1.5 * 2**30), ("2KiB", 2048)],
)
def test_size_is_parsed_to_bytes(text, size):
    assert parse_bytes(text, "x") == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "many", "1mb"])
def test_invalid_size_is_refused_by_its_name(text):
    with pytest.raises(SpecError, match="room must be"):
        parse_bytes(text, "room")
