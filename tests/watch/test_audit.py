# SPDX-License-Identifier: BSD-3-Clause
"""The audit: a correct trace passes, and any change to one is reported with its line."""

import re
from collections.abc import Callable
from random import Random

import msgspec
import pytest

import fakes
from fakes import POLICY_TABLE
from paceline.core.events import Fate
from paceline.errors import TraceError
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import (
    Ended,
    Gradient,
    Joined,
    Left,
    Paused,
    Record,
    Resumed,
    Stopped,
    Timer,
    Trace,
    Update,
)
from paceline.watch.audit import audit

CLUSTERS = {
    "only times": Cluster.parse("50ms + exp:30ms"),
    "ties": Cluster.parse("50ms"),
    "network": Cluster.parse("50ms + exp:30ms", "model=1MB,bandwidth=50MB,delay=1ms"),
    "faults": Cluster.parse(
        "50ms + exp:30ms", faults="kill any every 1s for 300ms; freeze any every 1s for 200ms"
    ),
}


def run(
    policy: str, cluster: str = "only times", until: float | None = None, **spec: object
) -> Trace:
    described = RunSpec(**{"workers": 3, "steps": 20} | spec)
    return simulate(policy, CLUSTERS[cluster], described, until=until)


def uneven_run(policy: str) -> Trace:
    """Return the trace of a run whose mini-batches have different sizes."""
    cluster = fakes.Cluster.of(policy, steps=8)
    for _ in fakes.random_steps(cluster, Random(3), 500, faults=False):
        pass
    assert cluster.finish
    return fakes.trace_of(cluster)


def with_records(trace: Trace, records: list[Record]) -> Trace:
    return Trace(trace.header, records)


def with_record(trace: Trace, index: int, **fields: object) -> Trace:
    """Return the trace with other fields in one record."""
    records = list(trace.records)
    records[index] = msgspec.structs.replace(records[index], **fields)
    return with_records(trace, records)


def with_header(trace: Trace, **fields: object) -> Trace:
    return Trace(msgspec.structs.replace(trace.header, **fields), trace.records)


def without(trace: Trace, index: int) -> Trace:
    return with_records(trace, trace.records[:index] + trace.records[index + 1 :])


def with_inserted(trace: Trace, index: int, record: Record) -> Trace:
    return with_records(trace, [*trace.records[:index], record, *trace.records[index:]])


def places(trace: Trace, *kinds: type, fate: Fate | None = None) -> list[int]:
    """Return the indices of the records of these kinds; there must be some."""
    found = [
        i
        for i, record in enumerate(trace.records)
        if isinstance(record, kinds) and (fate is None or record.fate is fate)
    ]
    assert found
    return found


def reported_line(trace: Trace) -> int:
    """Return the line that the audit reports."""
    with pytest.raises(TraceError) as caught:
        audit(trace, "run.jsonl")
    message = str(caught.value)
    found = re.match(r"run\.jsonl:(\d+)[ :]", message)
    assert found, message
    assert "\n" not in message
    return int(found[1])


def line_of(index: int) -> int:
    return index + 2  # the header is line 1


# ---- correct traces ----


@pytest.mark.parametrize("late", ["cancel", "finish"])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_simulated_trace_is_sound(policy: str, cluster: str, late: str) -> None:
    audit(run(policy, cluster, late=late, seed=5))


@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_trace_of_a_run_that_was_stopped_is_sound(policy: str) -> None:
    trace = run(policy, until=0.7, steps=None)
    assert places(trace, Stopped)
    audit(trace)


def test_trace_with_pauses_is_sound() -> None:
    trace = run("backup:1", "faults", min_workers=3, steps=60)
    assert places(trace, Paused)
    assert places(trace, Left)
    audit(trace)


def test_trace_with_timers_is_sound() -> None:
    trace = run("deadline:after=60ms")
    assert places(trace, Timer)
    audit(trace)


def test_trace_of_a_stalled_run_is_sound() -> None:
    dying = Cluster.parse("50ms", faults="kill 0 at 320ms; kill 1 at 310ms")
    trace = simulate("sync", dying, RunSpec(workers=2, steps=20))
    assert trace.records[-1].reason.startswith("stalled")
    audit(trace)


def test_trace_that_ends_after_a_decision_is_sound() -> None:
    trace = run("backup:1")
    last = places(trace, Update)[10]
    audit(with_records(trace, trace.records[: last + 1]))


@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_trace_with_mini_batches_of_any_size_is_sound(policy: str) -> None:
    audit(uneven_run(policy))


@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_trace_of_format_1_is_sound_without_weights(policy: str) -> None:
    trace = uneven_run(policy)
    for index in places(trace, Update):
        trace = with_record(trace, index, weights=None, scales=None)
    audit(with_header(trace, format=1))


