# SPDX-License-Identifier: BSD-3-Clause
"""A cancelled turn ends early: in a backward pass, and in an injected delay.

Worker 1 is held in the middle of its backward pass until worker 0 has made the update without it.
"""

from failures import HELPERS, counts, gradients_of, troubled
from paceline.run.net import messages
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from server_harness import serve

STEPS = 8
ROUNDING_S = 1e-9  # in the difference of two times

HELD = """
torch.manual_seed(0)
layers = [nn.Linear(4, 4) for _ in range(4)]
reached = []
for number, layer in enumerate(layers):
    layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: reached.append(number))
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def hold(grad):
    tell("is-inside")
    wait_for("update-is-made")
    time.sleep(0.01)  # long enough for the next poll

run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
first = None
while not run.finished:
    optimizer.zero_grad()
    if run.worker == 0 and run.version == 0:
        wait_for("is-inside")
    elif run.worker == 0:
        tell("update-is-made")
        wait_for("knows-its-fate")
    x = torch.ones(2, 4)
    for number, layer in enumerate(layers):
        x = layer(x)
        if run.worker == 1 and number == 1 and first is None:
            x.register_hook(hold)
    loss = x.square().mean() * (1e9 if run.worker == 1 and first is None else 1)
    BACKWARD
    optimizer.step()
    first = first or (str(run.last.fate), sorted(reached))
    if run.worker == 1:
        tell("knows-its-fate")
keep(run, first=first, largest=max(float(p.abs().max()) for p in model.parameters()))
"""

PACED = HELPERS + HELD.replace("BACKWARD", "run.backward(loss)")
PLAIN = HELPERS + HELD.replace("BACKWARD", "loss.backward()")


def test_backward_pass_of_a_cancelled_turn_is_cut_in_the_middle(launch):
    ran = launch(PACED, workers=2, steps=STEPS, policy="backup:1")
    assert ran.code == 0, ran.err
    assert gradients_of(ran.trace, 1)[0].fate == "cancelled"
    assert ran.kept[1]["first"] == ("cancelled", [2, 3])  # the layers behind the held one
    assert ran.kept[0]["largest"] < 10


def test_plain_backward_pass_is_finished_but_its_gradient_is_dropped(launch):
    ran = launch(PLAIN, workers=2, steps=STEPS, policy="backup:1")
    assert ran.code == 0, ran.err
    late = gradients_of(ran.trace, 1)[0]
    assert (late.fate, late.version, late.staleness) == ("late", 0, 1)
    assert late.sq_norm is None  # it wasn't measured
    assert ran.kept[1]["first"] == ("late", [0, 1, 2, 3])
    assert ran.kept[0]["largest"] < 10


def test_no_backward_pass_is_cut_if_late_workers_finish(launch):
    ran = launch(PACED, workers=2, steps=STEPS, policy="backup:1", late="finish")
    assert ran.code == 0, ran.err
    late = gradients_of(ran.trace, 1)[0]
    assert (late.fate, late.version, late.staleness) == ("late", 0, 1)
    assert late.sq_norm is not None
    assert ran.kept[1]["first"] == ("late", [0, 1, 2, 3])
    assert ran.kept[0]["largest"] < 10


def test_injected_delay_is_cut_short_when_its_turn_is_cancelled(launch):
    trouble = """
def trouble(run):
    if run.worker == 1:
        tell("has-work")
    else:
        wait_for("has-work")
"""
    latency = "1ms; worker 1 x10000"
    ran = launch(troubled(trouble), workers=2, steps=STEPS, policy="backup:1", latency=latency)
    assert ran.code == 0, ran.err
    assert counts(ran.trace) == [1] * STEPS
    assert {update.contributors for update in ran.trace.updates()} == {(0,)}
    delayed = gradients_of(ran.trace, 1)
    assert {gradient.fate for gradient in delayed} == {"cancelled"}
    assert all(gradient.compute_s < 5 for gradient in delayed)  # instead of ten
    assert all(gradient.compute_s >= 1e-3 - ROUNDING_S for gradient in gradients_of(ran.trace, 0))


def test_injected_delay_makes_a_gradient_take_at_least_that_long(launch):
    trouble = "def trouble(run): pass"
    ran = launch(troubled(trouble), workers=2, steps=4, latency="1ms; worker 1 x50")
    assert ran.code == 0, ran.err
    assert all(gradient.compute_s >= 0.05 - ROUNDING_S for gradient in gradients_of(ran.trace, 1))


def test_grad_scaler_works_after_a_backward_pass_was_cut(launch):
    source = (
        HELPERS
        + """
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
fates = []
while not run.finished:
    optimizer.zero_grad()
    loss = model(torch.ones(3, 2)).square().mean()
    if run.worker == 1 and not fates:
        tell("has-work")
        wait_until(lambda: in_the_trace(type="update", update=1))
        wait_until(lambda: optimizer._pacer._poll_worthless())
    elif run.worker == 0 and run.version == 0:
        wait_for("has-work")
    elif run.worker == 0 and run.version == 2:
        wait_for("was-cut")
    run.backward(scaler.scale(loss))
    scaler.step(optimizer)
    scaler.update()
    fates.append(run.last and str(run.last.fate))
    if run.worker == 1:
        tell("was-cut")
keep(run, fates=fates)
"""
    )
    ran = launch(source, workers=2, steps=STEPS, policy="backup:1")
    assert ran.code == 0, ran.err
    assert ran.kept[1]["fates"][0] == "cancelled"


def test_end_of_the_run_sends_neither_assignment_nor_cancellation(tmp_path):
    """One worker is two updates ahead when the other delivers the last samples of the run."""

    def train(harness):
        ahead, behind = (harness.connect().join(worker, harness.spec) for worker in range(2))

        def report(worker, assignment):
            worker.send(worker.gradient(assignment, *worker.parameters.parameters[0]))

        first = behind.receive_assignment()
        for _ in range(3):  # the last one waits until update 1 is made
            report(ahead, ahead.receive_assignment())
        report(behind, first)
        for _ in range(2):  # for the updates that are pending
            report(behind, behind.receive_assignment())
        assert isinstance(behind.receive_assignment(), messages.RunEnded)
        message = ahead.receive()
        while isinstance(message, messages.BufferShared):  # the memory of the last version
            message = ahead.receive()
        assert isinstance(message, messages.RunEnded)  # neither an assignment nor a cancellation

    settings = Settings(spec=RunSpec(workers=2, samples=2), policy="delayed:2")
    served = serve(train, tmp_path, settings, alone=True)
    assert len(list(served.trace.updates())) == 3
