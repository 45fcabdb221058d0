# SPDX-License-Identifier: BSD-3-Clause
"""A script loads a state that plain torch accepts, during a run with a scheduler."""

from failures import TRAINING

SCRIPT = (
    TRAINING
    + """
saved = torch.optim.SGD(model.parameters(), lr=0.5).state_dict()
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
run = paceline.join()
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
optimizer.load_state_dict(saved)
rates = []
while not run.finished:
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    scheduler.step()
keep(run, rates=rates)
"""
)


def test_state_from_a_run_without_a_scheduler_is_loaded(launch):
    ran = launch(SCRIPT, workers=2, steps=3)
    assert ran.code == 0, ran.err
    assert [kept["rates"] for kept in ran.kept.values()] == [[0.5, 0.25, 0.125]] * 2
