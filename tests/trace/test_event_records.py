# SPDX-License-Identifier: BSD-3-Clause
"""The records of an event and of the actions that were decided on it."""

from random import Random

import msgspec
import pytest

from fakes import POLICY_TABLE, Cluster, random_steps, trace_of
from paceline.core.events import ApplyUpdate, Contribution, GradientArrived, Pause
from paceline.errors import InternalError
from paceline.trace.event_records import Made, record_event
from paceline.trace.schema import Update


def update_of(samples, scales, made=None):
    """Return the record of an update with these contributions."""
    event = GradientArrived(1.0, 0, 1, 0)
    contributions = tuple(
        Contribution(worker, 0, n, scale)
        for worker, (n, scale) in enumerate(zip(samples, scales, strict=True))
    )
    weights = tuple(n / sum(samples) for n in samples)
    action = ApplyUpdate(1, contributions, weights, tuple(scales), len(samples))
    accepted = Cluster.of("async", workers=1).arrive(0)[0]
    _, update = record_event(event, [accepted, action], 0, made=made or {})
    return update


@pytest.mark.parametrize("policy", POLICY_TABLE)
def test_law_5_trace_holds_the_weights_that_the_policy_decided(policy):
    cluster = Cluster.of(policy, steps=10)
    for _ in random_steps(cluster, Random(8), 600):
        pass
    assert cluster.updates
    recorded = [update.weighted() for update in trace_of(cluster).updates()]
    assert recorded == [list(zip(u.weights, u.scales, strict=True)) for u in cluster.updates]


@pytest.mark.parametrize("samples", [[1], [32, 32, 32], [7] * 49])
def test_equal_weights_are_left_out(samples):
    update = update_of(samples, [1.0] * len(samples))
    assert (update.weights, update.scales) == (None, None)
    assert b"weights" not in msgspec.json.encode(update)
    assert b"scales" not in msgspec.json.encode(update)


def test_uneven_weights_and_scales_are_recorded():
    update = update_of([1, 3], [1.0, 0.5])
    assert (update.weights, update.scales) == ((0.25, 0.75), (1.0, 0.5))
    assert update_of([1, 3], [1.0, 1.0]).scales is None
    assert update_of([2, 2], [1.0, 0.5]).weights is None


def test_update_has_what_the_shell_measured():
    made = {1: Made(sq_norm=4.0, apply_s=0.5, scalars={"loss": 2.0, "bad": float("nan")})}
    update = update_of([1, 1], [1.0, 1.0], made)
    assert update == Update(1.0, 1, (0, 1), 2, 4.0, 0.5, {"loss": 2.0, "bad": None})


def test_gradient_without_a_fate_is_an_internal_error():
    with pytest.raises(InternalError, match="must be its fate, got Pause"):
        list(record_event(GradientArrived(1.0, 0, 1, 0), [Pause("so")], 0))
