# SPDX-License-Identifier: BSD-3-Clause
"""What a run can't do raises a SpecError in the worker, which says what to do instead."""

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import SpecError
from paceline.run.launch.environment import Identity
from paceline.run.launch.launcher import Launcher
from paceline.run.script import WorkerRun
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from plain import SETUP, assert_same, train, weights


def sgd(*models):
    """Return an optimizer for all parameters of these models."""
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def nothing_to_train():
    return [nn.Linear(2, 2)]


def an_unknown_object():
    model = nn.Linear(2, 2)
    return [model, sgd(model), 3.0]


def a_scheduler_without_its_optimizer():
    model = nn.Linear(2, 2)
    other = torch.optim.lr_scheduler.StepLR(sgd(model), step_size=1)
    return [model, sgd(model), other]


def a_parameter_in_two_optimizers():
    model = nn.Linear(2, 2)
    return [model, sgd(model), sgd(model)]


def overlapping_parameters():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight.data = first.weight.data
    model = nn.Sequential(first, second)
    return [model, sgd(model)]


def a_lazy_module():
    model = nn.LazyLinear(2)
    return [model, sgd(model)]


def a_lazy_buffer():
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyBatchNorm1d(affine=False))
    return [model, sgd(model[0])]


def a_complex_parameter():
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    return [model, sgd(model)]


