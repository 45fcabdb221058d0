# SPDX-License-Identifier: BSD-3-Clause
"""A plain script with two more lines runs under every policy, and its trace is sound."""

import pytest

SCRIPT = """
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
losses = []
while not run.finished:
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
keep(run, weight=model.weight.detach().clone(), version=run.version, finished=run.finished)
"""

POLICIES = [
    "sync",
    "backup:1",
    "batchsync:3",
    "deadline",
    "async",
    "softsync:2",
    "ssp:1",
    "delayed:1",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_and_all_workers_end_with_the_same_weights(launch, policy):
    ran = launch(SCRIPT, workers=3, steps=20, policy=policy)
    assert ran.code == 0
    assert len(list(ran.trace.updates())) == 20
    assert [kept["version"] for kept in ran.kept.values()] == [20, 20, 20]
    assert all(kept["finished"] for kept in ran.kept.values())
    assert len({tuple(kept["weight"].flatten().tolist()) for kept in ran.kept.values()}) == 1


def test_gradient_norms_are_in_the_trace(launch):
    ran = launch(SCRIPT, workers=2)
    assert all(gradient.sq_norm > 0 for gradient in ran.trace.gradients())
    assert all(update.sq_norm > 0 for update in ran.trace.updates())
