# SPDX-License-Identifier: BSD-3-Clause
"""Real runs over TCP, exact and in half precision."""

from pathlib import Path

import pytest
import torch

from paceline.run.settings import Settings
from paceline.trace.reader import read_trace
from paceline.watch.summary import summarize

STEPS = 40

TRAINING = """
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 600), nn.ReLU(),
    nn.Linear(600, 1),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
run = paceline.join()
torch.set_num_threads(1)
model, optimizer = run.prepare(model, optimizer)
inputs = torch.randn(256, 16, generator=torch.Generator().manual_seed(1))
labels = inputs[:, :4].prod(1, keepdim=True)
first, grads = None, []
while not run.finished:
    begin = 32 * ((2 * run.version + run.worker) % 8)
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs[begin : begin + 32]), labels[begin : begin + 32])
    loss.backward()
    before = [p.grad.clone() for p in model.parameters()]
    running = [b.clone() for b in model.buffers()]
    optimizer.step()
    first = first or loss.item()
    grads.append(all(map(torch.equal, before, [p.grad for p in model.parameters()]))
                 if not run.finished else True)
    run.log(loss=loss.item())
with torch.no_grad():
    model.eval()
    loss = F.mse_loss(model(inputs), labels).item()
keep(run, loss=loss, first=first, grads=all(grads), state=model.state_dict())
"""


def pushed_bytes(ran):
    return summarize(ran.trace).traffic.pushed_bytes


@pytest.fixture
def train(launch):
    """Return a function that trains over TCP, with these settings."""

    def run(**options):
        ran = launch(TRAINING, **{"steps": STEPS, "transport": "tcp", **options})
        assert ran.code == 0, ran.err
        return ran

    return run


def assert_same(one, other):
    """Compare the states of two models bit for bit."""
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_exact_run_over_tcp_equals_one_in_shared_memory_bit_for_bit(train):
    over_tcp, shared = train(), train(transport="auto")
    assert_same(
        torch.load(over_tcp.folder / "weights.pt"), torch.load(shared.folder / "weights.pt")
    )
    assert summarize(shared.trace).traffic.pushed_bytes == 0
    assert pushed_bytes(over_tcp) > 0
    assert "wire" not in over_tcp.trace.header.about


def test_format_has_no_effect_on_shared_memory(train):
    rounded = {"wire": "float16", "wire_parameters": "float16"}
    one, other = train(transport="auto", **rounded), train(transport="auto")
    assert_same(torch.load(one.folder / "weights.pt"), torch.load(other.folder / "weights.pt"))


def test_run_in_half_precision_trains_to_the_same_loss_in_half_the_bytes(train):
    exact = train()
    for wire in ("bfloat16", "float16"):
        half = train(wire=wire, wire_parameters=wire)
        assert exact.kept[0]["loss"] < 0.7 * exact.kept[0]["first"]
        assert half.kept[0]["loss"] == pytest.approx(exact.kept[0]["loss"], rel=0.1)
        assert half.kept[0]["loss"] != exact.kept[0]["loss"]
        assert pushed_bytes(half) == pytest.approx(pushed_bytes(exact) / 2, rel=0.02)
        ours, theirs = (summarize(ran.trace).traffic.pulled_bytes for ran in (half, exact))
        assert ours == pytest.approx(theirs / 2, rel=0.02)
        assert half.trace.header.about["wire"] == wire
        assert half.trace.header.about["wire_parameters"] == wire


def test_two_servers_in_half_precision_equal_one_in_half_the_bytes(train):
    """Each server has parameters, so their formats matter on both."""
    rounded = {"wire": "bfloat16", "wire_parameters": "bfloat16", "steps": 8}
    one, two = train(**rounded), train(servers=2, **rounded)
    exact = train(servers=2, steps=8)
    assert two.trace.header.about["servers"] == "2"
    assert two.trace.header.about["wire"] == "bfloat16"
    assert_same(torch.load(two.folder / "weights.pt"), torch.load(one.folder / "weights.pt"))
    for kept in two.kept.values():
        assert kept["grads"]
        assert_same(kept["state"], torch.load(two.folder / "weights.pt"))
    assert pushed_bytes(two) == pytest.approx(pushed_bytes(exact) / 2, rel=0.02)


def test_script_sees_its_gradient_as_it_computed_it_and_the_last_version_exactly(train):
    ran = train(wire="bfloat16", wire_parameters="bfloat16")
    for kept in ran.kept.values():
        assert kept["grads"]
        assert_same(kept["state"], torch.load(ran.folder / "weights.pt"))


@pytest.mark.usefixtures("shared_forkserver")
def test_command_line_has_the_formats_and_a_resumed_run_keeps_them(call, script):
    script(TRAINING)
    words = ("--transport", "tcp", "--wire", "bfloat16", "--wire-parameters", "float16")
    code, _, err = call("run", "-w", 2, "--steps", 3, *words, "--out", "run", "script.py", "run")
    assert code == 0, err
    assert "no effect" not in err
    code, _, err = call("run", "--resume", "run", "--steps", 5, "--wire-parameters", "exact")
    assert code == 0, err
    settings = Settings.read(Path("run/spec.json"))
    assert (settings.wire, settings.wire_parameters) == ("bfloat16", "exact")
    code, out, err = call("trace", "check", "run")
    assert (code, err) == (0, "")
    assert "is consistent: run of sync, 2 workers, 5 updates" in out
    header = read_trace(Path("run/trace.jsonl")).header
    assert (header.about["wire"], header.about["wire_parameters"]) == ("bfloat16", "float16")


@pytest.mark.usefixtures("shared_forkserver")
def test_format_without_tcp_gets_a_hint(call, script):
    script(TRAINING)
    words = ("--wire", "bfloat16", "--out", "run", "script.py", "run")
    code, _, err = call("run", "-w", 1, "--steps", 1, *words)
    assert code == 0, err
    assert err.splitlines()[0] == (
        "note: --wire has no effect, because all workers share memory with the server; to use TCP "
        "on one machine, add --transport tcp"
    )
