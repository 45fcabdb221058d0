# SPDX-License-Identifier: BSD-3-Clause
"""`run.averaged_weights()`: the server's moving average of the weights in a model."""

import torch

from plain import SETUP, assert_same

SGD = SETUP + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"

LOOP = """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)

def copies():
    return [p.detach().clone() for p in model.parameters()]

def average():
    before = [p.data_ptr() for p in model.parameters()]
    with run.averaged_weights(model) as averaged:
        assert averaged is model
        found = copies()
    assert [p.data_ptr() for p in model.parameters()] == before
    return found

versions, averages = [copies()], [average()]
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    versions.append(copies())
    averages.append(average())
keep(run, versions=versions, averages=averages)
"""


def test_average_is_over_all_versions(launch):
    ran = launch(SGD + LOOP, steps=5, ema=0.9)
    assert (ran.code, ran.err) == (0, "")
    for kept in ran.kept.values():
        mean = kept["versions"][0]
        for version, averages in zip(kept["versions"], kept["averages"], strict=True):
            mean = [0.9 * old + 0.1 * new for old, new in zip(mean, version, strict=True)]
            assert_same(averages, mean)


def test_without_an_average_the_weights_are_unchanged(launch):
    ran = launch(SGD + LOOP, steps=3)
    for kept in ran.kept.values():
        assert_same(kept["averages"], kept["versions"])


def test_run_continues_with_its_own_weights_after_the_averaged_ones(launch):
    """The block is entered in the middle of a turn, and left by an exception."""
    disturbed = """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    try:
        with run.averaged_weights(model):
            model[0].weight.zero_()
    except RuntimeError:  # a leaf that requires a gradient
        pass
    with torch.no_grad(), run.averaged_weights(model):
        model[0].weight.zero_()  # the script's own copy
    optimizer.step()
keep(run, weights=[p.detach().clone() for p in model.parameters()])
"""
    ran = launch(SGD + disturbed, steps=4, ema=0.5)
    plain = launch(SGD + LOOP, steps=4)
    assert (ran.code, ran.err) == (0, "")
    assert_same(ran.kept[0]["weights"], plain.kept[0]["versions"][-1])


def test_each_model_gets_the_average_of_its_own_weights(launch):
    ran = launch(
        """
torch.manual_seed(0)
first, second, frozen = (nn.Linear(2, 2, dtype=t) for t in (torch.float64, torch.float32, None))
optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in (first, second)]
run = paceline.join()
run.prepare(first, second, frozen, *optimizers)
versions = [[m.weight.detach().clone() for m in (first, second, frozen)]]
while not run.finished:
    number = run.version % 2
    optimizers[number].zero_grad()
    (first, second)[number].weight.sum().backward()
    optimizers[number].step()
    versions.append([m.weight.detach().clone() for m in (first, second, frozen)])
lent = []
for model in (first, second, frozen):
    with run.averaged_weights(model):
        lent.append([m.weight.detach().clone() for m in (first, second, frozen)])
keep(run, versions=versions, lent=lent)
""",
        steps=4,
        ema=0.5,
    )
    for kept in ran.kept.values():
        means = kept["versions"][0]
        for version in kept["versions"][1:]:
            means = [(old + new) / 2 for old, new in zip(means, version, strict=True)]
        now = kept["versions"][-1]
        assert_same(kept["lent"][0], [means[0], now[1], now[2]])
        assert_same(kept["lent"][1], [now[0], means[1], now[2]])
        assert_same(kept["lent"][2], now)
        assert not torch.equal(means[0], now[0])


def test_run_that_ends_inside_averaged_weights_leaves_the_last_weights(launch):
    source = (
        SETUP
        + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    if run.worker == 1 and run.version >= 3:
        with run.averaged_weights(model):
            while not run.finished:
                optimizer.state_dict()
keep(run, weights=[p.detach().clone() for p in model.parameters()], version=run.version)
"""
    )
    ran = launch(source, workers=2, steps=9, policy="async", ema=0.9)
    assert ran.code == 0, ran.err
    assert [kept["version"] for kept in ran.kept.values()] == [9, 9]
    torch.testing.assert_close(ran.kept[0]["weights"], ran.kept[1]["weights"], rtol=0, atol=0)
