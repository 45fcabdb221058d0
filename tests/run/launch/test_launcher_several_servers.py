# SPDX-License-Identifier: BSD-3-Clause
"""Runs with several servers: the same weights as with one, whichever process is lost.

The model has 1.5 million parameters, so that each of three servers has some of them.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from failures import HELPERS, troubled
from paceline.run.launch import hang_report, hangs, part_servers, restarts
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.run.tensors.layout import gather
from paceline.run.tensors.partition import partition
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import Ended, Restored
from paceline.watch.audit import audit

MODEL = """
torch.manual_seed(1)
layers = [nn.Linear(64, 1200), nn.BatchNorm1d(1200), nn.ReLU(), nn.Dropout(0.2)]
model = nn.Sequential(*layers, nn.Linear(1200, 1200), nn.Tanh(), nn.Linear(1200, 1))
"""

SOURCE = (
    HELPERS
    + MODEL
    + """
NUMBER = os.environ.get("PACELINE_SERVER", "0")
if ROLE == "server":
    with open(OUT / f"server-{NUMBER}.pids", "a") as file:
        file.write(f"{os.getpid()}\\n")

def pids_of(server):
    return [int(line) for line in (OUT / f"server-{server}.pids").read_text().split()]

def once_after_a_checkpoint(run, version, word, act):
    # A checkpoint that is still being written would make the server skip the next one.
    if run.worker != 1 or run.version not in range(5, version + 1, 3) or was_told(word):
        return
    wait_until((OUT / "checkpoints" / f"{run.version - 2:010}.ckpt").exists)
    if run.version == version:
        tell(word)
        act()

x = torch.randn(80, 64)
data = torch.utils.data.TensorDataset(x, x[:, :1] * 2)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
optimizer = OPTIMIZER
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
run = paceline.join()
model, optimizer, scheduler, loader = run.prepare(model, optimizer, scheduler, loader)
while not run.finished:
    for x, y in loader:
        trouble(run)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        run.backward(loss)
        optimizer.step()
        scheduler.step()
        run.log(loss=loss.item())
        if run.is_first and run.version == 5:
            optimizer.param_groups[0]["weight_decay"] = 0.02
with run.averaged_weights(model) as averaged:
    average = [p.detach().clone() for p in averaged.parameters()]
