# SPDX-License-Identifier: BSD-3-Clause
"""The audit: an honest trace passes, and whatever is changed in one is found, by its line."""

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
    """The trace with other fields in one record."""
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
    """Where the records of these kinds are; there must be some."""
    found = [
        i
        for i, record in enumerate(trace.records)
        if isinstance(record, kinds) and (fate is None or record.fate is fate)
    ]
    assert found
    return found


def blamed_line(trace: Trace) -> int:
    """The line that the audit finds fault with."""
    with pytest.raises(TraceError) as caught:
        audit(trace, "run.jsonl")
    message = str(caught.value)
    found = re.match(r"run\.jsonl:(\d+)[ :]", message)
    assert found, message
    assert "\n" not in message
    return int(found[1])


def line_of(index: int) -> int:
    return index + 2  # the header is line 1


# ---- honest traces ----


@pytest.mark.parametrize("late", ["cancel", "finish"])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_a_simulated_trace_is_sound(policy: str, cluster: str, late: str) -> None:
    audit(run(policy, cluster, late=late, seed=5))


@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_a_trace_of_a_run_that_was_stopped_is_sound(policy: str) -> None:
    trace = run(policy, until=0.7, steps=None)
    assert places(trace, Stopped)
    audit(trace)


def test_a_trace_with_pauses_is_sound() -> None:
    trace = run("backup:1", "faults", min_workers=3, steps=60)
    assert places(trace, Paused)
    assert places(trace, Left)
    audit(trace)


def test_a_trace_with_timers_is_sound() -> None:
    trace = run("deadline:after=60ms")
    assert places(trace, Timer)
    audit(trace)


def test_a_trace_of_a_stalled_run_is_sound() -> None:
    dying = Cluster.parse("50ms", faults="kill 0 at 320ms; kill 1 at 310ms")
    trace = simulate("sync", dying, RunSpec(workers=2, steps=20))
    assert trace.records[-1].reason.startswith("stalled")
    audit(trace)


def test_a_trace_that_breaks_off_after_a_decision_is_sound() -> None:
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


# ---- dishonest ones ----


@pytest.mark.parametrize("fate", [Fate.LATE, Fate.STALE, Fate.DUPLICATE, Fate.CANCELLED])
def test_another_fate_is_found_wherever_it_is(fate: Fate) -> None:
    trace = run("backup:1", steps=6)
    for index in places(trace, Gradient, fate=Fate.ACCEPTED):
        assert blamed_line(with_record(trace, index, fate=fate)) == line_of(index)


def test_a_late_gradient_that_is_called_accepted_is_found() -> None:
    trace = run("backup:1", late="finish")
    for index in places(trace, Gradient, fate=Fate.LATE):
        assert blamed_line(with_record(trace, index, fate=Fate.ACCEPTED)) == line_of(index)


def test_work_given_up_that_is_called_late_is_found() -> None:
    trace = run("backup:1")
    for index in places(trace, Gradient, fate=Fate.CANCELLED):
        assert blamed_line(with_record(trace, index, fate=Fate.LATE)) == line_of(index)


def test_a_gradient_that_is_called_non_finite_is_missed_in_its_update() -> None:
    """The shell alone knows that it was not, so the line is that of the update."""
    trace = run("backup:1", steps=6)
    index = places(trace, Gradient, fate=Fate.ACCEPTED)[0]
    lying = with_record(trace, index, fate=Fate.NON_FINITE)
    assert line_of(index) < blamed_line(lying) <= line_of(places(trace, Update)[0])


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
def test_a_gradient_that_is_told_otherwise_is_found(fields: dict[str, object]) -> None:
    trace = run("backup:1")
    index = places(trace, Gradient, fate=Fate.ACCEPTED)[4]
    assert blamed_line(with_record(trace, index, **fields)) == line_of(index)


