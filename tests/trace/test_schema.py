# SPDX-License-Identifier: BSD-3-Clause
"""Records of a trace: what is written is read again, and a failed write leaves no partial file."""

import os
import re
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import POLICY_TABLE
from paceline.core.decider import replay
from paceline.core.events import (
    Accept,
    ApplyUpdate,
    Drop,
    Fate,
    Finish,
    GradientArrived,
    UpdateApplied,
)
from paceline.core.policies import parse_policy
from paceline.errors import TraceError
from paceline.sim.cluster import Cluster
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import (
    FORMAT,
    Ended,
    Gradient,
    Header,
    Joined,
    Left,
    Paused,
    Record,
    Resumed,
    Stopped,
    Timer,
    Trace,
    Update,
    event_of,
    write_trace,
)

CLUSTERS = {
    "only times": Cluster.parse("50ms + exp:30ms"),
    "network": Cluster.parse("50ms + exp:30ms", "model=1MB,bandwidth=50MB,delay=1ms"),
    "faults": Cluster.parse(
        "50ms + exp:30ms", faults="kill any every 1s for 300ms; freeze any every 1s for 200ms"
    ),
}

HEADER = Header(source="sim", policy="sync", workers=1)


def run(policy: str, cluster: str = "only times", **spec: object) -> Trace:
    return simulate(policy, CLUSTERS[cluster], RunSpec(**{"workers": 3, "steps": 30} | spec))


# ---- what is written is read ----


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_simulated_trace_survives_writing_and_reading(
    policy: str, cluster: str, tmp_path: Path
) -> None:
    trace = run(policy, cluster, seed=7)
    write_trace(trace, tmp_path / "run.jsonl")
    assert read_trace(tmp_path / "run.jsonl") == trace


def test_path_may_be_a_string(tmp_path: Path) -> None:
    trace = run("sync")
    write_trace(trace, f"{tmp_path}/run.jsonl")
    assert read_trace(f"{tmp_path}/run.jsonl") == trace


def test_file_has_a_line_for_the_header_and_one_for_each_record(tmp_path: Path) -> None:
    trace = run("backup:1")
    write_trace(trace, tmp_path / "run.jsonl")
    lines = [msgspec.json.decode(x) for x in (tmp_path / "run.jsonl").read_bytes().splitlines()]
    assert [line["type"] for line in lines] == [
        "header",
        *(type(record).__name__.lower() for record in trace.records),
    ]
    assert lines[0]["paceline_trace"] == FORMAT


def test_trace_of_format_1_is_still_read(tmp_path: Path) -> None:
    header = msgspec.structs.replace(HEADER, format=1)
    trace = Trace(header, [Joined(0.0, 0), Update(1.0, 1, (0,), 1)])
    write_trace(trace, tmp_path / "run.jsonl")
    assert read_trace(tmp_path / "run.jsonl") == trace
    assert not trace.header.has_weights
    assert HEADER.has_weights


def test_update_without_weights_has_equal_ones() -> None:
    assert Update(1.0, 1, (3, 5), 2).weighted() == [(0.5, 1.0), (0.5, 1.0)]
    uneven = Update(1.0, 1, (3, 5), 2, weights=(0.25, 0.75), scales=(1.0, 0.5))
    assert uneven.weighted() == [(0.25, 1.0), (0.75, 0.5)]


def test_header_holds_the_spec_of_the_run() -> None:
    spec = RunSpec(workers=5, steps=3, min_workers=2, late="finish", seed=11)
    assert Header.of("run", parse_policy("backup:1"), spec, {}).spec() == spec