keep(run, weights=model.state_dict(), average=average, optimizer=optimizer.state_dict())
"""
)
ADAM = "torch.optim.Adam(model.parameters(), lr=0.003)"
ADAMW = "torch.optim.AdamW(model.parameters(), lr=0.003)"
QUIET = "\ndef trouble(run): pass\n"
STEPS = 14

TrainFunction = Callable[..., Path]


@pytest.fixture
def train(tmp_path, script, forkserver, capsys, monkeypatch) -> TrainFunction:
    """Run the script in a folder to this number of updates; resume the run in it, if any."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01)

    def run(
        name: str,
        trouble: str = QUIET,
        *,
        code: int = 0,
        steps: int = STEPS,
        optimizer: str = ADAM,
        width: int = 1200,
        **more: object,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        source = trouble + SOURCE.replace("OPTIMIZER", optimizer).replace("1200", str(width))
        settings = Settings(
            spec=RunSpec(workers=2, steps=steps, seed=5),
            ema=0.9,
            clip_norm=0.5,
            script=str(script(source)),
            arguments=(str(folder),),
            **{"checkpoint_every": "3", "servers": 3, **more},
        )
        found = Launcher(settings, folder, forkserver).run()
        printed = capsys.readouterr()
        (folder / "out").write_text(printed.out)
        (folder / "err").write_text(printed.err)
        assert found == code, printed.out + printed.err
        audit(read_trace(folder / "trace.jsonl"))
        return folder

    return run


def results(folder):
    """Return the final state of each worker, and the final weights."""
    kept = [torch.load(file) for file in sorted(folder.glob("worker-*.pt"))]
    assert len(kept) == 2
    files = ["weights.pt", "weights-averaged.pt"]
    return [*kept, *(torch.load(folder / file, weights_only=True) for file in files)]


def pids(folder, server):
    """Return the processes that this server has had."""
    file = folder / f"server-{server}.pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def restored(folder):
    """Return the versions that the run continued from."""
    trace = read_trace(folder / "trace.jsonl")
    return [record.version for record in trace.records if isinstance(record, Restored)]


def assert_equal(one, other):
    """Check that two nested values are equal, bit for bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other


@pytest.fixture
def alone(train):
    """Return the results of an undisturbed run with one server."""
    return results(train("alone", servers=1))


def test_each_of_three_servers_has_parameters():
    """Otherwise the other tests of this file would say little."""
    names = {"torch": torch, "nn": torch.nn}
    exec(MODEL, names)
    model = names["model"]
    whole = gather([model], [torch.optim.Adam(model.parameters())])
    sizes = [part.layout.size for part in partition(whole.spec, 3, [True])]
    assert len(sizes) == 3
    assert min(sizes) > 1_000_000


@pytest.mark.parametrize("optimizer", [ADAM, ADAMW])
def test_three_servers_give_the_weights_of_one(train, optimizer):
    one = train("one", servers=1, optimizer=optimizer)
    three = train("three", servers=3, optimizer=optimizer)
    assert_equal(results(three), results(one))
    assert [len(pids(three, server)) for server in range(4)] == [1, 1, 1, 0]
    assert [len(pids(one, server)) for server in range(4)] == [1, 0, 0, 0]
    assert restored(three) == []
    ended = "server 1: the run has ended"
    assert ended in (three / "output" / "server-1.log").read_text()
    assert ended not in (three / "out").read_text()  # only what the head prints is shown
    text = (three / "trace.jsonl").read_text()
    assert json.loads(text[: text.index("\n")])["about"]["servers"] == "3"


def striking(server, number="SIGKILL"):
    return f"""
def trouble(run):
    def strike():
        tell("struck", pids_of({server})[-1])
        os.kill(pids_of({server})[-1], signal.{number})
    once_after_a_checkpoint(run, 8, "time", strike)
"""


def check_struck(folder, server):
    """Check that this server was lost and replaced, and what the run says about it."""
    assert (folder / "struck.word").read_text() == str(pids(folder, server)[0])
    assert len(pids(folder, server)) == 2
    assert len(pids(folder, 0)) == 2  # all servers go back, so there is a new head
    assert restored(folder) == [6]


@pytest.mark.parametrize("server", [1, 2])
def test_killed_server_is_replaced_and_does_not_change_the_result(train, alone, server):
    folder = train("killed", striking(server))
    check_struck(folder, server)
    assert_equal(results(folder), alone)
    assert len(pids(folder, 3 - server)) == 1
    err = (folder / "err").read_text()
    assert f"server {server} was killed by SIGKILL; restarting" in err
    assert "Traceback" not in err


IMPATIENT = """
from paceline.run.server import part_host
part_host.LINGER_S = 1
"""


def test_server_that_gets_sigterm_is_replaced(train, alone):
    """Only the head can stop the run, so this is a loss like any other."""
    trouble = """
def trouble(run):
    def strike():
        tell("struck", pids_of(1)[-1])
        os.kill(pids_of(1)[-1], signal.SIGTERM)
        wait_until(lambda: in_the_trace(type="restored"))
    once_after_a_checkpoint(run, 8, "time", strike)
"""
    folder = train("asked", IMPATIENT + trouble)
    check_struck(folder, 1)
    assert_equal(results(folder), alone)
    err = (folder / "err").read_text()
    assert "server 1 was killed by SIGTERM; restarting" in err
    assert "Traceback" not in err


def test_run_whose_processes_all_get_sigterm_is_saved(train, alone):
    """As systemd and Slurm do it. The other servers stay until the head has saved the run."""
    trouble = f"""
def trouble(run):
    def stop_all():
        for server in (1, 2, 0):
            os.kill(pids_of(server)[-1], signal.SIGTERM)
        os.kill({os.getpid()}, signal.SIGTERM)
        wait_until(lambda: in_the_trace(type="stopped"))
    if run.version == 4 and run.worker == 1 and not was_told("all"):
        tell("all")
        stop_all()
"""
    folder = train("stopped", trouble, code=143, checkpoint_every="1000")
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["0000000004.ckpt"]
    assert (folder / "weights.pt").exists()
    err = (folder / "err").read_text()
    assert "lost server" not in err
    assert "failed" not in err
    assert_equal(results(train("stopped", trouble)), alone)


def test_killed_server_is_replaced_over_tls(train, alone, tls_files):
    """The checkpoints of all servers and the optimizer's state travel over TLS, too."""
    files = {"tls_cert": tls_files.cert, "tls_key": tls_files.key, "tls_ca": tls_files.ca}
    folder = train("killed", striking(2), **files)
    check_struck(folder, 2)
    assert_equal(results(folder), alone)


def test_killed_head_does_not_change_the_result(train, alone):
    folder = train("killed", striking(0))
    check_struck(folder, 0)
    assert_equal(results(folder), alone)
    assert [len(pids(folder, server)) for server in (1, 2)] == [1, 1]


def test_stopped_server_is_killed_and_replaced(train, alone, monkeypatch):
    monkeypatch.setattr(part_servers, "FROZEN_SERVER_S", 0.3)
    folder = train("stopped", striking(1, "SIGSTOP"))
    check_struck(folder, 1)
    assert_equal(results(folder), alone)
    err = (folder / "err").read_text()
    assert "server 1 was stopped (SIGSTOP); killing it" in err


@pytest.mark.parametrize("policy", ["backup:1", "async", "softsync:2", "delayed:1"])
def test_run_under_any_policy_survives_a_killed_server(train, policy):
    trouble = """
def trouble(run):
    if run.version >= 7 and run.worker == 1 and not was_told("struck"):
        tell("struck", pids_of(2)[-1])
        os.kill(pids_of(2)[-1], signal.SIGKILL)
    elif run.version >= 7:
        wait_for("struck")
"""
    folder = train("any", trouble, policy=policy, checkpoint_every="1")
    assert len(pids(folder, 2)) == 2
    assert len(restored(folder)) == 1
    assert [u.update for u in read_trace(folder / "trace.jsonl").updates()][-1] == STEPS


def test_resumed_run_may_have_another_number_of_servers(train, alone):
    for steps, servers in [(4, 3), (9, 1), (STEPS, 2)]:
        folder = train("cut", steps=steps, servers=servers)
    assert restored(folder) == [4, 9]
    assert [len(pids(folder, server)) for server in range(3)] == [3, 2, 1]
    assert_equal(results(folder), alone)


def test_stopped_run_is_saved_and_leaves_nothing(train, alone):
    """The signal goes to the launcher, which is the process of the test."""
    trouble = f"""
def trouble(run):
    once_after_a_checkpoint(run, 8, "time", lambda: os.kill({os.getpid()}, signal.SIGTERM))
    if run.version == 8:
        wait_until(lambda: in_the_trace(type="stopped"))
"""
    folder = train("stopped", trouble, code=143)
    trace = read_trace(folder / "trace.jsonl")
    assert [record.version for record in trace.records if isinstance(record, Ended)] == [8]
    assert (folder / "weights.pt").exists()
    for server in range(3):
        [pid] = pids(folder, server)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert_equal(results(train("stopped", trouble)), alone)


STRIKING_ITSELF = """
def trouble(run): pass

import threading
from torch.optim import adam as module
functional, calls = module.adam, []

def strike_once(*args, **kwargs):
    functional(*args, **kwargs)
    calls.append(1)
    if ROLE == "server" and NUMBER == "1" and len(calls) == 8 and not was_told("struck"):
        wait_until((OUT / "checkpoints" / "0000000006.ckpt").exists)
        tell("struck", os.getpid())
        HOW

module.adam = strike_once
"""


def test_server_that_hangs_is_found_and_replaced(train, alone, monkeypatch):
    """The head waits for it and looks hung as well, so all servers begin again."""
    monkeypatch.setattr(hangs, "HUNG_SERVER_S", 2.0)
    monkeypatch.setattr(hang_report, "SILENT_SERVER_S", 0.5)
    folder = train("hung", STRIKING_ITSELF.replace("HOW", "threading.Event().wait()"))
    check_struck(folder, 1)
    assert_equal(results(folder), alone)
    err = (folder / "err").read_text()
    where = "the server may be waiting for server 1; it is at script.py:"
    assert re.search(re.escape(where) + r"\d+ \(`threading\.Event\(\)\.wait\(\)`\)", err), err
    assert "server has neither answered nor used the processor for 2 s; killing it" in err
    assert "server 1, for which it may have been waiting, is killed as well" in err
    assert "Traceback" not in err


def test_server_that_exits_as_if_the_run_were_over_is_replaced(train, alone):
    folder = train("exited", STRIKING_ITSELF.replace("HOW", "os._exit(0)"))
    check_struck(folder, 1)
    assert_equal(results(folder), alone)
    err = (folder / "err").read_text()
    assert "server 1 failed with exit code 0; restarting" in err


BROKEN = """
def trouble(run): pass

from torch.optim import adam as module
functional, calls = module.adam, []

def fail_at_last(*args, **kwargs):
    functional(*args, **kwargs)
    calls.append(1)
    if ROLE == "server" and NUMBER == "2" and len(calls) == AT:
        tell("raised", os.getpid())
        raise ValueError("enough")

module.adam = fail_at_last
"""


@pytest.mark.parametrize("at", [4, 6, STEPS], ids=["between", "at-checkpoint", "last"])
def test_error_on_another_server_ends_the_run_with_a_line(train, at):
    """It isn't tried again and again, and a version that only some servers have isn't saved."""
    folder = train("raised", f"AT = {at}\n" + BROKEN, code=1)
    assert (folder / "raised.word").read_text() == str(pids(folder, 2)[0])
    err = (folder / "err").read_text()
    assert err.count("the run failed: server 2 failed: ValueError: enough") == 1
    assert err.count("Traceback") == 1
    assert "was killed" not in err
    assert [len(pids(folder, server)) for server in range(3)] == [1, 1, 1]
    saved = [int(path.stem) for path in (folder / "checkpoints").glob("*.ckpt")]
    assert saved
    assert set(saved) <= set(range(3, at, 3))  # one is skipped if the last is still being written
    assert not (folder / "weights.pt").exists()
    assert restored(folder) == []


def test_error_before_prepare_ends_the_run(tmp_path, script, forkserver, capfd):
    """The head has nothing to serve without server 2."""
    source = """
if os.environ.get("PACELINE_SERVER") == "2":
    tell("raised", os.getpid())
    raise ValueError("no data here")
"""
    settings = Settings(
        spec=RunSpec(workers=2, steps=STEPS),
        script=str(script(troubled(source + QUIET))),
        arguments=(str(tmp_path),),
        servers=3,
    )
    assert Launcher(settings, tmp_path, forkserver).run() == 1
    err = capfd.readouterr().err
    assert (tmp_path / "raised.word").exists()
    assert err.count("ValueError: no data here") == err.count("Traceback") == 1
    assert "server 2 failed with exit code 1; ending the run" in err


FULL = """
def trouble(run): pass

from paceline.errors import SpecError
from paceline.run.net.shared_memory import SharedMemoryStore
new_accumulator, calls = SharedMemoryStore.new_accumulator, []

def fail_once(store):
    calls.append(1)
    if len(calls) == 2 and ROLE == "server" and NUMBER == AT:
        tell("refused", os.getpid())
        raise SpecError("not enough shared memory for the slot")
    return new_accumulator(store)

SharedMemoryStore.new_accumulator = fail_once
"""


@pytest.mark.parametrize("server", [0, 1])
def test_worker_is_refused_if_any_server_has_no_memory_for_it(train, alone, server):
    """It is started again, and the run begins once it has joined."""
    folder = train("full", f'AT = "{server}"\n' + FULL)
    assert (folder / "refused.word").read_text() == str(pids(folder, server)[0])
    assert_equal(results(folder), alone)
    err = (folder / "err").read_text()
    which = "server 1: " if server else ""
    assert f"refused worker 1: {which}not enough shared memory for the slot" in err.replace(
        "worker 0", "worker 1"
    )
    assert [len(pids(folder, number)) for number in range(3)] == [1, 1, 1]
    assert restored(folder) == []


CUT_OFF = """
def trouble(run):
    if run.worker == 1:
        tell("back")
    elif run.version == 3:
        wait_for("back")

from paceline.errors import PeerLost
from paceline.run.worker import connection
connect_data, times = connection.connect_data, []

def fail_at_first(address, *args, **kwargs):
    if WORKER != 1 or address == os.environ["PACELINE_ADDRESS"] or len(times) == 8:
        return connect_data(address, *args, **kwargs)
    times.append(time.monotonic())
    tell("times", json.dumps(times))
    raise PeerLost("no route to host")

connection.connect_data = fail_at_first
"""


def test_worker_that_cannot_reach_another_server_tries_again_with_growing_pauses(train):
    folder = train("cut-off", CUT_OFF, policy="backup:1")
    times = json.loads((folder / "times.word").read_text())
    assert len(times) == 8
    assert times[-1] - times[0] > 0.01 * sum(1.5**n for n in range(7))
    assert "worker 1 left" in (folder / "out").read_text()
    assert [len(pids(folder, number)) for number in range(3)] == [1, 1, 1]
    assert restored(folder) == []


SMALL = """
def clip(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.data.clamp_(-0.1, 0.1)

if HOOKED:
    optimizer.register_step_post_hook(clip)
"""


@pytest.mark.parametrize("hooked", [False, True], ids=["small", "hooked"])
def test_server_may_have_no_parameters(train, hooked):
    """The model is smaller than what stays together, or a hook may look at all of it."""
    width = 1200 if hooked else 8
    change = f"HOOKED = {hooked}\n" + SMALL
    source = {"optimizer": ADAM + "\n" + change, "width": width}
    one, two = train("one", servers=1, **source), train("two", servers=2, **source)
    assert_equal(results(two), results(one))
    assert len(pids(two, 1)) == 1
