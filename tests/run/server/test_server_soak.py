# SPDX-License-Identifier: BSD-3-Clause
"""Neither memory nor open descriptors grow during a long run.

Worker 0 asks the OS about itself and the server, worker 1 about itself.
"""

import pytest

from failures import HELPERS

STEPS = 10_000
GROWN_MAX = 2_500_000  # bytes; a leak of 300 bytes per update would be more, noise is below 1 MB
BUFFERS_MAX = 4  # workers plus two; a worker may see one of them late

SOURCE = """
import ctypes
import gc

# The OS may fill gaps in our memory with large pages at any time; not here.
PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0

def usage(pid):
    gc.collect()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))

weight = nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1e-3, momentum=0.9)
run = paceline.join()
optimizer = run.prepare(optimizer)
pids = {"server": server_pid(), "worker": os.getpid()} if run.is_first else {"worker": os.getpid()}
early = late = None
while not run.finished:
    if early is None and run.version >= 1000:  # it has been saved a few times by then
        early = {name: usage(pid) for name, pid in pids.items()}
    if late is None and run.version >= STEPS - 100:  # not at the very end: it is saved then
        late = {name: usage(pid) for name, pid in pids.items()}
    optimizer.zero_grad()
    (weight - 1).square().backward()
    run.log(weight=float(weight))
    optimizer.step()
keep(run, early=early, late=late)
"""


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_memory_and_descriptors_do_not_grow_with_the_updates(launch, policy):
    source = HELPERS + SOURCE.replace("STEPS", str(STEPS))
    ran = launch(source, workers=2, steps=STEPS, policy=policy, checkpoint_every="200")
    assert ran.code == 0, ran.err
    assert ran.kept[0]["late"].keys() == {"server", "worker"}
    for kept in ran.kept.values():
        for name, (late_bytes, late_fds) in kept["late"].items():
            early_bytes, early_fds = kept["early"][name]
            assert late_bytes - early_bytes < GROWN_MAX
            assert late_fds <= early_fds + BUFFERS_MAX