numbers = st.integers(0, 2**63 - 1)
times = st.floats(allow_nan=False, allow_infinity=False)
amounts = st.floats(min_value=0, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
norms = st.none() | amounts
workers = st.lists(numbers, max_size=4).map(tuple)

headers = st.builds(
    Header,
    source=st.sampled_from(["sim", "run"]),
    policy=texts,
    workers=numbers,
    steps=st.none() | numbers,
    min_workers=numbers,
    late=st.sampled_from(["cancel", "finish"]),
    seed=numbers,
    about=st.dictionaries(texts, texts, max_size=3),
)
gradients = st.builds(
    Gradient,
    t=times,
    worker=numbers,
    turn=numbers,
    version=numbers,
    fate=st.sampled_from(Fate),
    staleness=numbers,
    asked_at=times,
    compute_s=amounts,
    samples=numbers,
    pulled_bytes=amounts,
    pushed_bytes=amounts,
    sq_norm=norms,
)
records: st.SearchStrategy[Record] = st.one_of(
    gradients,
    st.builds(Joined, times, numbers),
    st.builds(Left, times, numbers, texts),
    st.builds(
        Update,
        times,
        numbers,
        workers,
        numbers,
        norms,
        weights=st.none() | st.lists(amounts).map(tuple),
        scales=st.none() | st.lists(amounts).map(tuple),
    ),
    st.builds(Timer, times, numbers),
    st.builds(Stopped, times, st.booleans()),
    st.builds(Paused, times, texts),
    st.builds(Resumed, times),
    st.builds(Ended, times, numbers, workers, texts),
)


@settings(deadline=None)  # it writes a file, and disks are sometimes slow
@given(header=headers, record=records)
def test_any_record_survives_writing_and_reading(
    header: Header, record: Record, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any_record.jsonl"
    write_trace(Trace(header, [record]), path)
    assert read_trace(path) == Trace(header, [record])


# ---- what a trace tells ----


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_replaying_the_events_of_a_trace_gives_its_decisions(
    policy: str, cluster: str, tmp_path: Path
) -> None:
    write_trace(run(policy, cluster, seed=3), tmp_path / "run.jsonl")
    trace = read_trace(tmp_path / "run.jsonl")
    told = replay(parse_policy(trace.header.policy), trace.header.spec(), trace.events())
    actions = [action for each in told for action in each]
    fates = [
        Fate.ACCEPTED if isinstance(action, Accept) else action.fate
        for action in actions
        if isinstance(action, Accept | Drop)
    ]
    updates = [
        (action.update, tuple(c.worker for c in action.contributions), action.wanted)
        for action in actions
        if isinstance(action, ApplyUpdate)
    ]
    assert fates == [g.fate for g in trace.gradients()]
    assert updates == [(u.update, u.contributors, u.wanted) for u in trace.updates()]
    assert [a.version for a in actions if isinstance(a, Finish)] == [trace.header.steps]


def test_decisions_have_no_event() -> None:
    decisions = [Paused(1.0, "so"), Resumed(1.0), Ended(1.0, 1)]
    assert [event_of(record) for record in decisions] == [None] * 3


def test_event_of_an_update_record_is_update_applied() -> None:
    update = Update(2.0, 7, (0,), 1, sq_norm=1.5)
    assert event_of(update) == UpdateApplied(2.0, 7, 1.5)


def test_norm_of_a_gradient_is_in_its_event() -> None:
    gradient = Gradient(2.0, 0, 1, 0, Fate.ACCEPTED, 0, 0.0, 1.0, 8, sq_norm=1.5)
    assert event_of(gradient) == GradientArrived(2.0, 0, 1, 0, 8, sq_norm=1.5)


# ---- nothing is left half-written ----


@contextmanager
def full_disk(after_bytes: int) -> Iterator[None]:
    """Limit the size of files, to simulate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_leaves_no_file(tmp_path: Path) -> None:
    trace, path = run("sync", steps=200), tmp_path / "run.jsonl"
    with full_disk(5000), pytest.raises(TraceError, match=re.escape(f"cannot write {path}")):
        write_trace(trace, path)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    old, path = run("sync", steps=2), tmp_path / "run.jsonl"
    write_trace(old, path)
    with full_disk(5000), pytest.raises(TraceError):
        write_trace(run("sync", steps=200), path)
    assert list(tmp_path.iterdir()) == [path]
    assert read_trace(path) == old


def test_new_trace_replaces_the_old_file(tmp_path: Path) -> None:
    write_trace(run("sync", steps=9), tmp_path / "run.jsonl")
    write_trace(run("sync", steps=2), tmp_path / "run.jsonl")
    assert read_trace(tmp_path / "run.jsonl") == run("sync", steps=2)
    assert list(tmp_path.iterdir()) == [tmp_path / "run.jsonl"]


UNWRITABLE = {
    "in a directory that is not there": "nowhere/run.jsonl",
    "in a file": "file/run.jsonl",
    "a directory": "directory",
    "the directory itself": ".",
    "with too long a name": "a" * 300,
}


@pytest.mark.parametrize("where", UNWRITABLE)
def test_unwritable_path_is_refused_and_leaves_nothing_behind(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("directory").mkdir()
    with pytest.raises(TraceError, match=re.escape(f"cannot write {UNWRITABLE[where]}: ")):
        write_trace(run("sync"), UNWRITABLE[where])
    assert sorted(str(path) for path in Path().rglob("*")) == ["directory", "file"]


def test_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        if os.access(tmp_path, os.W_OK):
            pytest.skip("whoever runs this may write everywhere")
        with pytest.raises(TraceError, match="cannot write"):
            write_trace(run("sync"), tmp_path / "run.jsonl")
        assert list(tmp_path.iterdir()) == []
    finally:
        tmp_path.chmod(0o755)


def test_special_file_is_written_to_not_replaced(tmp_path: Path) -> None:
    """A pipe here; the same holds for /dev/null and /dev/stdout."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with suppress(TraceError):  # to refuse it is just as well
        write_trace(Trace(HEADER, []), path)
    os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_device_without_space_is_refused(tmp_path: Path) -> None:
    """Through a link, so that a bug would replace the link and not the device."""
    path = tmp_path / "run.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(TraceError, match=re.escape(f"cannot write {path}: No space left")):
        write_trace(run("sync"), path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.is_symlink()
