# SPDX-License-Identifier: BSD-3-Clause
"""Real runs with updates and buffers that aren't finite."""

from failures import HELPERS, joins_and_leaves

OVERFLOW = """
weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
optimizer = torch.optim.SGD([weight], lr=0.1)
run = paceline.join()
optimizer = run.prepare(optimizer)
while not run.finished:
    optimizer.zero_grad()
    (weight * 60_000).sum().backward()  # finite, but the sum of two gradients isn't
    optimizer.step()
"""


def test_run_that_never_steps_is_not_a_success(launch, call):
    ran = launch(OVERFLOW, workers=2, steps=5)
    assert ran.code == 1
    assert all(update.skipped for update in ran.trace.updates())
    assert "none of the 5 updates changed the parameters" in ran.err
    report = call("trace", "show", str(ran.folder)).out
    assert "failed at update 5 of 5: none of the 5 updates changed the parameters" in " ".join(
        report.split()
    )
    assert "No update changed the parameters" in report


def test_run_that_stops_stepping_ends(launch):
    ran = launch(OVERFLOW, workers=2, steps=1000)
    assert ran.code == 1
    assert len(list(ran.trace.updates())) == 100
    assert "the run failed: the last 100 updates did not step" in ran.err


LIAR = """
weight = nn.Parameter(torch.zeros(300_000))
optimizer = torch.optim.SGD([weight], lr=0.1)
run = paceline.join()
optimizer = run.prepare(optimizer)
while not run.finished:
    optimizer.zero_grad()
    (weight - 1).square().mean().backward()
    if run.worker == 1 and run.version == 2 and not was_told("lied"):
        tell("lied")
        weight.grad.data[-1] = float("nan")  # no hook notices it
    optimizer.step()
    if run.is_first and run.version == 8:
        wait_until(lambda: (OUT / "trace.jsonl").read_text().count('"joined"') == 3)
"""


def test_worker_that_hides_a_bad_gradient_is_restarted_and_the_run_goes_on(launch):
    ran = launch(HELPERS + LIAR, workers=2, steps=10, restart=True)
    assert ran.code == 0, ran.err
    reason = "broke the protocol: its gradient contains NaN or infinity, but its report said"
    [joined, left, again, *_] = joins_and_leaves(ran.trace, worker=1)
    assert (joined, again) == ("joined", "joined")
    assert left.startswith(reason)
    assert [update.update for update in ran.trace.updates() if update.skipped] == [3]
    assert "the server refused worker 1: its gradient contains NaN" in ran.err


SPOILED = """
norm = nn.BatchNorm1d(3)
model = nn.Sequential(nn.Linear(3, 3), norm)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    model(torch.randn(8, 3)).square().mean().backward()
    if run.worker == 1 and run.version >= 2:
        norm.running_var[0] = float("inf")
    optimizer.step()
keep(run, var=norm.running_var.clone())
"""


def test_infinite_buffer_of_one_worker_is_ignored(launch):
    ran = launch(SPOILED, workers=2, steps=6)
    assert ran.code == 0, ran.err
    assert ran.kept[0]["var"].isfinite().all()
    assert ran.out.count("ignored NaN or infinity in the module buffers of worker 1") == 1
