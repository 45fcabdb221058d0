# SPDX-License-Identifier: BSD-3-Clause
"""The server averages gradients as they are when the script calls `optimizer.step()`.

Large gradients move to shared memory in the backward pass, small ones later: the model has both.
"""

import warnings

import pytest
import torch

from plain import LOOP, SETUP, assert_same, execute, train, weights

STEPS = 5
WIDE = SETUP.replace("nn.Linear(4, 8)", "nn.Linear(4000, 8)").replace(
    "torch.randn(size, 4, generator=generator)", "torch.randn(size, 4000, generator=generator) / 32"
)
SGD = WIDE + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n"
DECAY = WIDE + "optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)\n"
BACKWARD = "    loss_of(run.worker, run.version).backward()\n"


def loop(backward):
    """Return the usual loop with other lines instead of its backward pass."""
    return LOOP.replace(BACKWARD, "".join(f"    {line}\n" for line in backward))


def train_by_worker(source, steps, make_gradient, before_step=lambda names: None):
    """Train in a plain loop that computes each worker's gradient separately and averages them."""
    names = execute(source)
    parameters = list(names["model"].parameters())
    for version in range(steps):
        sums = [torch.zeros_like(p) for p in parameters]
        for worker in (0, 1):
            names["optimizer"].zero_grad()
            make_gradient(names, worker, version)
            sums = [total + p.grad for total, p in zip(sums, parameters, strict=True)]
        for total, p in zip(sums, parameters, strict=True):
            p.grad = total / 2
        before_step(names)
        names["optimizer"].step()
    return names


# ----------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_worker_clips_its_own_gradient(launch, clip):
    lines = [BACKWARD.strip(), f"nn.utils.{clip}(model.parameters(), 0.05)"]
    ran = launch(SGD + loop(lines), steps=STEPS)

    def make_gradient(names, worker, version):
        names["loss_of"](worker, version).backward()
        getattr(torch.nn.utils, clip)(names["model"].parameters(), 0.05)

    expected = train_by_worker(SGD, STEPS, make_gradient)
    assert_same(ran.kept[0]["weights"], weights(expected))
    if clip == "clip_grad_norm_":
        norms = [g.sq_norm**0.5 for g in ran.trace.gradients()]
        assert norms == pytest.approx([0.05] * 2 * STEPS, rel=1e-4)


def test_server_clips_the_average(launch):
    ran = launch(SGD + LOOP, steps=STEPS, clip_norm=0.2)

    def make_gradient(names, worker, version):
        names["loss_of"](worker, version).backward()

    norms = []

    def clip(names):
        norms.append(torch.nn.utils.clip_grad_norm_(names["model"].parameters(), 0.2).item())

    expected = train_by_worker(SGD, STEPS, make_gradient, clip)
    assert_same(ran.kept[0]["weights"], weights(expected))
    assert min(norms) > 0.2, "nothing was clipped"
    assert [u.sq_norm**0.5 for u in ran.trace.updates()] == pytest.approx(norms)


def test_norm_below_the_limit_is_not_clipped(launch):
    ran = launch(SGD + LOOP, workers=1, steps=STEPS, clip_norm=1e6)
    assert_same(ran.kept[0]["weights"], weights(train(SGD, STEPS, workers=1)))


# -------------------------------------------------------------------------- several backward passes


def test_gradients_of_several_backward_passes_add_up(launch):
    lines = [
        "for part in range(3):",
        "    loss_of(run.worker, 100 * part + run.version).backward()",
    ]
    ran = launch(SGD + loop(lines), steps=STEPS)

    def make_gradient(names, worker, version):
        for part in range(3):
            names["loss_of"](worker, 100 * part + version).backward()

    assert_same(ran.kept[1]["weights"], weights(train_by_worker(SGD, STEPS, make_gradient)))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroed_gradient_starts_from_zero(launch, set_to_none):
    zero = f"optimizer.zero_grad(set_to_none={set_to_none})"
    ran = launch(SGD + LOOP.replace("optimizer.zero_grad()", zero), steps=STEPS)
    assert_same(ran.kept[0]["weights"], weights(train(SGD, STEPS)))


