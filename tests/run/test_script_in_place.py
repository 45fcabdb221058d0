# SPDX-License-Identifier: BSD-3-Clause
"""A script that changes parameters in place is stopped and told what to do; the remedy works."""

import pytest

from failures import troubled
from plain import SETUP, assert_same, execute

WRITES = {
    "clamp": "p.data.clamp_(-0.01, 0.01)",
    "copy": "p.copy_(torch.zeros_like(p))",
    "multiply": "p.mul_(0.5)",
    "initialize": "nn.init.zeros_(p)",
    "sgd": "p.data.add_(p.grad, alpha=-0.1)",
}

WRITING = (
    SETUP
    + """
import os
SIZE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
with (OUT / f"started-{run.worker}").open("a") as file:
    file.write("x")
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    if run.version >= 2:
        with torch.no_grad():
            for p in model.parameters():
                WRITE
"""
)


@pytest.mark.parametrize("write", WRITES)
def test_writing_to_a_parameter_ends_the_run_with_one_message(launch, write):
    source = WRITING.replace("WRITE", WRITES[write]).replace("SIZE", "")
    ran = launch(source, workers=3, steps=100, restart=True)
    assert ran.code == 1
    [message] = ran.err.splitlines()
    assert "was killed by SIGSEGV at script.py:" in message
    assert f"(`{WRITES[write]}`)" in message
    assert "train with an optimizer and optimizer.step()" in message
    assert "optimizer.register_step_post_hook() before run.prepare()" in message
    assert message.endswith("; ending the run")
    assert len(list(ran.trace.updates())) < 10
    for worker in range(3):
        assert (ran.folder / f"started-{worker}").read_text() == "x", "nothing is restarted"


def test_writing_to_a_large_parameter_with_several_threads_names_the_line(launch):
    size = """
model = nn.Sequential(nn.Linear(4, 400_000), nn.Linear(400_000, 1))
torch.set_num_threads(2)
"""
    source = WRITING.replace("WRITE", WRITES["clamp"]).replace("SIZE", size)
    ran = launch(source, workers=1, steps=100, restart=True)
    assert ran.code == 1
    [message] = ran.err.splitlines()
    assert f"(`{WRITES['clamp']}`)" in message


def test_writing_before_the_first_update_ends_the_run_with_one_message(launch):
    source = WRITING.replace("WRITE", WRITES["clamp"]).replace("SIZE", "")
    source = source.replace("run.version >= 2", "True").replace("    optimizer.step()\n", "")
    ran = launch(source, workers=2, steps=100, restart=True)
    assert ran.code == 1
    [message] = ran.err.splitlines()
    assert f"(`{WRITES['clamp']}`)" in message


def test_run_that_was_ended_by_a_write_can_be_resumed(launch):
    source = WRITING.replace("WRITE", WRITES["clamp"]).replace("SIZE", "")
    ran = launch(source, workers=1, steps=100, restart=True)
    assert [path.name for path in (ran.folder / "checkpoints").glob("*.ckpt")]


# --------------------------------------------------------------------------------------- the remedy

WGAN = """
torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
of_maker = torch.optim.RMSprop(maker.parameters(), lr=0.01)
of_critic = torch.optim.RMSprop(critic.parameters(), lr=0.01)

def clip(*_):
    for p in critic.parameters():
        p.data.clamp_(-0.05, 0.05)

def draw(worker, step, size):
    return torch.randn(8, size, generator=torch.Generator().manual_seed(1000 * step + worker))

def critic_loss(worker, step):
    fake = maker(draw(worker, step, 2)).detach()
    return critic(fake).mean() - critic(draw(worker, step, 3) + 2.0).mean()

def maker_loss(worker, step):
    return -critic(maker(draw(worker, step, 2))).mean()
"""

WGAN_LOOP = """
of_critic.register_step_post_hook(clip)
run = paceline.join()
maker, critic, of_maker, of_critic = run.prepare(maker, critic, of_maker, of_critic)
step = 0
largest = 0.0
while not run.finished:
    for optimizer, loss in [(of_critic, critic_loss)] * 2 + [(of_maker, maker_loss)]:
        optimizer.zero_grad()
        loss(run.worker, step).backward()
        optimizer.step()
        if run.version > 0:
            largest = max(largest, *(p.abs().max().item() for p in critic.parameters()))
        step += 1
keep(run, largest=largest, tensors=[p.detach() for m in (maker, critic) for p in m.parameters()])
"""


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async"])
def test_function_registered_as_a_step_hook_clips_every_version(launch, policy):
    ran = launch(WGAN + WGAN_LOOP, workers=3, steps=30, policy=policy, min_workers=3)
    assert (ran.code, ran.err) == (0, "")
    largest = [kept["largest"] for kept in ran.kept.values()]
    assert max(largest) == pytest.approx(0.05), "they reach the limit, and never exceed it"


def test_wgan_that_clips_on_the_server_equals_the_plain_script(launch):
    ran = launch(WGAN + WGAN_LOOP, workers=2, steps=12)
    assert (ran.code, ran.err) == (0, "")
    names = execute(WGAN)
    critic = (names["of_critic"], names["critic_loss"])
    maker = (names["of_maker"], names["maker_loss"])
    for step, (optimizer, loss) in enumerate([critic, critic, maker] * 4):
        optimizer.zero_grad()
        for worker in (0, 1):
            (loss(worker, step) / 2).backward()
        optimizer.step()
        if optimizer is names["of_critic"]:
            names["clip"]()
    models = (names["maker"], names["critic"])
    assert_same(ran.kept[0]["tensors"], [p.detach() for m in models for p in m.parameters()])


CRASHING_AT_FIRST = """
if WORKER == 1 and not was_told("struck-1"):
    strike(signal.SIGSEGV)

def trouble(run): pass
"""


def test_worker_that_crashes_before_it_joins_is_restarted(launch):
    """Its parameters can't be the cause: they become read-only when it joins."""
    ran = launch(troubled(CRASHING_AT_FIRST), workers=2, steps=6, restart=True)
    assert ran.code == 0
    assert "worker 1 was killed by SIGSEGV; restarting in " in ran.err
    assert "read-only" not in ran.err
    assert {worker for update in ran.trace.updates() for worker in update.contributors} == {0, 1}
