# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that a run moved, added up and in words."""

from msgspec import structs

from paceline.core.events import Fate
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Ended, Gradient, Record
from paceline.watch.report import report
from paceline.watch.traffic import Traffic, traffic_cells, traffic_line
from small_traces import THREE, reported

ACCEPTED, LATE = Fate.ACCEPTED, Fate.LATE


def gradient(pulled: float, pushed: float) -> Gradient:
    return Gradient(1.0, 0, 1, 0, ACCEPTED, 0, 0.0, 1.0, 1, pulled, pushed)


def test_bytes_of_gradients_are_added_up() -> None:
    good, bad = gradient(5, 7), gradient(50, 70)
    assert Traffic.of([good, bad], [bad]) == Traffic(55, 77, 70)
    assert Traffic.of([], []) == Traffic()


def test_traffic_can_be_added_up_and_divided() -> None:
    total = Traffic.total([Traffic(1, 2, 1), Traffic(10, 20, 5)])
    assert total == Traffic(11, 22, 6)
    assert total.per(2) == Traffic(5.5, 11, 3)
    assert Traffic.total([]) == Traffic()


def test_traffic_is_true_if_anything_was_moved() -> None:
    assert Traffic(1, 0, 0)
    assert Traffic(0, 1, 0)
    assert not Traffic()


def test_traffic_in_words() -> None:
    total = Traffic(1.2e9, 620e6, 0)
    assert traffic_line(total, total.per(100)) == (
        "Workers pulled 1.2 GB (12 MB per update) and pushed 620 MB (6.2 MB per update)."
    )
    total = Traffic(1.2e9, 620e6, 3.1e3)
    assert traffic_line(total, total.per(100)).endswith(
        " and pushed 620 MB (6.2 MB per update); 3.1 kB of that (<0.1 %) was never used."
    )
    assert traffic_cells(total) == ["1.2 GB", "620 MB", "3.1 kB"]
    assert traffic_cells(Traffic()) == ["-", "-", "-"]


# ---- in the report ----


def moving(records: list[Record]) -> list[Record]:
    """Return the records with 2 MB to the worker and 1 MB from it for each gradient."""
    return [
        structs.replace(r, pulled_bytes=2e6, pushed_bytes=1e6) if isinstance(r, Gradient) else r
        for r in records
    ]


def test_report_has_the_bytes_of_the_run_and_of_each_worker() -> None:
    late = Gradient(2.5, 0, 9, 1, LATE, 1, 2.0, 0.5, 32)
    records = [*THREE[:-2], late, *THREE[-2:]]
    lines = reported(*moving(records), Ended(3.0, 3))
    assert (
        "Workers pulled 14 MB (4.67 MB per update) and pushed 7 MB (2.33 MB per update); 1 MB of "
        "that (14 %) was never used." in lines
    )
    assert lines[lines.index("") + 1 :][:3] == [
        "worker  accepted  late  median  waited for  pulled  pushed  unused",
        "0              3     1  500 ms           -    8 MB    4 MB    1 MB",
        "1              3     0     1 s         1 s    6 MB    3 MB       -",
    ]


def test_report_says_nothing_where_memory_is_shared() -> None:
    text = "\n".join(reported(*THREE, Ended(3.0, 3)))
    assert "pulled" not in text
    assert "pushed" not in text


def test_simulated_network_is_reported_like_a_real_one() -> None:
    cluster = Cluster.parse("50ms", "model=10MB, bandwidth=1GB")
    lines = report(simulate("sync", cluster, RunSpec(workers=2, steps=10)))
    assert "Workers pulled 200 MB (20 MB per update) and pushed 200 MB (20 MB per update)." in lines
