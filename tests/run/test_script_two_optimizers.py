# SPDX-License-Identifier: BSD-3-Clause
"""A script with several models and optimizers, such as a small GAN: each step is an update."""

import pytest
import torch

from plain import LATE, assert_same, execute

GAN = """
torch.manual_seed(0)
maker = nn.Sequential(nn.Linear(2, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
judge = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
of_judge = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)

def draw(worker, step, size):
    return torch.randn(8, size, generator=torch.Generator().manual_seed(1000 * step + worker))

def say(judged, truth):
    return F.binary_cross_entropy_with_logits(judged, torch.full_like(judged, truth))

def judge_loss(worker, step):
    real, fake = draw(worker, step, 3) + 2.0, maker(draw(worker, step, 2)).detach()
    return say(judge(real), 1.0) + say(judge(fake), 0.0)

def maker_loss(worker, step):
    return say(judge(maker(draw(worker, step, 2))), 1.0)
"""

GAN_LOOP = """
run = paceline.join()
maker, judge, of_maker, of_judge = run.prepare(maker, judge, of_maker, of_judge)
step = 0
while not run.finished:
    of_judge.zero_grad()
    judge_loss(run.worker, step).backward()
    HOLD
    of_judge.step()
    if run.finished:
        break  # or the statistics of this worker would move once more
    of_maker.zero_grad()
    maker_loss(run.worker, step).backward()
    HOLD
    of_maker.step()
    step += 1
HOLD
tensors = [t.detach().clone() for m in (maker, judge) for t in (*m.parameters(), *m.buffers())]
keep(run, tensors=tensors, judge_state=of_judge.state_dict(), maker_state=of_maker.state_dict())
"""


def test_gan_equals_a_plain_loop(launch):
    ran = launch(GAN + GAN_LOOP.replace("HOLD", ""), steps=8)
    assert (ran.code, ran.err) == (0, "")
    names = execute(GAN)
    maker, judge = names["maker"], names["judge"]
    norm = maker[1]
    for step in range(4):
        for optimizer, loss in (
            (names["of_judge"], names["judge_loss"]),
            (names["of_maker"], names["maker_loss"]),
        ):
            optimizer.zero_grad()
            before = [buffer.clone() for buffer in norm.buffers()]
            after = []
            for worker in (0, 1):
                for buffer, value in zip(norm.buffers(), before, strict=True):
                    buffer.copy_(value)
                (loss(worker, step) / 2).backward()
                after.append([buffer.clone() for buffer in norm.buffers()])
            for buffer, *values in zip(norm.buffers(), *after, strict=True):
                buffer.copy_(torch.stack(values).double().mean(0))
            optimizer.step()
    expected = [t.detach() for m in (maker, judge) for t in (*m.parameters(), *m.buffers())]
    for kept in ran.kept.values():
        assert_same(kept["tensors"], expected)
        assert_same(kept["maker_state"]["state"], names["of_maker"].state_dict()["state"])


# No bias is added before a batch norm, which removes it again: its gradient is nothing but rounding
# errors, which Adam would blow up.
SHARED_GRAPH = (
    GAN
    + """
maker[3] = nn.Linear(8, 3, bias=False)
of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
judge = nn.Sequential(
    nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1)
)
of_judge = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.9)

def iteration(worker, step):
    # As in the DCGAN example: both backward passes go through one forward pass.
    judge.zero_grad()
    say(judge(draw(worker, step, 3) + 2.0), 1.0).backward()
    fake = maker(draw(worker, step, 2))
    say(judge(fake.detach()), 0.0).backward()
    of_judge.step()
    maker.zero_grad()
    say(judge(fake), 1.0).backward()
    of_maker.step()
"""
)

SHARED_GRAPH_LOOP = """
run = paceline.join()
maker, judge, of_maker, of_judge = run.prepare(maker, judge, of_maker, of_judge)
step = 0
while not run.finished:
    iteration(run.worker, step)
    step += 1
keep(run, tensors=[t.detach().clone() for m in (maker, judge) for t in m.state_dict().values()])
"""


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_gan_that_uses_one_forward_pass_twice_equals_the_plain_script(launch, policy):
    ran = launch(SHARED_GRAPH + SHARED_GRAPH_LOOP, workers=1, steps=8, policy=policy)
    assert (ran.code, ran.err) == (0, "")
    names = execute(SHARED_GRAPH)
    for step in range(4):
        names["iteration"](0, step)
    models = (names["maker"], names["judge"])
    expected = [t.detach() for model in models for t in model.state_dict().values()]
    assert_same(ran.kept[0]["tensors"], expected)


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async", "softsync:2"])
def test_gan_that_uses_one_forward_pass_twice_trains_with_several_workers(launch, policy):
    ran = launch(SHARED_GRAPH + SHARED_GRAPH_LOOP, workers=3, steps=12, policy=policy)
    assert (ran.code, ran.err) == (0, "")
    assert all(t.isfinite().all() for t in ran.kept[0]["tensors"])


