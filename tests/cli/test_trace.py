# SPDX-License-Identifier: BSD-3-Clause
"""`paceline trace show` and `paceline trace check`, even while the run is in progress."""

import zlib
from pathlib import Path

import msgspec
import pytest

from cli_fixtures import SMALL, Call, Simulate, one_line, refuse_wrong_input
from gapped import with_gap, with_random_gaps
from paceline.cli.trace import check, show
from paceline.errors import TraceError
from paceline.run.launch.run_folder import is_locked, lock
from paceline.run.server.checkpoint import Archive, Saved, Snapshot
from paceline.trace.schema import Gradient, Header, Joined, Restored, Trace, Update, write_trace

RULES = ["sync", "backup:1", "batchsync:4", "deadline", "async", "softsync:2", "ssp:1", "delayed:1"]


@pytest.mark.parametrize("rule", RULES)
def test_saved_trace_is_consistent(rule: str, call: Call) -> None:
    assert call("simulate", *SMALL, "-p", rule, "--out", "run.jsonl").code == 0
    answer = call("trace", "check", "run.jsonl")
    assert (answer.code, answer.err) == (0, "")
    assert f"run.jsonl is consistent: sim of {rule}, 3 workers, 20 updates in " in answer.words
    assert " accepted" in answer.out


def test_trace_check_json_equals_the_summary_of_simulate(call: Call) -> None:
    result = call("simulate", *SMALL, "-p", "backup:1", "--out", "run.jsonl", "--json")
    assert call("trace", "check", "run.jsonl", "--json").json == result.json[0]


@pytest.mark.parametrize("seed", range(12))
def test_trace_with_any_gaps_is_shown(seed: int, simulated: Simulate, call: Call) -> None:
    trace = simulated(RULES[seed % len(RULES)])
    write_trace(with_random_gaps(trace, seed), "run.jsonl")
    answer = call("trace", "show", "run.jsonl")
    assert (answer.code, answer.err) == (0, "")
    assert "gap" in answer.out or "breaks off" in answer.out
    facts = call("trace", "show", "run.jsonl", "--json")
    assert (facts.code, facts.err) == (0, "")
    assert " ".join(facts.json["text"]).split() == answer.words.split()
    checked = call("trace", "check", "run.jsonl")
    assert checked.code == 3 or "consistent so far (the trace breaks off)" in checked.words


@pytest.mark.usefixtures("recorded")
def test_truncated_trace_is_refused_with_its_line(call: Call) -> None:
    whole = Path("run.jsonl").read_bytes()
    Path("run.jsonl").write_bytes(whole[:-10])
    last = len(whole.splitlines())
    assert f"run.jsonl:{last}:" in one_line(call("trace", "check", "run.jsonl"), 3)


def test_inconsistent_trace_is_refused_with_its_line(recorded: Trace, call: Call) -> None:
    index = next(i for i, r in enumerate(recorded.records) if isinstance(r, Update))
    recorded.records[index] = msgspec.structs.replace(recorded.records[index], wanted=3)
    write_trace(recorded, "run.jsonl")
    assert f"run.jsonl:{index + 2}:" in one_line(call("trace", "check", "run.jsonl"), 3)


def test_trace_with_a_negative_computation_time_is_refused(recorded: Trace, call: Call) -> None:
    index = next(i for i, r in enumerate(recorded.records) if isinstance(r, Gradient))
    recorded.records[index] = msgspec.structs.replace(recorded.records[index], compute_s=-1.0)
    write_trace(recorded, "run.jsonl")
    assert f"run.jsonl:{index + 2}:" in one_line(call("trace", "check", "run.jsonl"), 3)


