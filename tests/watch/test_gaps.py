# SPDX-License-Identifier: BSD-3-Clause
"""A trace with a gap is replayed before and after it, and every reader knows what is missing."""

from pathlib import Path
from random import Random

import msgspec
import pytest

from gapped import with_gap, with_random_gaps
from paceline.core.events import Fate
from paceline.errors import SpecError, TraceError
from paceline.lab.updates_of_trace import schedule
from paceline.sim.cluster import Cluster
from paceline.sim.pilot import study
from paceline.sim.recorded_times import recorded_times
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import (
    Ended,
    Gap,
    Gradient,
    Restored,
    Trace,
    Update,
    write_trace,
)
from paceline.watch.audit import audit
from paceline.watch.facts import gather_facts
from paceline.watch.figures import draw_comparison
from paceline.watch.gaps import check_complete, missing_parts, name_updates
from paceline.watch.live_numbers import Live
from paceline.watch.report import report
from paceline.watch.summary import summarize
from paceline.watch.waiting import waited_for

LATENCY = "50ms + exp:5ms; worker 2 x2"


def simulated(policy: str = "sync", steps: int = 40) -> Trace:
    return simulate(policy, Cluster.parse(LATENCY), RunSpec(workers=3, steps=steps, seed=1))


def changed_update(trace: Trace, update: int) -> Trace:
    """Return the trace with one contributor less in this update."""
    records = list(trace.records)
    for i, record in enumerate(records):
        if isinstance(record, Update) and record.update == update:
            contributors = record.contributors[:-1]
            records[i] = msgspec.structs.replace(record, contributors=contributors)
    return Trace(trace.header, records)


REPLAYED = ["sync", "backup:1", "batchsync:4", "deadline:0.5", "async", "softsync:2", "delayed:2"]


@pytest.mark.parametrize("policy", REPLAYED)
def test_decisions_after_a_gap_are_replayed(policy: str) -> None:
    trace = with_gap(simulated(policy), 10, 25)
    audit(trace)
    with pytest.raises(TraceError, match="contributors"):
        audit(changed_update(trace, 30))


def test_rule_that_does_not_say_what_it_remembers_is_not_replayed_after_a_gap() -> None:
    trace = with_gap(simulated("ssp:1"), 10, 25)
    audit(trace)
    audit(changed_update(trace, 30))
    with pytest.raises(TraceError, match="contributors"):
        audit(changed_update(trace, 5))


@pytest.mark.parametrize("policy", ["sync", "backup:1"])
def test_lines_that_were_cut_out_without_a_gap_are_found(policy: str) -> None:
    trace = with_gap(simulated(policy), 10, 25)
    without = [record for record in trace.records if not isinstance(record, Gap)]
    with pytest.raises(TraceError, match="trace:"):
        audit(Trace(trace.header, without))


def test_gap_may_reach_from_the_beginning_to_the_end() -> None:
    whole = simulated()
    *_, end = whole.records
    gap = with_gap(whole, 0, 40).records[0]
    assert isinstance(gap, Gap)
    audit(Trace(whole.header, [gap, end]))
    wrong = msgspec.structs.replace(end, version=39)
    with pytest.raises(TraceError, match="'ended'"):
        audit(Trace(whole.header, [gap, wrong]))


def test_time_does_not_go_backwards_in_a_gap() -> None:
    trace = with_gap(simulated(), 10, 25)
    index = next(i for i, record in enumerate(trace.records) if isinstance(record, Gap))
    trace.records[index] = msgspec.structs.replace(trace.records[index], t=0.0)
    with pytest.raises(TraceError, match=f"trace:{index + 2}: time must not go backwards"):
        audit(trace)


# ---------------------------------------------------------------------------------- what is missing


def test_missing_updates_are_named() -> None:
    trace = with_gap(with_gap(simulated(), 30, 31), 10, 25)
    first, second = missing_parts(trace)
    assert (first.after, first.version, first.updates) == (10, 25, 15)
    assert first.t < first.until
    assert name_updates(first) == f"updates 11 to 25 are missing ({first.records} records)"
    assert name_updates(second).startswith("update 31 is missing (")
    nothing_made = msgspec.structs.replace(second, after=31, records=None)
    assert name_updates(nothing_made) == "records after update 31 are missing"
    one = msgspec.structs.replace(nothing_made, records=1)
    assert name_updates(one) == "1 record after update 31 is missing"


def test_gap_is_an_error_that_says_how_many_updates_there_are() -> None:
    trace = with_gap(simulated(), 10, 25)
    with pytest.raises(TraceError) as caught:
        check_complete(trace, "run.jsonl", None)
    assert str(caught.value).startswith("run.jsonl has a gap: updates 11 to 25 are missing (")
    assert "it has 25 of 40 updates, and the rest is consistent" in str(caught.value)


def test_finished_run_whose_trace_has_no_end_is_an_error() -> None:
    whole = simulated()
    check_complete(whole, "run.jsonl", 40)
    cut = Trace(whole.header, [r for r in whole.records if r.t < 1.0 and not isinstance(r, Ended)])
    check_complete(cut, "run.jsonl", None)  # the run was killed, or is in progress
    made = len(list(cut.updates()))
    with pytest.raises(TraceError) as caught:
        check_complete(cut, "run.jsonl", 40)
    assert str(caught.value) == (
        f"run.jsonl has no end, although the run finished: it has {made} of 40 updates"
    )