@pytest.mark.parametrize(
    "lie",
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
def test_an_update_that_is_told_otherwise_is_found(
    lie: Callable[[Update], dict[str, object]],
) -> None:
    trace = run("backup:1")
    for index in places(trace, Update):
        lying = with_record(trace, index, **lie(trace.records[index]))
        assert blamed_line(lying) == line_of(index)


@pytest.mark.parametrize("field", ["weights", "scales"])
def test_update_with_the_wrong_weights_is_found(field: str) -> None:
    trace = uneven_run("softsync:4")
    found = [i for i in places(trace, Update) if getattr(trace.records[i], field) is not None]
    assert found
    for index in found:
        first, *rest = getattr(trace.records[index], field)
        for value in (None, (first + 1e-9, *rest), (first,)):
            assert blamed_line(with_record(trace, index, **{field: value})) == line_of(index)


def test_wrong_weight_is_named_even_where_norms_were_measured() -> None:
    trace = run("sync", steps=2)
    index = places(trace, Update)[0]
    lying = with_record(trace, index, sq_norm=2.0, weights=(0.5, 0.25, 0.25))
    with pytest.raises(TraceError, match=r"weights \(0.5, 0.25, 0.25\), but its rule gives None"):
        audit(lying)


@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_a_missing_decision_is_found_where_it_was(policy: str) -> None:
    trace = run(policy, steps=5)
    for index in places(trace, Update, Resumed):
        lying = without(trace, index)
        if places(lying, Ended) == [index]:
            continue  # nothing but the end comes after it; the next test has that
        assert blamed_line(lying) == line_of(index)


def test_a_trace_that_ends_before_its_last_decision_is_found() -> None:
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


def test_a_missing_join_is_found() -> None:
    trace = run("sync")
    index = places(trace, Joined)[0]
    assert blamed_line(without(trace, index)) > 1


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
def test_an_extra_record_is_found(extra: Record) -> None:
    trace = run("backup:1")
    index = next(i for i, record in enumerate(trace.records) if record.t > 0.2)
    assert blamed_line(with_inserted(trace, index, extra)) == line_of(index)


def test_a_record_that_is_there_twice_is_found_wherever_it_is() -> None:
    trace = run("backup:1", steps=6)
    for index in places(trace, Joined, Resumed, Update, Gradient):
        twice = with_inserted(trace, index + 1, trace.records[index])
        assert blamed_line(twice) == line_of(index + 1)


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
        assert line_of(index) <= blamed_line(with_records(trace, records)) <= line_of(index + 1)


def test_a_time_that_runs_backwards_is_found() -> None:
    trace = run("backup:1")
    for index in places(trace, Gradient)[1:]:
        earlier = trace.records[index - 1].t - 0.001
        assert blamed_line(with_record(trace, index, t=earlier)) == line_of(index)


@pytest.mark.parametrize(
    ("truth", "lie"),
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
def test_another_policy_in_the_header_is_found(truth: str, lie: str) -> None:
    assert blamed_line(with_header(run(truth, seed=1), policy=lie)) > 1


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
def test_an_impossible_header_is_line_1(fields: dict[str, object]) -> None:
    assert blamed_line(with_header(run("backup:1"), **fields)) == 1


@pytest.mark.parametrize("fields", [{"workers": 4}, {"workers": 2}, {"steps": 10}], ids=str)
def test_another_run_in_the_header_is_found(fields: dict[str, object]) -> None:
    assert blamed_line(with_header(run("backup:1"), **fields)) > 1


def test_a_trace_without_records_is_not_sound() -> None:
    with pytest.raises(TraceError, match=r"run\.jsonl has a header but no records"):
        audit(with_records(run("sync"), []), "run.jsonl")


# ---- the end ----


@pytest.mark.parametrize("fields", [{"version": 999}, {"unused": (0,)}, {"t": 0.0}], ids=str)
def test_an_end_that_is_told_otherwise_is_found(fields: dict[str, object]) -> None:
    trace = run("backup:1")
    last = len(trace.records) - 1
    assert blamed_line(with_record(trace, last, **fields)) == line_of(last)


def test_an_end_in_the_middle_is_found() -> None:
    trace = run("backup:1")
    index = places(trace, Update)[5] + 1
    lying = with_inserted(trace, index, Ended(trace.records[index - 1].t, 6))
    assert blamed_line(lying) in (line_of(index), line_of(index + 1))


def test_a_second_end_is_found() -> None:
    trace = run("backup:1")
    lying = with_records(trace, [*trace.records, trace.records[-1]])
    last = len(trace.records) - 1
    assert blamed_line(lying) in (line_of(last), line_of(last + 1))