def test_measured_norms_do_not_matter() -> None:
    trace = run("backup:1")
    for index in places(trace, Gradient, Update):
        trace = with_record(trace, index, sq_norm=0.5 + index)
    audit(trace)


def test_measured_bytes_and_computation_times_do_not_matter() -> None:
    trace = run("backup:1")
    for index in places(trace, Gradient):
        trace = with_record(trace, index, pulled_bytes=7.0, pushed_bytes=8.0, compute_s=0.001)
    audit(trace)


# ---- changed traces ----


@pytest.mark.parametrize("fate", [Fate.LATE, Fate.STALE, Fate.DUPLICATE, Fate.CANCELLED])
def test_wrong_fate_is_found_in_any_record(fate: Fate) -> None:
    trace = run("backup:1", steps=6)
    for index in places(trace, Gradient, fate=Fate.ACCEPTED):
        assert reported_line(with_record(trace, index, fate=fate)) == line_of(index)


def test_late_gradient_recorded_as_accepted_is_found() -> None:
    trace = run("backup:1", late="finish")
    for index in places(trace, Gradient, fate=Fate.LATE):
        assert reported_line(with_record(trace, index, fate=Fate.ACCEPTED)) == line_of(index)


def test_abandoned_work_recorded_as_late_is_found() -> None:
    trace = run("backup:1")
    for index in places(trace, Gradient, fate=Fate.CANCELLED):
        assert reported_line(with_record(trace, index, fate=Fate.LATE)) == line_of(index)


def test_gradient_recorded_as_non_finite_is_found_at_its_update() -> None:
    """Only the shell knows that it was finite, so the audit reports the line of the update."""
    trace = run("backup:1", steps=6)
    index = places(trace, Gradient, fate=Fate.ACCEPTED)[0]
    changed = with_record(trace, index, fate=Fate.NON_FINITE)
    assert line_of(index) < reported_line(changed) <= line_of(places(trace, Update)[0])


@pytest.mark.parametrize(
    "fields",
    [
        {"staleness": 1},
        {"version": 7},
        {"turn": 9},
        {"turn": 0},
        {"worker": 9},
        {"samples": 0},
        {"t": -1.0},
        {"t": float("nan")},
    ],
    ids=str,
)
def test_wrong_field_of_a_gradient_is_found(fields: dict[str, object]) -> None:
    trace = run("backup:1")
    index = places(trace, Gradient, fate=Fate.ACCEPTED)[4]
    assert reported_line(with_record(trace, index, **fields)) == line_of(index)


@pytest.mark.parametrize(
    "change",
    [
        lambda u: {"contributors": u.contributors[::-1]},
        lambda u: {"contributors": u.contributors[:-1]},
        lambda u: {"contributors": (*u.contributors, 9)},
        lambda u: {"contributors": ()},
        lambda u: {"wanted": u.wanted + 1},
        lambda u: {"update": u.update + 1},
        lambda u: {"t": u.t + 0.001},
    ],
    ids=["order", "one less", "one more", "none", "wanted", "number", "time"],
)
def test_wrong_field_of_an_update_is_found(
    change: Callable[[Update], dict[str, object]],
) -> None:
    trace = run("backup:1")
    for index in places(trace, Update):
        changed = with_record(trace, index, **change(trace.records[index]))
        assert reported_line(changed) == line_of(index)


@pytest.mark.parametrize("field", ["weights", "scales"])
def test_update_with_the_wrong_weights_is_found(field: str) -> None:
    trace = uneven_run("softsync:4")
    found = [i for i in places(trace, Update) if getattr(trace.records[i], field) is not None]
    assert found
    for index in found:
        first, *rest = getattr(trace.records[index], field)
        for value in (None, (first + 1e-9, *rest), (first,)):
            assert reported_line(with_record(trace, index, **{field: value})) == line_of(index)


def test_wrong_weight_is_named_even_if_norms_were_measured() -> None:
    trace = run("sync", steps=2)
    index = places(trace, Update)[0]
    changed = with_record(trace, index, sq_norm=2.0, weights=(0.5, 0.25, 0.25))
    with pytest.raises(TraceError, match=r"weights \(0.5, 0.25, 0.25\), but its rule gives None"):
        audit(changed)


@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_missing_decision_is_found_at_its_line(policy: str) -> None:
    trace = run(policy, steps=5)
    for index in places(trace, Update, Resumed):
        changed = without(trace, index)
        if places(changed, Ended) == [index]:
            continue  # nothing but the end comes after it; the next test has that
        assert reported_line(changed) == line_of(index)


