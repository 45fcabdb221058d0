# SPDX-License-Identifier: BSD-3-Clause
"""The number of updates needed: the models, and the noise scale from a trace."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.errors import SpecError, TraceError
from paceline.sim.cluster import Cluster
from paceline.sim.convergence import (
    at_least,
    estimate_noise_scale,
    every_gradient_counts,
    measured,
    noise_scale,
    read_table,
)
from paceline.sim.simulate import simulate
from paceline.spec import RunSpec
from paceline.trace.schema import Gradient, Trace, Update

N = np.arange(1.0, 9.0)


def test_when_every_gradient_counts_half_the_contributions_need_twice_the_updates():
    np.testing.assert_allclose(every_gradient_counts(8, 100).updates(N), 800 / N)


def test_without_noise_the_number_of_contributions_does_not_matter():
    np.testing.assert_allclose(noise_scale(0, 32, 8, 100).updates(N), 100)


def test_infinite_noise_is_the_worst_case():
    np.testing.assert_allclose(noise_scale(float("inf"), 32, 8, 100).updates(N), 800 / N)


@given(st.floats(0, 1e9), st.integers(1, 4096), st.integers(1, 1000))
def test_sync_needs_the_given_updates_and_fewer_contributions_never_need_fewer(
    samples, batch, workers
):
    updates = noise_scale(samples, batch, workers, 500).updates(np.arange(1.0, workers + 1))

    assert updates[-1] == pytest.approx(500)
    assert np.all(np.diff(updates) <= 1e-9 * updates[:-1])


def test_negative_noise_scale_is_refused():
    with pytest.raises(SpecError, match="noise scale must be >= 0"):
        noise_scale(-1, 32, 8, 100)


def test_noise_scale_that_may_be_larger_has_scenarios_up_to_infinity():
    convergence = at_least(250.0, 32, 8, 1000.0)

    counts = np.arange(1.0, 9)
    updates = np.stack([needed(counts) for needed in convergence.scenarios])
    np.testing.assert_allclose(updates[0], noise_scale(250.0, 32, 8, 1000.0).updates(counts))
    np.testing.assert_allclose(updates[-1], every_gradient_counts(8, 1000.0).updates(counts))
    assert np.all(np.diff(updates[:, 0]) > 0)
    np.testing.assert_allclose(updates[:, -1], 1000)
    # Steps are small enough that no scenario in between is missed.
    assert np.all(updates[1:, 0] / updates[:-1, 0] < 1.4)
    assert "at least the 250 samples of the recording" in convergence.assumption


@pytest.mark.parametrize("samples", [0.0, 1e-6, 1e12])
def test_any_noise_scale_may_be_the_least_one(samples):
    updates = [needed(np.array([1.0])) for needed in at_least(samples, 32, 8, 1000.0).scenarios]

    assert np.all(np.diff(updates, axis=0) >= -1e-9)
    assert updates[-1] == 8000


def test_infinite_noise_leaves_one_scenario():
    convergence = at_least(float("inf"), 32, 8, 1000.0)

    assert len(convergence.scenarios) == 1
    assert convergence.updates(4.0) == 2000


def test_table_is_interpolated_linearly_in_the_logarithms():
    updates = measured({2: 400, 8: 100}).updates(np.array([1.0, 2.0, 4.0, 8.0, 16.0]))

    np.testing.assert_allclose(updates, [800, 400, 200, 100, 100])


@pytest.mark.parametrize("table", [{}, {0: 5.0}, {3: 0.0}, {3: float("nan")}, {3: float("inf")}])
def test_invalid_table_is_refused(table):
    with pytest.raises(SpecError):
        measured(table)


def test_table_file_may_have_a_heading_and_empty_lines(tmp_path):
    path = tmp_path / "updates.csv"
    path.write_text("N,updates\n2,400\n\n8,100\n")

    assert read_table(path) == {2: 400.0, 8: 100.0}


@pytest.mark.parametrize(
    "text", ["2,400\nx,3\n", "2,400\n3\n", "2,400\n1,2,3\n", "N,updates\n8;1\n"]
)
def test_bad_line_of_a_table_is_named(tmp_path, text):
    path = tmp_path / "updates.csv"
    path.write_text(text)

    with pytest.raises(SpecError, match=r"updates.csv:2 must be N,updates"):
        read_table(path)


def test_first_line_of_numbers_is_not_a_heading(tmp_path):
    path = tmp_path / "updates.csv"
    path.write_text("8;1000\n")

    with pytest.raises(SpecError, match=r"updates.csv:1 must be N,updates"):
        read_table(path)


def test_unreadable_table_is_named(tmp_path):
    with pytest.raises(SpecError, match="cannot read"):
        read_table(tmp_path / "none.csv")


def with_norms(trace, *, noise, signal, batches, seed=0):
    """Return the trace with norms of gradients of known mean and noise, one sample each."""
    rng = np.random.default_rng(seed)
    size = 400
    mean = rng.normal(size=size)
    mean *= np.sqrt(signal) / np.linalg.norm(mean)
    records, open_gradients = [], []
    for record in trace.records:
        if isinstance(record, Gradient) and record.fate == "accepted":
            samples = batches[record.worker]
            gradient = mean + rng.normal(size=size) * np.sqrt(noise / size / samples)
            open_gradients.append((gradient, samples))
            records.append(replace(record, samples=samples, sq_norm=float(gradient @ gradient)))
        elif isinstance(record, Update):
            average = sum(g * b for g, b in open_gradients) / sum(b for _, b in open_gradients)
            open_gradients.clear()
            records.append(replace(record, sq_norm=float(average @ average)))
        else:
            records.append(record)
    return Trace(trace.header, records)


@pytest.mark.parametrize("batches", [[32] * 4, [8, 16, 32, 64]])
def test_noise_scale_is_estimated_from_the_norms_of_a_trace(batches):
    trace = simulate("sync", Cluster.parse("exp:1s"), RunSpec(workers=4, steps=300))

    found = estimate_noise_scale(with_norms(trace, noise=500.0, signal=2.0, batches=batches))

    assert found == pytest.approx(250, rel=0.1)


def test_dropped_gradients_do_not_affect_the_noise_scale():
    trace = simulate("backup:1", Cluster.parse("exp:1s"), RunSpec(workers=4, steps=300))

    found = estimate_noise_scale(with_norms(trace, noise=500.0, signal=2.0, batches=[32] * 4))

    assert found == pytest.approx(250, rel=0.1)


def test_noise_that_hides_the_gradient_gives_an_infinite_noise_scale():
    trace = simulate("sync", Cluster.parse("exp:1s"), RunSpec(workers=4, steps=2))
    opposite = [
        replace(r, sq_norm=1.0)
        if isinstance(r, Gradient)
        else replace(r, sq_norm=0.0)
        if isinstance(r, Update)
        else r
        for r in trace.records
    ]

    assert estimate_noise_scale(Trace(trace.header, opposite)) == float("inf")


def test_trace_without_norms_has_no_noise_scale():
    trace = simulate("sync", Cluster.parse("exp:1s"), RunSpec(workers=4, steps=2))

    with pytest.raises(TraceError, match="no update with gradient norms"):
        estimate_noise_scale(trace)
