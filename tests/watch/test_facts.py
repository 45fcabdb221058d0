# SPDX-License-Identifier: BSD-3-Clause
"""The facts behind the report, and their names in the documentation."""

import re
from pathlib import Path

import msgspec
import pytest

from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Trace, Update
from paceline.watch.facts import RunFacts, SlowWorker, WorkerPace, gather_facts
from paceline.watch.slowness import find_slow, measure_paces
from paceline.watch.summary import Restoration, Spread, Summary, WorkerSummary, summarize
from paceline.watch.waiting import DEADLINE, waited_for

PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"


def simulated(policy: str, latency: str) -> Trace:
    return simulate(policy, Cluster.parse(latency), RunSpec(workers=8, steps=200))


def test_names_in_the_documentation_are_those_of_the_facts() -> None:
    section = PAGE.read_text().partition("### The report as JSON\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    named = {name for row, _ in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {*RunFacts.__struct_fields__, *Summary.__struct_fields__}
    for field, kinds in {
        "workers": (WorkerPace,),
        "slow": (SlowWorker,),
        "step_s": (Spread,),
        "by_worker": (WorkerSummary,),
        "restorations": (Restoration,),
    }.items():
        [meaning] = [text for row, text in rows if row == f"`{field}`"]
        inner = {name for kind in kinds for name in kind.__struct_fields__}
        assert inner - {"worker"} <= set(re.findall(r"`(\w+)`", meaning))


@pytest.mark.parametrize("policy", ["sync", "backup:1", "deadline", "async"])
def test_facts_are_those_of_the_report(policy: str) -> None:
    trace = simulated(policy, "45ms + exp:5ms + 5% exp:500ms; worker 7 x1.8")
    facts = gather_facts(trace, ["one line"])
    assert (facts.source, facts.ended, facts.text) == ("sim", "finished", ["one line"])
    assert facts.summary == summarize(trace)
    waited, paces = waited_for(trace), measure_paces(trace)
    assert {w.worker: w.waited_for_s for w in facts.workers if w.waited_for_s} == {
        worker: seconds for worker, seconds in waited.items() if worker != DEADLINE
    }
    assert facts.deadline_s == waited.get(DEADLINE, 0.0)
    assert {w.worker: (w.typical_s, w.is_bound) for w in facts.workers} == {
        worker: (pace.typical_s, pace.is_bound) for worker, pace in paces.items()
    }
    slow = find_slow(paces)
    found = [(s.worker, s.when) for s in facts.slow]
    kinds = ("always", "too late", "sometimes", "once")
    lists = (slow.always, slow.too_late, slow.sometimes, slow.once)
    expected = [(p.worker, kind) for kind, own in zip(kinds, lists, strict=True) for p, _ in own]
    assert found == expected
    assert found


def test_slow_worker_is_compared_with_the_others() -> None:
    [slow] = gather_facts(simulated("sync", "100ms; worker 3 x2"), []).slow
    assert (slow.worker, slow.when, slow.slow_s) == (3, "always", [])
    assert (slow.typical_s, slow.others_s) == (pytest.approx(0.2), pytest.approx(0.1))


def test_last_logged_values_are_kept() -> None:
    trace = simulated("sync", "10ms")
    logged = [{"loss": 2.0, "accuracy": 0.5}, {"loss": None}]
    updates = [i for i, record in enumerate(trace.records) if isinstance(record, Update)]
    for i, scalars in zip(updates, logged, strict=False):
        trace.records[i] = msgspec.structs.replace(trace.records[i], scalars=scalars)
    assert gather_facts(trace, []).logged == {"loss": None, "accuracy": 0.5}