def test_trace_that_ends_before_its_last_decision_is_found() -> None:
    trace = run("sync", steps=5)
    last = places(trace, Update)[-1]
    with pytest.raises(
        TraceError, match=r"run\.jsonl: ends before the record 'update' that its rule gives"
    ):
        audit(with_records(trace, trace.records[:last]), "run.jsonl")
    with pytest.raises(
        TraceError, match=r"run\.jsonl: ends before the record 'update' that its rule gives"
    ):
        audit(without(trace, last), "run.jsonl")


def test_missing_join_is_found() -> None:
    trace = run("sync")
    index = places(trace, Joined)[0]
    assert reported_line(without(trace, index)) > 1


@pytest.mark.parametrize(
    "extra",
    [
        Joined(0.2, 0),
        Left(0.2, 9),
        Gradient(0.2, 9, 1, 0, Fate.LATE, 0, 0.0, 0.1, 32),
        Gradient(0.2, 0, 99, 0, Fate.CANCELLED, 0, 0.0, 0.1, 0),
        Update(0.2, 2, (0, 1), 2),
        Timer(0.2, 99),
        Paused(0.2, "tired"),
        Resumed(0.2),
    ],
    ids=lambda record: type(record).__name__,
)
def test_extra_record_is_found(extra: Record) -> None:
    trace = run("backup:1")
    index = next(i for i, record in enumerate(trace.records) if record.t > 0.2)
    assert reported_line(with_inserted(trace, index, extra)) == line_of(index)


def test_repeated_record_is_found_at_any_line() -> None:
    trace = run("backup:1", steps=6)
    for index in places(trace, Joined, Resumed, Update, Gradient):
        twice = with_inserted(trace, index + 1, trace.records[index])
        assert reported_line(twice) == line_of(index + 1)


@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_two_records_in_the_wrong_order_are_found(policy: str) -> None:
    trace = run(policy, steps=8)
    for index in places(trace, Gradient):
        first, second = trace.records[index : index + 2]
        if not isinstance(second, Update) and first.t == second.t:
            continue  # two that happened at once may have happened in any order
        records = list(trace.records)
        records[index : index + 2] = [second, first]
        if isinstance(second, Ended):
            continue  # has a test of its own
        assert line_of(index) <= reported_line(with_records(trace, records)) <= line_of(index + 1)


def test_time_that_goes_backwards_is_found() -> None:
    trace = run("backup:1")
    for index in places(trace, Gradient)[1:]:
        earlier = trace.records[index - 1].t - 0.001
        assert reported_line(with_record(trace, index, t=earlier)) == line_of(index)


@pytest.mark.parametrize(
    ("actual", "change"),
    [
        ("backup:1", "sync"),
        ("backup:1", "backup:2"),
        ("sync", "backup:1"),
        ("async", "softsync:2"),
        ("async", "sync"),
        ("delayed:1", "sync"),
        ("ssp:0", "async"),
        ("deadline:after=60ms", "sync"),
    ],
)
def test_wrong_policy_in_the_header_is_found(actual: str, change: str) -> None:
    assert reported_line(with_header(run(actual, seed=1), policy=change)) > 1


@pytest.mark.parametrize(
    "fields",
    [
        {"policy": "nonsense"},
        {"policy": "backup:3"},
        {"policy": ""},
        {"workers": 0},
        {"steps": 0},
        {"min_workers": 4},
        {"seed": -1},
    ],
    ids=str,
)
def test_invalid_header_is_line_1(fields: dict[str, object]) -> None:
    assert reported_line(with_header(run("backup:1"), **fields)) == 1


@pytest.mark.parametrize("fields", [{"workers": 4}, {"workers": 2}, {"steps": 10}], ids=str)
def test_wrong_spec_in_the_header_is_found(fields: dict[str, object]) -> None:
    assert reported_line(with_header(run("backup:1"), **fields)) > 1


def test_trace_without_records_is_not_sound() -> None:
    with pytest.raises(TraceError, match=r"run\.jsonl has a header but no records"):
        audit(with_records(run("sync"), []), "run.jsonl")


# ---- the end ----


@pytest.mark.parametrize("fields", [{"version": 999}, {"unused": (0,)}, {"t": 0.0}], ids=str)
def test_wrong_field_of_the_end_is_found(fields: dict[str, object]) -> None:
    trace = run("backup:1")
    last = len(trace.records) - 1
    assert reported_line(with_record(trace, last, **fields)) == line_of(last)


def test_end_in_the_middle_is_found() -> None:
    trace = run("backup:1")
    index = places(trace, Update)[5] + 1
    changed = with_inserted(trace, index, Ended(trace.records[index - 1].t, 6))
    assert reported_line(changed) in (line_of(index), line_of(index + 1))


def test_second_end_is_found() -> None:
    trace = run("backup:1")
    changed = with_records(trace, [*trace.records, trace.records[-1]])
    last = len(trace.records) - 1
    assert reported_line(changed) in (line_of(last), line_of(last + 1))
