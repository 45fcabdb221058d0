# SPDX-License-Identifier: BSD-3-Clause
"""Bad peers connect to a run on real processes, hundreds of them at once."""

from pathlib import Path

import torch

from paceline.run.server.strangers import STRANGERS_MAX

SCRIPT = """
sys.path.append(TESTS)
import os
from strangers import RawPeer
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.tensors.state_spec import OptionChange, StateSpec
from paceline.run.tensors.layout import gather

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
spec = gather([model], [optimizer]).spec
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
reasons = {}

def connect(token=True):
    token = Path(os.environ["PACELINE_TOKEN_FILE"]).read_text() if token else None
    return RawPeer(os.environ["PACELINE_ADDRESS"], token)

def refusal(peer, *things):
    return peer.send(*things).wait_closed()

def intrude():
    reasons["garbage"] = refusal(connect(False), b"garb" * 1000)
    silent = [connect(False) for _ in range(STRANGERS)]
    reasons["crowded out"] = [client.wait_closed() for client in silent[:STRANGERS - STRANGERS_MAX]]
    hello = messages.Hello(messages.PROTOCOL, bytes(32))
    reasons["token"] = refusal(connect(False), hello, messages.Proof(bytes(32)))
    reasons["early"] = refusal(connect(), messages.GradientReport(1, 0, 0, 1, 0.0, 1.0))
    reasons["taken"] = refusal(connect(), messages.Join(1, RELEASE, spec))
    reasons["other"] = refusal(connect(), messages.Join(9, RELEASE, StateSpec((), (), (), ())))
    peer = connect().join(9, spec)
    reasons["option"] = peer.send(
        peer.gradient(peer.receive_assignment(), options=(OptionChange(0, 5, "lr", 9.0),))
    ).wait_closed()
    connect().join(9, spec).send(b"dies in the middle of a message").close()
    return silent  # they stay until the end

while not run.finished:
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if INTRUDE and run.is_first and run.version == 3:
            crowd = intrude()
        optimizer.step()
weights = {name: weight.clone() for name, weight in model.state_dict().items()}
keep(run, reasons=reasons, version=run.version, weights=weights)
"""

STRANGERS = 300


def source(intrude):
    known = {
        "TESTS": str(Path(__file__).parents[2]),
        "INTRUDE": intrude,
        "STRANGERS": STRANGERS,
        "STRANGERS_MAX": STRANGERS_MAX,
    }
    return "".join(f"{name} = {value!r}\n" for name, value in known.items()) + SCRIPT


def test_run_with_intruders_equals_one_without(launch):
    alone = launch(source(False), workers=2, steps=6)
    ran = launch(source(True), workers=2, steps=6)
    assert (alone.code, ran.code) == (0, 0)
    assert [kept["version"] for kept in ran.kept.values()] == [6, 6]
    updates = [sorted(update.contributors) for update in ran.trace.updates()]
    assert updates == [[0, 1]] * 6
    for worker in range(2):
        for name, weight in alone.kept[worker]["weights"].items():
            assert torch.equal(ran.kept[worker]["weights"][name], weight), name

    reasons = ran.kept[0]["reasons"]
    assert reasons["garbage"] == "a frame must have 1 to 256 bytes, got 1651663207"
    assert reasons["crowded out"] == [""] * (STRANGERS - STRANGERS_MAX)
    assert reasons["token"] == "the token is wrong"
    assert reasons["early"] == "a worker must join before anything else"
    assert reasons["taken"] == "there is already a worker 1; give this one another number"
    assert reasons["other"].startswith(
        "the worker's script differs from the server's: it has 0 optimizers"
    )
    assert reasons["option"].startswith("no such parameter group")