@pytest.mark.parametrize("policy", ["backup:1", "async", "ssp:1", "softsync:2", "batchsync:2"])
def test_gan_trains_under_every_policy(launch, policy):
    """Policies that mix versions mix optimizers, too, even in one update."""
    ran = launch(GAN + GAN_LOOP.replace("HOLD", ""), steps=12, policy=policy, min_workers=2)
    assert (ran.code, ran.err) == (0, "")
    assert len(list(ran.trace.updates())) == 12
    assert_same(ran.kept[0]["tensors"], ran.kept[1]["tensors"])
    assert all(t.isfinite().all() for t in ran.kept[0]["tensors"])
    start = execute(GAN)
    begin = [t for m in (start["maker"], start["judge"]) for t in (*m.parameters(), *m.buffers())]
    changed = [not torch.equal(a, b) for a, b in zip(begin, ran.kept[0]["tensors"], strict=True)]
    assert all(changed)


MOVING = """
run = paceline.join()
maker, judge, of_maker, of_judge = run.prepare(maker, judge, of_maker, of_judge)
moved = 0
step = 0
begin = [p.detach().clone() for p in maker.parameters()]
while not run.finished:
    judge.zero_grad()
    forward = [p.detach().clone() for p in maker.parameters()]
    fake = maker(draw(run.worker, step, 2))
    (say(judge(draw(run.worker, step, 3) + 2.0), 1.0) + say(judge(fake.detach()), 0.0)).backward()
    of_judge.step()
    if run.finished:
        break
    moved += not all(map(torch.equal, forward, maker.parameters()))
    maker.zero_grad()
    say(judge(fake), 1.0).backward()
    of_maker.step()
    step += 1
tensors = [t.detach().clone() for m in (maker, judge) for t in m.state_dict().values()]
trained = not all(map(torch.equal, begin, maker.parameters()))
keep(run, moved=moved, step=step, trained=trained, tensors=tensors)
"""


@pytest.mark.parametrize("policy", ["sync", "async", "ssp:2", "softsync:2"])
def test_weights_do_not_move_between_a_forward_and_its_backward_pass(launch, policy):
    """The step of the judge loads only the judge, so the maker's graph fits the maker."""
    ran = launch(GAN + MOVING, workers=3, steps=60, policy=policy, min_workers=3)
    assert (ran.code, ran.err) == (0, "")
    assert [kept["moved"] for kept in ran.kept.values()] == [0, 0, 0]
    assert sum(kept["step"] for kept in ran.kept.values()) >= 20
    assert all(kept["trained"] for kept in ran.kept.values())
    for worker in (1, 2):  # the end of the run loads everything
        assert_same(ran.kept[worker]["tensors"], ran.kept[0]["tensors"])


def test_late_worker_does_not_disturb_a_gan(launch):
    """Worker 1 is always two updates late; the others' updates still alternate."""
    ran = launch(
        GAN + LATE + GAN_LOOP.replace("HOLD", "be_late(run, 8)"), steps=8, policy="backup:1"
    )
    assert (ran.code, ran.err) == (0, "")
    steps = ran.kept[0]["maker_state"]["state"][0]["step"]
    assert steps.item() == 4
    assert_same(ran.kept[0]["tensors"], ran.kept[1]["tensors"])


OUT_OF_STEP = """
run = paceline.join()
maker, judge, of_maker, of_judge = run.prepare(maker, judge, of_maker, of_judge)
fates = []
turn = run.worker  # so worker 1 begins with the other optimizer
while not run.finished:
    optimizer, loss = ((of_judge, judge_loss), (of_maker, maker_loss))[turn % 2]
    optimizer.zero_grad()
    loss(run.worker, turn).backward()
    optimizer.step()
    fates.append(str(run.last.fate))
    turn += 1
keep(run, fates=fates)
"""


def test_workers_that_start_with_different_optimizers_synchronize(launch):
    """An update is for one optimizer; a worker that reports another one continues with its next."""
    ran = launch(GAN + OUT_OF_STEP, steps=6)
    assert (ran.code, ran.err) == (0, "")
    fates = [kept["fates"] for kept in ran.kept.values()]
    assert sorted(map(len, fates)) == [6, 7]
    assert sorted(fate for one in fates for fate in one) == ["accepted"] * 12 + ["cancelled"]


FORWARD_FORWARD = """
class Layer(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.03)

    def forward(self, x):
        return torch.relu(super().forward(x / (x.norm(dim=1, keepdim=True) + 1e-4)))

    def fit(self, good, bad, steps):
        losses = []
        for _ in range(steps):
            apart = torch.cat([2 - self(good).square().mean(1), self(bad).square().mean(1) - 2])
            loss = F.softplus(apart).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

torch.manual_seed(0)
layers = [Layer(*sizes) for sizes in ((20, 40), (40, 40), (40, 40))]
run = paceline.join()
run.prepare(nn.Sequential(*layers), *(layer.optimizer for layer in layers))
good, bad = torch.randn(60, 20) + 1, torch.randn(60, 20) - 1
losses = []
for layer in layers:
    losses.append(layer.fit(good, bad, steps=40))
    good, bad = layer(good).detach(), layer(bad).detach()
keep(run, losses=losses)
"""


@pytest.mark.parametrize("policy", ["sync", "backup:1", "async", "ssp:2"])
def test_layers_that_are_trained_one_after_the_other_are_all_trained(launch, policy):
    """Each layer has its optimizer, as in the forward-forward algorithm."""
    ran = launch(FORWARD_FORWARD, workers=3, steps=100_000, policy=policy)
    assert ran.code == 0, ran.err
    for losses in ran.kept[0]["losses"]:
        assert len(losses) == 40
        assert losses[-1] < 0.95 * losses[0]