def test_gradient_that_is_never_zeroed_keeps_accumulating(launch):
    ran = launch(SGD + LOOP.replace("    optimizer.zero_grad()\n", ""), workers=1, steps=STEPS)
    names = execute(SGD)
    for version in range(STEPS):
        names["loss_of"](0, version).backward()
        names["optimizer"].step()
    assert_same(ran.kept[0]["weights"], weights(names))


def test_gradient_penalty_is_differentiated_twice(launch):
    source = SGD.replace(
        "    return F.mse_loss(model(x), y)",
        """
    x.requires_grad_()
    out = model(x)
    [slope] = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + slope.square().sum()
""",
    )
    assert "slope" in source
    ran = launch(source + LOOP, steps=STEPS)
    assert_same(ran.kept[0]["weights"], weights(train(source, STEPS)))


def test_gradients_set_by_the_script_count(launch):
    lines = [
        "loss = loss_of(run.worker, run.version)",
        "own = list(model.parameters())",
        "for p, grad in zip(own, torch.autograd.grad(loss, own)):",
        "    p.grad = grad",
    ]
    ran = launch(SGD + loop(lines), steps=STEPS)
    assert_same(ran.kept[0]["weights"], weights(train(SGD, STEPS)))


# ---------------------------------------------------------------------------------- mixed precision

AUTOCAST = """
def loss_of(worker, version):
    x, y = batch(worker, version)
    with torch.autocast("cpu", torch.KIND):
        out = model(x)
    assert out.dtype is torch.KIND
    return F.mse_loss(out.float(), y)
"""


def test_autocast_computes_in_bfloat16_and_keeps_the_type_of_the_weights(launch):
    source = SGD + AUTOCAST.replace("KIND", "bfloat16")
    ran = launch(source + LOOP, steps=STEPS)
    assert {w.dtype for w in ran.kept[0]["weights"]} == {torch.float32}
    torch.testing.assert_close(
        ran.kept[0]["weights"], weights(train(source, STEPS)), rtol=1e-2, atol=1e-3
    )


SCALED = [
    "loss = loss_of(run.worker, run.version)",
    "overflows = run.worker == 1 and run.version == OVERFLOW_AT and scaler.get_scale() == 256.0",
    "scaler.scale(loss * 1e38 if overflows else loss).backward()",
    "scaler.step(optimizer)",
    "scaler.update()",
]


@pytest.mark.parametrize("overflow_at", [-1, 2])
def test_step_that_grad_scaler_skips_is_repeated(launch, overflow_at):
    """Worker 1 overflows once, at version 2: it sends nothing and computes again."""
    source = SGD + AUTOCAST.replace("KIND", "float16")
    lines = [line.replace("OVERFLOW_AT", str(overflow_at)) for line in SCALED]
    scaled = loop(lines).replace("    optimizer.step()\n", "")
    scaled = scaled.replace("keep(run,", "keep(run, scale=scaler.get_scale(),")
    ran = launch(
        f'{source}scaler = torch.amp.GradScaler("cpu", init_scale=256.0)\n{scaled}', steps=STEPS
    )
    assert ran.code == 0, ran.err
    assert [g.fate for g in ran.trace.gradients()] == ["accepted"] * 2 * STEPS
    assert ran.kept[0]["scale"] == 256.0
    assert ran.kept[1]["scale"] == (128.0 if overflow_at >= 0 else 256.0)
    torch.testing.assert_close(
        ran.kept[0]["weights"], weights(train(source, STEPS)), rtol=1e-2, atol=1e-3
    )


# -------------------------------------------------------------------- parameters without a gradient


