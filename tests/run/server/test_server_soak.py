# SPDX-License-Identifier: BSD-3-Clause
"""A long run ends with the memory and the open descriptors that it had when it was young.

Worker 0 reads what the system tells of itself and of the server, worker 1 of itself.
"""

import pytest

from failures import HELPERS

GROWN_MAX = 2_500_000  # bytes; a leak of 300 bytes an update would be more, noise is below 1 MB
PLACES_MAX = 4  # where versions may lie: workers plus two; a worker may see one of them late

SOURCE = """
import ctypes
import gc

# The system may fill the gaps in our memory with large pages, whenever it likes: not here.
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
young = old = None
while not run.finished:
    if young is None and run.version >= 1000:  # it has been saved some times by then
        young = {name: usage(pid) for name, pid in pids.items()}
    if old is None and run.version >= STEPS - 100:  # not when all is saved: that is done once
        old = {name: usage(pid) for name, pid in pids.items()}
    optimizer.zero_grad()
    (weight - 1).square().backward()
    run.log(weight=float(weight))
    optimizer.step()
keep(run, young=young, old=old)
"""


@pytest.mark.parametrize(("policy", "steps"), [("sync", 20_000), ("async", 10_000)])
def test_neither_memory_nor_descriptors_grow_with_the_updates(launch, policy, steps):
    source = HELPERS + SOURCE.replace("STEPS", str(steps))
    ran = launch(source, workers=2, steps=steps, policy=policy, checkpoint_every="200")
    assert ran.code == 0, ran.err
    assert ran.kept[0]["old"].keys() == {"server", "worker"}
    for kept in ran.kept.values():
        for name, (old_bytes, old_fds) in kept["old"].items():
            young_bytes, young_fds = kept["young"][name]
            assert old_bytes - young_bytes < GROWN_MAX
            assert old_fds <= young_fds + PLACES_MAX
