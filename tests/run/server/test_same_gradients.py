# SPDX-License-Identifier: BSD-3-Clause
"""A script whose workers all train on the same batches is told once; others are not."""

import pytest

from paceline.run.net.messages import GradientReport
from paceline.run.server.same_gradients import VERSIONS, WARNING, SameGradients


def report(version, sq_norm, samples=1, optimizer=0):
    return GradientReport(0, version, optimizer, samples, 0.1, sq_norm)


def note(same, worker, gradient, needed):
    """Do what the executor does with an accepted gradient."""
    return same.note(worker, gradient, needed) if same.is_watching else ""


def told(same, needed, norms, **fields):
    """Return the versions at which the warning is given; `norms`: by version and worker."""
    return [
        version
        for version, of_workers in enumerate(norms)
        for worker, norm in enumerate(of_workers)
        if note(same, worker, report(version, norm, **fields), needed)
    ]


def test_same_gradients_at_two_versions_are_pointed_out_once():
    assert told(SameGradients(3), 3, [[1.5] * 3, [1.25] * 3, [1.0] * 3]) == [1]


def test_backups_are_not_waited_for():
    assert told(SameGradients(3), 2, [[1.5] * 2, [1.25] * 2]) == [1]


def test_rule_without_a_barrier_needs_only_the_first_version():
    assert told(SameGradients(3), 1, [[1.5] * 3]) == [0]
    assert told(SameGradients(3), 1, [[1.5] * 2]) == []


@pytest.mark.parametrize(
    ("workers", "norms", "fields"),
    [
        (2, [[1.5, 1.25]] * 5, {}),
        (2, [[1.5, 1.5], [1.5, 1.25], [1.25, 1.5]], {}),
        (2, [[0.0, 0.0]] * 5, {}),
        (2, [[None, None]] * 5, {}),
        (1, [[1.5]] * 5, {}),
        (2, [[1.5, 1.5]] * 5, {"samples": 8}),
    ],
    ids=["different", "once by chance", "zero", "not finite", "one worker", "prepared loader"],
)
def test_no_warning_is_given(workers, norms, fields):
    assert told(SameGradients(workers), workers, norms, **fields) == []


def test_each_optimizer_is_compared_separately():
    same = SameGradients(2)
    for version in range(3):
        for optimizer, norm in ((0, 1.5), (1, 1.25)):
            assert note(same, 0, report(version, norm, optimizer=optimizer), 2) == ""
            assert note(same, 1, report(version, norm + optimizer, optimizer=optimizer), 2) == (
                WARNING if (version, optimizer) == (1, 0) else ""
            )


def test_later_gradients_are_not_compared():
    different = [[1.5, 1.25]] * VERSIONS
    assert told(SameGradients(2), 2, [*different, [1.5, 1.5], [1.5, 1.5]]) == []


SCRIPT = """
torch.manual_seed(0)
data = torch.randn(10, 4, 3)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
step = 0
while not run.finished:
    optimizer.zero_grad()
    model(data[BATCH]).square().mean().backward()
    optimizer.step()
    step += 1
"""


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async"])
def test_workers_with_the_same_batches_are_told_once(launch, policy):
    source = SCRIPT.replace("BATCH", "step % 10")
    ran = launch(source, workers=3, steps=12, policy=policy, min_workers=3)
    assert ran.code == 0, ran.err
    assert ran.out.count(WARNING) == 1


def test_workers_that_divide_their_batches_are_told_nothing(launch):
    source = SCRIPT.replace("BATCH", "(step * run.workers + run.worker) % 10")
    ran = launch(source, workers=3, steps=12)
    assert ran.code == 0, ran.err
    assert WARNING not in ran.out