def test_updates_that_were_lost_and_made_again_are_counted_once() -> None:
    first = [Update(float(n), n, (0,), 1) for n in range(1, 8)]
    restored = Restored(7.0, 5, simulated().header)
    second = [Update(7.0 + n, 5 + n, (0,), 1) for n in range(1, 4)]
    trace = Trace(simulated().header, [*first, restored, Gap(7.5, 5), *second])
    with pytest.raises(TraceError, match="it has 8 of 8 updates"):
        check_complete(trace, "run.jsonl", None)


# ----------------------------------------------------------------------------------- other readers


def test_summary_leaves_out_what_a_gap_hides() -> None:
    whole, gapped = summarize(simulated()), summarize(with_gap(simulated(), 10, 25))
    assert gapped.updates == 25
    assert gapped.seconds == whole.seconds
    assert gapped.step_s.max <= whole.step_s.max
    assert gapped.updates_per_s == pytest.approx(whole.updates_per_s, rel=0.1)
    assert gapped.idle_share == pytest.approx(whole.idle_share, abs=0.05)
    assert gapped.fates[Fate.ACCEPTED] == 75
    assert [part.updates for part in gapped.missing] == [15]
    assert whole.missing == []


def test_trace_without_two_updates_in_a_row_has_no_times() -> None:
    trace = with_gap(simulated(), 0, 39)
    summary = summarize(trace)
    assert (summary.updates, summary.updates_per_s, summary.step_s) == (1, None, None)
    first, *others = report(trace)
    assert first.startswith("sync with 3 workers: 1 of 40 updates (the trace has gaps) in 4.49 s, ")
    assert any(line.startswith("The trace has a gap: updates 1 to 39 are") for line in others)


def test_trace_whose_gap_hides_all_updates_does_not_say_that_none_was_made() -> None:
    whole = simulated()
    *_, end = whole.records
    gap = with_gap(whole, 0, 40).records[0]
    lines = report(Trace(whole.header, [gap, end]))
    assert lines[0] == "The trace has none of the run's updates (finished)."
    assert lines[1].startswith("The trace has a gap: updates 1 to 40 are missing (")


@pytest.mark.parametrize("seed", range(40))
def test_gaps_of_any_shape_are_read(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    whole = simulated(rng.choice([*REPLAYED, "ssp:1"]), steps=rng.choice([1, 2, 5, 40]))
    trace = with_random_gaps(whole, seed)
    lines = report(trace)
    assert not any(odd in line for line in lines for odd in ("nan", "inf/s", "None", " -1"))
    facts = gather_facts(trace, lines)
    if facts.summary is not None:
        assert facts.summary.seconds >= 0.0
        assert facts.summary.updates_per_s is None or facts.summary.updates_per_s > 0.0
        assert 0.0 <= facts.summary.idle_share <= 1.0
    assert sum(waited_for(trace).values()) <= sum(waited_for(whole).values()) + 1e-9
    path = tmp_path / "trace.jsonl"
    write_trace(trace, path)
    live = Live(path)
    live.read(0.0)
    assert live.moment(0.0).version <= 40


def test_many_gaps_are_not_all_named() -> None:
    trace = simulated()
    for update in range(36, 2, -4):
        trace = with_gap(trace, update, update + 1)
    lines = [line for line in report(trace) if line.startswith("The trace has ")]
    assert len(lines) == 6
    assert lines[-1] == "The trace has 4 more gaps."
    with pytest.raises(
        TraceError, match=r"has gaps: update 5 is .*\), and 4 more; it has 31 of 40"
    ):
        check_complete(trace, "run.jsonl", None)


def test_figure_shows_the_times_that_gaps_do_not_hide(tmp_path: Path) -> None:
    traces = [with_gap(simulated(), 10, 25), with_gap(simulated("async"), 0, 39)]
    figure = draw_comparison(traces, tmp_path / "rules.png")
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert any(text.startswith("? updates/s, ") for text in texts)
    longest = summarize(simulated()).step_s.max
    for line in figure.axes[-1].get_lines():
        assert max(line.get_xdata(), default=0.0) <= longest


def test_waiting_during_a_gap_is_not_charged() -> None:
    whole, gapped = waited_for(simulated()), waited_for(with_gap(simulated(), 10, 25))
    assert set(gapped) == set(whole)
    assert gapped[2] < 0.7 * whole[2]


def test_report_names_the_gap() -> None:
    lines = report(with_gap(simulated(), 10, 25))
    assert any(line.startswith("The trace has a gap: updates 11 to 25 are") for line in lines)
    assert not any("never joined" in line for line in report(with_gap(simulated(), 0, 25)))


def test_live_numbers_continue_after_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    moments = []
    for trace in (simulated(), with_gap(simulated(), 0, 25)):
        write_trace(trace, path)
        live = Live(path)
        live.read(0.0)
        moments.append(live.moment(0.0))
    whole, gapped = moments
    assert (gapped.version, gapped.samples, gapped.workers) == (40, whole.samples, 3)
    assert (gapped.paused, gapped.ended) == ("", "finished")


def test_planner_leaves_out_what_surrounds_a_gap() -> None:
    whole, gapped = simulated(steps=200), with_gap(simulated(steps=200), 80, 120)
    assert study(gapped, 0).own_s == pytest.approx(study(whole, 0).own_s, rel=0.05)
    count = sum(isinstance(r, Gradient) for r in gapped.records)
    assert recorded_times(gapped, 0, with_travel=True).total == count
    with pytest.raises(SpecError, match="the run made 19"):
        study(with_gap(simulated(), 0, 20), 0)


def test_trace_with_a_gap_is_no_training_schedule() -> None:
    with pytest.raises(TraceError, match="the trace has a gap before update 25"):
        schedule(with_gap(simulated(), 10, 25))
