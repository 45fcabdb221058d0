# SPDX-License-Identifier: BSD-3-Clause
"""Any optimizer steps on the server as it would in a plain loop over all workers' batches."""

import pytest

from plain import LOOP, SETUP, assert_same, train, weights

STEPS = 6

OPTIMIZERS = [
    "SGD(model.parameters(), lr=0.1)",
    "SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)",
    "SGD(model.parameters(), lr=0.1, momentum=0.9, maximize=True, foreach=False)",
    "SGD(model.parameters(), lr=torch.tensor(0.1))",
    "Adam(model.parameters(), lr=0.01)",
    "Adam(model.parameters(), lr=0.01, amsgrad=True, foreach=False)",
    "Adam(model.parameters(), lr=0.01, fused=True)",
    "AdamW(model.parameters(), lr=0.01, weight_decay=0.1)",
    "RMSprop(model.parameters(), lr=0.01, momentum=0.9, centered=True)",
    "Adagrad(model.parameters(), lr=0.1)",
    "NAdam(model.parameters(), lr=0.01)",
    "RAdam(model.parameters(), lr=0.01)",
    "Adamax(model.parameters(), lr=0.01)",
    "Adadelta(model.parameters(), lr=1.0)",
    "ASGD(model.parameters(), lr=0.01)",
    "Rprop(model.parameters(), lr=0.01)",
    "Adafactor(model.parameters(), lr=0.01)",
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_workers_equal_a_plain_loop(launch, optimizer):
    source = f"{SETUP}\noptimizer = torch.optim.{optimizer}\n"
    ran = launch(source + LOOP, workers=2, steps=STEPS)
    assert ran.code == 0, ran.err
    expected = weights(train(source, STEPS))
    assert_same(ran.kept[0]["weights"], expected)
    assert_same(ran.kept[1]["weights"], expected)


OWN_OPTIMIZER = """
class Signs(torch.optim.Optimizer):
    '''Steps by the sign of a mean of the gradients.'''

    def __init__(self, params, lr, keep=0.5):
        super().__init__(params, {"lr": lr, "keep": keep})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.mul_(group["keep"]).add_(p.grad)
                    p.add_(mean.sign(), alpha=-group["lr"])

optimizer = Signs(model.parameters(), lr=0.05)
"""


def test_optimizer_defined_in_the_script_steps_on_the_server(launch):
    source = SETUP + OWN_OPTIMIZER
    ran = launch(source + LOOP, workers=2, steps=STEPS)
    assert ran.code == 0, ran.err
    assert_same(ran.kept[1]["weights"], weights(train(source, STEPS)))


def test_parameter_groups_keep_their_own_settings(launch):
    source = (
        SETUP
        + """
optimizer = torch.optim.SGD(
    [
        {"params": model[0].parameters(), "lr": 0.5, "momentum": 0.9},
        {"params": [model[2].weight], "weight_decay": 0.5},
        {"params": [model[2].bias], "lr": 0.0},
    ],
    lr=0.1,
)
"""
    )
    ran = launch(source + LOOP, workers=2, steps=STEPS)
    names = train(source, STEPS)
    assert_same(ran.kept[0]["weights"], weights(names))
    assert_same(ran.kept[0]["weights"][3], train(source, 0)["model"][2].bias.detach())


def test_one_worker_alone_equals_a_plain_loop(launch):
    source = SETUP + "optimizer = torch.optim.Adam(model.parameters(), lr=0.01)\n"
    ran = launch(source + LOOP, workers=1, steps=STEPS)
    assert_same(ran.kept[0]["weights"], weights(train(source, STEPS, workers=1)))


@pytest.mark.parametrize("policy", ["backup:0", "delayed:0", "batchsync:1", "async", "ssp:0"])
def test_with_one_worker_every_policy_equals_a_plain_loop(launch, policy):
    source = SETUP + "optimizer = torch.optim.Adam(model.parameters(), lr=0.01)\n"
    ran = launch(source + LOOP, workers=1, steps=STEPS, policy=policy)
    assert_same(ran.kept[0]["weights"], weights(train(source, STEPS, workers=1)))


# -------------------------------------------------------------------------------------------- state

ADAM = SETUP + "optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.8, 0.9))\n"


def test_state_dict_is_that_of_the_server(launch):
    ran = launch(ADAM + LOOP + "keep(run, state=optimizer.state_dict())", steps=STEPS)
    expected = train(ADAM, STEPS)["optimizer"].state_dict()
    for kept in ran.kept.values():
        assert_same(kept["state"]["state"], expected["state"])
        [group], [plain] = kept["state"]["param_groups"], expected["param_groups"]
        assert group | {"betas": tuple(group["betas"])} == plain


INTERRUPTED = """
saved = OUT.parent / "saved.pt"
first = saved.exists() and torch.load(saved)
if first:
    model.load_state_dict(first["model"])
if first and WHEN == "before":
    optimizer.load_state_dict(first["optimizer"])
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
if first and WHEN == "after":
    optimizer.load_state_dict(first["optimizer"])
rates = [group["lr"] for group in optimizer.param_groups]
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version + (3 if first else 0)).backward()
    optimizer.step()
if run.is_first:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
keep(run, weights=[p.detach().clone() for p in model.parameters()], rates=rates)
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_run_from_a_saved_state_equals_an_uninterrupted_one(launch, when):
    """Loading the state before and after `prepare` has the same effect."""
    slow = SETUP + "optimizer = torch.optim.Adam(model.parameters(), lr=0.5)\n"
    launch(f"WHEN = {when!r}\n{ADAM}{INTERRUPTED}", steps=3)
    # The second script has another learning rate, but the one in the state is used.
    ran = launch(f"WHEN = {when!r}\n{slow}{INTERRUPTED}", steps=3)
    expected = weights(train(ADAM, 6))
    assert_same([kept["weights"] for kept in ran.kept.values()], [expected, expected])
    assert [kept["rates"] for kept in ran.kept.values()] == [[0.01], [0.01]]


def test_prepared_optimizer_keeps_its_class(launch):
    ran = launch(
        ADAM
        + LOOP
        + """
keep(
    run,
    is_adam=isinstance(optimizer, torch.optim.Adam),
    name=type(optimizer).__name__,
    defaults=optimizer.defaults["betas"],
    state_here=len(optimizer.state),
)
""",
        steps=2,
    )
    kept = ran.kept[0]
    assert (kept["is_adam"], kept["name"], kept["defaults"]) == (True, "Adam", (0.8, 0.9))
    assert kept["state_here"] == 0, "only the server has state"


def test_copying_a_prepared_optimizer_is_refused(launch):
    source = (
        SETUP
        + """
import copy
import pickle
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
refused = []
for copied in (copy.copy, copy.deepcopy, pickle.dumps):
    try:
        copied(optimizer)
    except paceline.SpecError as error:
        refused.append(str(error))
keep(run, refused=refused)
"""
    )
    ran = launch(source, workers=1, steps=1)
    what = "a prepared optimizer can't be copied or pickled; use its state_dict()"
    assert ran.kept[0]["refused"] == [what] * 3


def test_overridden_zero_grad_is_called(launch):
    source = (
        SETUP
        + """
class Own(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        called.append(set_to_none)
        super().zero_grad(set_to_none)

called = []
optimizer = Own(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
keep(run, called=called)
"""
    )
    ran = launch(source, workers=1, steps=3)
    assert ran.code == 0, ran.err
    assert ran.kept[0]["called"] == [True] * 3
