# SPDX-License-Identifier: BSD-3-Clause
"""A real run on real processes to which bad peers come, hundreds of them at once among others."""

from pathlib import Path

import torch

from paceline.run.server.peers import STRANGERS_MAX

SCRIPT = """
sys.path.append(TESTS)
import os
from strangers import Raw
from paceline.release import RELEASE
from paceline.run.net import messages
from paceline.run.tensors.state_spec import OptionChange, StateSpec
from paceline.run.tensors.layout import gather

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
contents = gather([model], [optimizer]).contents
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
said = {}

def come(token=True):
    token = Path(os.environ["PACELINE_TOKEN_FILE"]).read_text() if token else None
    return Raw(os.environ["PACELINE_ADDRESS"], token)

def intrude():
    said["garbage"] = come(False).say(b"garb" * 1000).end()
    silent = [come(False) for _ in range(STRANGERS)]
    said["crowded out"] = [stranger.end() for stranger in silent[:STRANGERS - STRANGERS_MAX]]
    said["token"] = come(False).say(messages.Hello(1, bytes(32)), messages.Proof(bytes(32))).end()
    said["early"] = come().say(messages.GradientReport(1, 0, 0, 1, 0.0, 1.0)).end()
    said["taken"] = come().say(messages.Join(1, RELEASE, contents)).end()
    said["other"] = come().say(messages.Join(9, RELEASE, StateSpec((), (), (), ()))).end()
    raw = come().join(9, contents)
    said["option"] = raw.say(
        raw.gradient(raw.get_work(), options=(OptionChange(0, 5, "lr", 9.0),))
    ).end()
    come().join(9, contents).say(b"dies in the middle of a word").close()
    return silent  # they stay to the end

for x, y in loader:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    if INTRUDE and run.is_first and run.version == 3:
        crowd = intrude()
    optimizer.step()
weights = {name: weight.clone() for name, weight in model.state_dict().items()}
keep(run, said=said, version=run.version, weights=weights)
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


def test_a_run_with_intruders_ends_as_one_without(launch):
    alone = launch(source(False), workers=2, steps=6)
    ran = launch(source(True), workers=2, steps=6)
    assert (alone.code, ran.code) == (0, 0)
    assert [kept["version"] for kept in ran.kept.values()] == [6, 6]
    updates = [sorted(update.contributors) for update in ran.trace.updates()]
    assert updates == [[0, 1]] * 6
    for worker in range(2):
        for name, weight in alone.kept[worker]["weights"].items():
            assert torch.equal(ran.kept[worker]["weights"][name], weight), name

    said = ran.kept[0]["said"]
    assert said["garbage"] == "a frame must have 1 to 256 bytes, one of 1651663207 was announced"
    assert said["crowded out"] == [""] * (STRANGERS - STRANGERS_MAX)
    assert said["token"] == "it has another token"
    assert said["early"] == "it must join before anything else"
    assert said["taken"] == "there is a worker 1 already; give this one another number"
    assert said["other"].startswith("its script is not that of the run: it has 0 optimizers")
    assert said["option"].startswith("no such parameter group")