def test_frozen_parameter_does_not_change(launch):
    source = DECAY + "model[0].weight.requires_grad_(False)\n"
    ran = launch(source + LOOP, steps=STEPS)
    assert_same(ran.kept[0]["weights"], weights(train(source, STEPS)))
    assert torch.equal(ran.kept[0]["weights"][0], execute(source)["model"][0].weight)


def test_frozen_parameter_can_be_unfrozen_during_the_run(launch):
    source = DECAY + "model[0].weight.requires_grad_(False)\n"
    thaw = "    model[0].weight.requires_grad_(run.version >= 2)\n"
    ran = launch(
        source + LOOP.replace("    optimizer.zero_grad()\n", f"{thaw}    optimizer.zero_grad()\n"),
        steps=STEPS,
    )
    names = execute(source)
    for version in range(STEPS):
        names["model"][0].weight.requires_grad_(version >= 2)
        names["optimizer"].zero_grad()
        for worker in (0, 1):
            (names["loss_of"](worker, version) / 2).backward()
        names["optimizer"].step()
    assert_same(ran.kept[0]["weights"], weights(names))


BRANCHES = """
model.extra = nn.Linear(1, 1)
optimizer.add_param_group({"params": model.extra.parameters()})

def loss_of(worker, version):
    x, y = batch(worker, version)
    out = model[2](model[1](model[0](x)))
    return F.mse_loss(model.extra(out) if USED else out, y)
"""


@pytest.mark.parametrize("used", ["False", "worker == 0", "version % 2 == 0"])
def test_parameter_that_no_worker_used_does_not_change(launch, used):
    """Weight decay would move it; if some workers used it, the others count as zero."""
    source = DECAY + BRANCHES.replace("USED", used)
    ran = launch(source + LOOP, steps=STEPS)
    names = train(source, STEPS)
    assert_same(ran.kept[0]["weights"], weights(names))
    untouched = torch.equal(ran.kept[0]["weights"][4], execute(source)["model"].extra.weight)
    assert untouched == (used == "False")


def test_parameter_without_an_optimizer_has_the_servers_value_in_every_worker(launch):
    source = WIDE + "optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)\n"
    # Each process begins with different numbers, but the server's are used.
    differ = "with torch.no_grad():\n    model[0].weight.fill_(torch.rand(()))\n"
    ran = launch(source + "torch.seed()\n" + differ + LOOP, steps=STEPS)
    first, second = (kept["weights"] for kept in ran.kept.values())
    assert_same(first, second)
    assert len(first[0].unique()) == 1
    assert_same(first[1], execute(source)["model"][0].bias.detach())


def test_second_order_gradient_works_for_large_parameters(launch):
    """Moving a gradient to the slot would lose its graph."""
    penalty = """
torch.manual_seed(0)
model = nn.Linear(200, 200)  # large, so it moves in the backward pass
x = torch.randn(4, 200)
loss = model(x).square().mean()
loss.backward(create_graph=True)
sum(p.grad.square().sum() for p in model.parameters()).backward()
"""
    source = """
run = paceline.join()
torch.manual_seed(0)
model = nn.Linear(200, 200)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer)
torch.manual_seed(0)
nn.Linear(200, 200)
x = torch.randn(4, 200)
loss = model(x).square().mean()
loss.backward(create_graph=True)
sum(p.grad.square().sum() for p in model.parameters()).backward()
keep(run, grads=[p.grad.detach().clone() for p in model.parameters()])
for p in model.parameters():
    p.grad = p.grad.detach()
optimizer.step()
"""
    ran = launch(source, workers=1, steps=1)
    assert ran.code == 0, ran.err
    plain = {"torch": torch, "nn": torch.nn}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # create_graph=True makes a reference cycle
        exec(penalty, plain)
    expected = [p.grad.detach() for p in plain["model"].parameters()]
    torch.testing.assert_close(ran.kept[0]["grads"], expected)
    [gradient] = ran.trace.gradients()
    assert gradient.sq_norm == pytest.approx(float(sum(g.square().sum() for g in expected)))