def test_run_folder_can_be_given_instead_of_its_trace(
    simulated: Simulate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated("sync", steps=10)  # too short for planning, which would take time
    show(tmp_path / "trace.jsonl", as_json=False)
    by_file = capsys.readouterr().out
    show(tmp_path, as_json=False)
    assert capsys.readouterr().out == by_file
    check(tmp_path, as_json=False)
    assert capsys.readouterr().out.startswith(f"{tmp_path}/trace.jsonl is consistent: sim of sync,")


def test_shown_facts_agree_with_the_report_and_the_summary(call: Call) -> None:
    latency = "45ms + exp:5ms + 5% exp:500ms; worker 7 x1.8"
    simulated = ("simulate", "-w", "8", "--steps", "100", "-p", "backup:1", "-l", latency)
    summary = call(*simulated, "--out", "run.jsonl", "--json").json[0]
    answer = call("trace", "show", "run.jsonl", "--json")
    assert (answer.code, answer.err) == (0, "")
    facts = answer.json
    assert facts["summary"] == summary
    assert " ".join(facts["text"]).split() == call("trace", "show", "run.jsonl").out.split()


def test_facts_of_a_run_without_updates_have_no_summary(tmp_path: Path, call: Call) -> None:
    header = Header(source="run", policy="sync", workers=2)
    write_trace(Trace(header, [Joined(0.0, 0)]), tmp_path / "run.jsonl")
    facts = call("trace", "show", "run.jsonl", "--json").json
    assert (facts["summary"], facts["ended"]) == (None, "the trace breaks off")
    assert facts["text"][0] == "The run made no updates (the trace breaks off)."
    (tmp_path / "trace.jsonl").write_bytes((tmp_path / "run.jsonl").read_bytes())
    with lock(tmp_path):
        assert call("trace", "show", ".", "--json").json["ended"] == "still running"
        assert call("trace", "check", ".", "--json").out == "null\n"


def test_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace\.jsonl"):
        show(tmp_path, as_json=False)


def test_check_says_which_updates_were_lost(
    simulated: Simulate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = simulated("sync", "50ms", 2, 5)
    *records, end = trace.records
    restored = Restored(end.t, 3, trace.header, turns={0: 3, 1: 3})
    resumed = msgspec.structs.replace(restored, resumed=True)
    write_trace(Trace(trace.header, [*records, restored, resumed]), tmp_path / "trace.jsonl")
    check(tmp_path, as_json=False)
    out = capsys.readouterr().out
    assert "is consistent so far (the trace breaks off)" in out
    assert (
        "3 of 5 updates in 250 ms; the run was resumed 1 x, nothing lost; "
        "the server was restored 1 x, updates 4-5 lost; gradients: 6 accepted, 4 lost." in out
    )


# ---- incomplete traces ----


@pytest.fixture
def run_folder(simulated: Simulate, tmp_path: Path) -> Trace:
    """Put the trace of a finished run into its folder, with the checksum of a real one."""
    trace = simulated("sync", "50ms", 2, 20)
    lines = [msgspec.json.encode(line) + b"\n" for line in (trace.header, *trace.records)]
    checksum = zlib.crc32(b"".join(lines[:-1]))
    trace.records[-1] = msgspec.structs.replace(trace.records[-1], checksum=checksum)
    write_trace(trace, tmp_path / "trace.jsonl")
    (tmp_path / "finished").write_text("20\n")
    return trace


def save_checkpoint(folder: Path, version: int, trace: tuple[int, int]) -> None:
    archive = Archive(folder / "checkpoints", pytest.fail)
    archive.save(Snapshot.of(Saved(version, 1, [], None, {}, {}, trace=trace)), {})
    archive.wait()


def without_update(text: bytes, update: int) -> bytes:
    """Return a trace without the lines of one whole round."""
    lines = text.splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if b'"type":"update"' in line]
    return b"".join(lines[: ends[update - 2] + 1] + lines[ends[update - 1] + 1 :])


@pytest.mark.usefixtures("run_folder")
def test_whole_trace_of_a_finished_run_is_consistent(tmp_path: Path, call: Call) -> None:
    text = (tmp_path / "trace.jsonl").read_bytes()
    save_checkpoint(tmp_path, 20, (1000, zlib.crc32(text[:1000])))
    assert "is consistent: sim of sync, 2 workers, 20 updates" in call("trace", "check", ".").words


def test_gap_is_refused_and_says_what_is_missing(run_folder: Trace, call: Call) -> None:
    write_trace(with_gap(run_folder, 5, 12), "trace.jsonl")
    error = one_line(call("trace", "check", "."), 3)
    assert "changed or removed" in error  # the checksum was that of the whole file
    run_folder.records[-1] = msgspec.structs.replace(run_folder.records[-1], checksum=None)
    write_trace(with_gap(run_folder, 5, 12), "trace.jsonl")
    error = one_line(call("trace", "check", "."), 3)
    assert "has a gap: updates 6 to 12 are missing (21 records)" in error
    assert "it has 13 of 20 updates" in error


@pytest.mark.usefixtures("run_folder")
def test_lines_removed_from_the_middle_are_found(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "trace.jsonl"
    whole = path.read_bytes()
    path.write_bytes(without_update(whole, 7))
    last = len(path.read_bytes().splitlines())
    error = one_line(call("trace", "check", "."), 3)
    assert f"trace.jsonl:{last}: lines before this one were changed or removed" in error


@pytest.mark.usefixtures("run_folder")
def test_finished_run_whose_trace_was_cut_is_found(tmp_path: Path, call: Call) -> None:
    path = tmp_path / "trace.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if b'"type":"update"' in line]
    path.write_bytes(b"".join(lines[: ends[8] + 1]))
    error = one_line(call("trace", "check", "."), 3)
    assert "has no end, although the run finished: it has 9 of 20 updates" in error
    (tmp_path / "finished").unlink()  # then it was killed, or was copied without its end
    words = call("trace", "check", ".").words
    assert "is consistent so far (the trace breaks off): sim of sync, 2 workers, 9 of 20" in words


@pytest.mark.parametrize(("version", "size"), [(11, 0), (5, 10**6), (5, 400)])
def test_trace_that_is_shorter_than_at_its_checkpoint_is_found(
    half: Path, call: Call, version: int, size: int
) -> None:
    lines = half.read_bytes().splitlines(keepends=True)
    half.write_bytes(b"".join(lines[:-1]))  # ten updates
    save_checkpoint(half.parent, version, (size, 99 if size else 0))
    error = one_line(call("trace", "check", "."), 3)
    assert f"is missing records that it had at the checkpoint of version {version}" in error


# ---- wrong input ----

WRONG = {
    "a missing trace to check": ("trace check missing", 3, "missing"),
    "an empty trace to check": ("trace check empty", 3, "empty"),
    "a directory to check": ("trace check .", 3, "directory"),
    "text instead of a trace to check": ("trace check words", 3, "words:1"),
    "binary garbage to check": ("trace check garbage", 3, "garbage:1"),
    "a trace to check with only a header": ("trace check header", 3, "header"),
}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_input_gives_one_line_and_an_exit_code(
    wrong: str, call: Call, tmp_path: Path
) -> None:
    refuse_wrong_input(call, tmp_path, WRONG[wrong])


# ---- a run in progress ----


@pytest.fixture
def half(simulated: Simulate, tmp_path: Path) -> Path:
    """Return a trace with ten of twenty updates and half of the next line."""
    trace = simulated("sync", "50ms + exp:5ms", 2, 20)
    tenth = next(i for i, r in enumerate(trace.records, 1) if getattr(r, "update", 0) == 10)
    path = tmp_path / "trace.jsonl"
    write_trace(Trace(trace.header, trace.records[:tenth]), path)
    with path.open("ab") as file:
        file.write(b'{"type":"gradient","t":')
    return path


def test_running_run_is_described_so_far(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lock(half.parent):
        show(half.parent, as_json=False)
        check(half, as_json=False)
    words = " ".join(capsys.readouterr().out.split())
    assert "; still running at update 10 of 20." in words
    assert f"{half} is consistent so far (still running): " in words
    with pytest.raises(TraceError, match="truncated"):  # no run is writing it
        show(half, as_json=False)


def test_running_run_may_be_in_the_middle_of_an_event(
    half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = half.read_bytes().splitlines(keepends=True)[:-1]
    half.write_bytes(b"".join(lines[:-1]))  # without the update that the gradients complete
    with lock(half.parent):
        check(half, as_json=False)
    assert "is consistent so far (still running): " in capsys.readouterr().out
    with pytest.raises(TraceError, match="ends before the record"):
        check(half, as_json=False)


@pytest.mark.parametrize("count", [1, 2], ids=["header", "one joined"])
def test_run_that_just_started_has_no_update_yet(
    count: int, half: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half.write_bytes(b"".join(half.read_bytes().splitlines(keepends=True)[:count]))
    with lock(half.parent):
        show(half, as_json=False)
        check(half, as_json=False)
    words = capsys.readouterr().out
    assert words.startswith("The run is still running and has made no updates yet.\n")
    assert words.endswith("is consistent so far (still running): no update yet.\n")


def test_reading_a_run_does_not_lock_it(half: Path) -> None:
    with lock(half.parent):
        assert is_locked(half.parent)
    assert not is_locked(half.parent)
    with lock(half.parent):
        assert is_locked(half.parent)
    assert not is_locked(half.parent / "nowhere")