REFUSED = {
    nothing_to_train: "run.prepare() needs at least one optimizer, got none",
    an_unknown_object: (
        "run.prepare() takes models, optimizers, schedulers and loaders, got float"
    ),
    a_scheduler_without_its_optimizer: "StepLR was passed to run.prepare() without its optimizer",
    a_parameter_in_two_optimizers: (
        "weight belongs to two optimizers; pass it to only one of them"
    ),
    overlapping_parameters: (
        "0.weight and 1.weight share memory; to tie them, use one parameter in both places"
    ),
    a_lazy_module: "weight has no shape yet; run one batch through the model before",
    a_lazy_buffer: "running_mean has no shape yet; run one batch through the model before",
    a_complex_parameter: "0 must have a floating-point type, got torch.complex64",
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_prepare_refuses_what_a_run_cannot_train(make):
    """A worker raises before it connects to the server."""
    nowhere = Identity("unix:@nowhere", Path("no-token"), Path(), worker=0)
    with pytest.raises(SpecError) as caught:
        WorkerRun(nowhere).prepare(*make())
    assert REFUSED[make] in str(caught.value)


def test_refused_script_ends_the_run_and_says_why_once(script, tmp_path, capsys, forkserver):
    """The server refuses it, and no worker is started."""
    path = script("run = paceline.join()\nrun.prepare(nn.Linear(2, 2))\n")
    at = len(path.read_text().splitlines())
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    options = {"script": str(path), "arguments": (str(run_dir),)}
    settings = Settings(spec=RunSpec(workers=2, steps=1), **options)
    code = Launcher(settings, run_dir, forkserver).run()
    err = capsys.readouterr().err
    assert code == 2
    assert err.count(f" | script.py:{at}: {REFUSED[nothing_to_train]}\n") == 1
    assert "Traceback" not in err
    assert [file.name for file in (run_dir / "output").iterdir()] == ["server.log"]
    kept = (run_dir / "output" / "server.log").read_text()
    assert kept == f"script.py:{at}: {REFUSED[nothing_to_train]}\n"


# ------------------------------------------------------------------------------------ after prepare

SGD = SETUP + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"

TRIED_LOOP = """
import copy
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
message = None
try:
    TRIED
except paceline.SpecError as error:
    message = str(error)
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
keep(run, message=message, weights=[p.detach().clone() for p in model.parameters()])
"""

TRIED = {
    "optimizer.step(lambda: loss_of(0, 0))": "optimizer.step() takes no closure in a run",
    "optimizer.add_param_group({'params': []})": "parameter groups can't be added during a run",
    "model.load_state_dict(model.state_dict())": "load weights before run.prepare()",
    "model[0].load_state_dict(model[2].state_dict())": "load weights before run.prepare()",
    "run.prepare(model, optimizer)": "run.prepare() was called twice; pass everything in one",
    # A copy of the model belongs to the script.
    "copy.deepcopy(model).load_state_dict(model.state_dict())": None,
}


@pytest.mark.parametrize("tried", TRIED)
def test_refusal_after_prepare_does_not_affect_the_run(launch, tried):
    ran = launch(SGD + TRIED_LOOP.replace("TRIED", tried), steps=2)
    assert (ran.code, ran.err) == (0, "")
    for kept in ran.kept.values():
        assert (kept["message"] or "").startswith(TRIED[tried] or "")
        assert (kept["message"] is None) == (TRIED[tried] is None)
        assert_same(kept["weights"], weights(train(SGD, 2)))


BROKEN = {
    "a sparse gradient": (
        """
model = nn.Embedding(4, 2, sparse=True)
loss_of = lambda worker, version: model(torch.tensor([version])).sum()
""",
        "pass",
        "the gradient of parameter 'weight' is sparse, which a run can't exchange; create the",
    ),
    "a large sparse gradient": (
        """
model = nn.Embedding(20_000, 2, sparse=True)
loss_of = lambda worker, version: model(torch.tensor([version])).sum()
""",
        "pass",
        "the gradient of parameter 'weight' is sparse, which a run can't exchange; create the",
    ),
    "another type": (
        "",
        "model.double(); batch = wide_batch",
        "parameter '0.weight' was moved after run.prepare()",
    ),
    "another type and back": (
        "",
        "model.double(); model.float()",
        "parameter '0.weight' was moved after run.prepare()",
    ),
    "another order of dimensions": (
        """
model = nn.Conv2d(2, 2, 3)
loss_of = lambda worker, version: model(torch.ones(1, 2, 4, 4)).sum()
""",
        "model.to(memory_format=torch.channels_last)",
        "parameter 'weight' was moved after run.prepare()",
    ),
    "another shape": (
        "",
        "model[2].weight.data = torch.zeros(3, 8); model[2].bias.data = torch.zeros(3)",
        "parameter '2.weight' was moved after run.prepare()",
    ),
    "another large shape": (
        """
model = nn.Linear(4, 20_000)
loss_of = lambda worker, version: model(torch.ones(1, 4)).sum()
""",
        "model.weight.data = torch.zeros(20_001, 4); model.bias.data = torch.zeros(20_001)",
        "a model can't change its shape or type during a run",
    ),
    "other memory": (
        "",
        "model[0].bias.data = torch.zeros(8)",
        "parameter '0.bias' was moved after run.prepare()",
    ),
    "another module": (
        "",
        "model[0] = nn.Linear(4, 8)",
        "parameter '0.weight' was replaced after run.prepare()",
    ),
    "another parameter": (
        "",
        "model[2].bias = nn.Parameter(torch.zeros_like(model[2].bias))",
        "parameter '2.bias' was replaced after run.prepare()",
    ),
}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("kind", BROKEN)
def test_changed_model_is_refused_at_the_first_step(launch, kind):
    setup, change, message = BROKEN[kind]
    ran = launch(
        SETUP
        + setup
        + f"""
narrow_batch = batch
wide_batch = lambda *who: [t.double() for t in narrow_batch(*who)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
{change}
try:
    loss_of(run.worker, run.version).backward()
    optimizer.step()
except paceline.SpecError as error:
    keep(run, message=str(error))
""",
        workers=1,
        steps=2,
    )
    assert message in ran.kept[0]["message"]
    assert list(ran.trace.gradients()) == []


# ----------------------------------------------------------------------------- errors on the server

STEPPING = """
class Own(torch.optim.SGD):
    def step(self, closure=None):
        if self.state_dict()["state"] and OUT.joinpath("fail").exists():
            raise ValueError("step failed")
        return super().step(closure)

model = nn.Linear(2, 1)
optimizer = Own(model.parameters(), lr=0.1, momentum=0.9)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()
    if run.version == 3:
        FAILURE
print("reached the end")
"""


def test_optimizer_that_fails_on_the_server_ends_the_run_cleanly(launch):
    failure = "OUT.joinpath('fail').touch()"
    ran = launch(STEPPING.replace("FAILURE", failure), workers=2, steps=50)
    assert ran.code == 1
    assert "the run failed: update " in ran.err
    assert "ValueError('step failed')" in ran.err
    assert "Traceback" in ran.err
    assert ran.out.count("reached the end") == 2
    assert ran.trace.records[-1].reason.startswith("update ")


def test_step_hooks_are_refused_in_a_worker(launch):
    source = (
        SETUP
        + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
refused = []
for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
    try:
        register(print)
    except paceline.SpecError as error:
        refused.append(str(error))
keep(run, refused=refused)
while not run.finished:
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""
    )
    ran = launch(source, workers=1, steps=1)
    assert ran.code == 0, ran.err
    assert (
        ran.kept[0]["refused"]
        == ["register step hooks before run.prepare(): they run with the step, on the server"] * 2
    )


def test_traceback_begins_in_the_script(launch):
    source = """
def deeper():
    raise KeyError("what is missing")

run = paceline.join()
model = nn.Linear(1, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
deeper()
"""
    ran = launch(source, workers=1, steps=1)
    assert ran.code == 1
    lines = [line.split("| ", 1)[1] for line in ran.err.splitlines() if line.startswith("worker")]
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith('  File "')
    assert lines[1].endswith("in <module>")
    assert "script.py" in lines[1]
    assert "KeyError: 'what is missing'" in lines[-1]
    assert "multiprocessing" not in ran.err
    assert "runpy" not in ran.err


def test_exit_handlers_of_a_script_run(launch):
    source = """
import atexit
atexit.register(lambda: print("at the end of", "server" if run.worker < 0 else run.worker))
run = paceline.join()
model = nn.Linear(1, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
while not run.finished:
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
"""
    ran = launch(source, workers=2, steps=2)
    assert ran.code == 0, ran.err
    ends = [line.split("| ", 1)[1] for line in ran.out.splitlines() if "at the end of" in line]
    assert sorted(ends) == ["at the end of 0", "at the end of 1", "at the end of server"]
