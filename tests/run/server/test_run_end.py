# SPDX-License-Identifier: BSD-3-Clause
"""How a run ended is on the disk soon after its last update, even if workers stay."""

from failures import troubled

TROUBLE = """
def trouble(run):
    if run.worker == 1:
        tell("hangs")
        while not was_told("killed"):
            time.sleep(0.01)
    if run.worker == 0 and run.version == 5:  # it contributes to each update, so it sees each
        wait_for("hangs")
"""

AFTER = """
if run.is_first:
    wait_until(lambda: in_the_trace(type="ended"))
    os.kill(server_pid(), signal.SIGKILL)
    tell("killed")
"""


def test_server_that_is_killed_while_it_waits_for_a_worker_costs_nothing(launch):
    ran = launch(troubled(TROUBLE) + AFTER, workers=3, policy="backup:1", restart=True)
    assert ran.code == 0, ran.err
    assert ran.trace.records[-1].reason == "finished"
    assert (ran.folder / "weights.pt").exists()
    assert (ran.folder / "checkpoints" / "0000000010.ckpt").exists()
    assert (ran.folder / "finished").read_text().split() == ["10"]
