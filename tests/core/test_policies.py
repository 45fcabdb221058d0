# SPDX-License-Identifier: BSD-3-Clause
"""Policies from strings, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import POLICY_TABLE
from paceline.core.policies import (
    POLICIES,
    Async,
    Backup,
    BatchSync,
    Deadline,
    Delayed,
    SoftSync,
    Ssp,
    Sync,
    parse_policy,
)
from paceline.errors import SpecError

counts = st.integers(0, 10**6)
positive = st.integers(1, 10**6)
quantiles = st.floats(0, 1, exclude_min=True)
free = {"lr": st.sampled_from(["constant", "inverse"]), "bound": st.none() | counts}
durations = st.floats(0, allow_infinity=False)

policies = st.one_of(
    st.just(Sync()),
    st.builds(Backup, counts),
    st.builds(BatchSync, positive),
    st.builds(Deadline, quantiles, n_min=positive, after=st.none() | durations),
    st.builds(Async, **free),
    st.builds(SoftSync, positive, **free),
    st.builds(Ssp, counts, **free),
    st.builds(Delayed, counts),
)


@given(policies)
def test_string_of_a_policy_parses_to_an_equal_policy(policy):
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("sync", Sync()),
        ("backup:2", Backup(2)),
        ("backup:b=2", Backup(2)),
        (" backup : 2 ", Backup(2)),
        ("batchsync:8", BatchSync(8)),
        ("deadline", Deadline(0.9, 1, None)),
        ("deadline:0.8", Deadline(0.8)),
        ("deadline:0.8,2", Deadline(0.8, n_min=2)),
        ("deadline:q=0.8,n_min=2", Deadline(0.8, n_min=2)),
        ("deadline:after=200ms", Deadline(after=0.2)),
        ("deadline:0.9,1,2m", Deadline(after=120.0)),
        ("async", Async()),
        ("async:lr=inverse,bound=20", Async(lr="inverse", bound=20)),
        ("softsync:4", SoftSync(4, lr="inverse")),
        ("softsync:c=4,lr=constant", SoftSync(4, lr="constant")),
        ("ssp:3", Ssp(3)),
        ("ssp:3,bound=2", Ssp(3, bound=2)),
        ("delayed:1", Delayed(1)),
    ],
)
def test_strings_are_parsed(text, policy):
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (Sync(), "sync"),
        (Backup(2), "backup:2"),
        (Deadline(), "deadline"),
        (Deadline(0.5, 2, 1.5), "deadline:q=0.5,n_min=2,after=1.5"),
        (Async(), "async"),
        (SoftSync(4), "softsync:4"),
        (SoftSync(4, lr="constant", bound=0), "softsync:4,lr=constant,bound=0"),
        (Ssp(0), "ssp:0"),
    ],
)
def test_string_of_a_policy_leaves_out_defaults(policy, text):
    assert str(policy) == text


def test_policy_is_returned_unchanged():
    policy = Backup(1)
    assert parse_policy(policy) is policy


def test_policies_are_values():
    assert Backup(1) == Backup(1)
    assert len({Backup(1), Backup(1), Backup(2), Delayed(1)}) == 3


@pytest.mark.parametrize("text", POLICY_TABLE)
def test_every_string_of_the_table_is_parsed(text):
    assert parse_policy(text).name == text.partition(":")[0]


@pytest.mark.parametrize("name", POLICIES)
def test_form_of_a_policy_starts_with_its_name(name):
    assert POLICIES[name].form.startswith(name)


# -------------------------------------------------------------------------------- bad strings


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("backup", "b is missing"),
        ("backup:", "b is missing"),
        ("backup:two", "b must be a whole number, got 'two'"),
        ("backup:1.5", "b must be a whole number, got '1.5'"),
        ("backup:2,3", "'3' is one value too many"),
        ("backup:2,b=3", "b is given twice"),
        ("backup:2,c=3", "'c' is not one of its settings"),
        ("backup:-1", "b must be >= 0, got -1"),
        ("sync:1", "'1' is one value too many"),
        ("sync:b=1", "'b' is not one of its settings"),
        ("batchsync:0", "k must be >= 1, got 0"),
        ("deadline:1.5", r"q must be in \(0, 1\], got 1.5"),
        ("deadline:nan", "q must be a finite number, got 'nan'"),
        ("deadline:soon", "q must be a number, got 'soon'"),
        ("deadline:n_min=0", "n_min must be >= 1, got 0"),
        ("deadline:after=soon", "after must be a duration"),
        ("deadline:after=-1s", "after must be >= 0"),
        ("async:3", "'3' is one value too many"),
        ("async:lr=linear", "lr must be 'constant' or 'inverse', got 'linear'"),
        ("async:bound=-1", "bound must be >= 0, got -1"),
        ("async:bound=few", "bound must be a whole number, got 'few'"),
        ("softsync", "c is missing"),
        ("softsync:0", "c must be >= 1, got 0"),
        ("ssp:-1", "s must be >= 0, got -1"),
        ("delayed:-2", "k must be >= 0, got -2"),
        ("delayed:name=x", "'name' is not one of its settings"),
        ("backup:b=1,b=2", "gives b twice"),
        ("softsync:c=4,constant", "plain value 'constant' after a named one"),
    ],
)
def test_bad_string_is_refused_with_the_reason_and_the_correct_form(text, complaint):
    with pytest.raises(SpecError, match=complaint) as error:
        parse_policy(text)
    assert repr(text) in str(error.value)
    assert POLICIES[text.partition(":")[0]].form in str(error.value)


@pytest.mark.parametrize("text", ["", "bakcup:2", "Sync", ":2", "auto"])
def test_unknown_name_is_refused_with_the_known_names(text):
    if text in POLICIES:
        pytest.skip("it is one by now")
    with pytest.raises(SpecError, match="there is no policy") as error:
        parse_policy(text)
    assert ", ".join(POLICIES) in str(error.value)


@given(st.text(alphabet="synbackup:0123.,=lrqdeadlinem- ", max_size=24))
def test_any_string_is_a_policy_or_a_spec_error(text):
    try:
        policy = parse_policy(text)
    except SpecError:
        return
    assert parse_policy(str(policy)) == policy
