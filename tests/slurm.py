# SPDX-License-Identifier: BSD-3-Clause
"""A Slurm cluster of one node: the daemons of Debian's packages, in a network namespace.

It needs root, what `hosts` needs, and the packages slurmctld, slurmd, slurm-client and munge. They
are large, so `make test` doesn't install them: `apt-get install slurmctld slurmd slurm-client
munge`. All files are in one folder. On exit, the daemons are ended by their pids.
"""

import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from hosts import Hosts
from namespaces import why_unavailable

__all__ = ["SlurmCluster", "needs_slurm"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "nsenter")
PATIENCE_S = 60

CONFIGURATION = """
ClusterName=test
SlurmctldHost={name}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=600
NodeName={name} NodeAddr={address} CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
"""


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _why_no_slurm() -> str | None:
    missing = [program for program in PROGRAMS if _find(program) is None]
    if missing:
        return f"Slurm is not installed: there is no {missing[0]}; see tests/slurm.py"
    return why_unavailable()


_reason = _why_no_slurm()
needs_slurm = pytest.mark.skipif(_reason is not None, reason=_reason or "")
"""Skip tests where no Slurm cluster can be started, and say why."""


class SlurmCluster:
    """One node with eight processors, which need not exist."""

    def __init__(self, folder: Path) -> None:
        """`folder`: for the files of the daemons."""
        self.folder = folder
        self._daemons: list[subprocess.Popen[Any]] = []
        self._stack = ExitStack()
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> Self:
        hosts = self._stack.enter_context(Hosts(1))
        try:
            self._net = f"--net=/run/netns/{hosts.namespace(0)}"
            self._start(hosts.address(0))
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def call(self, *words: object, **options: Any) -> str:
        """Run a command of Slurm, which must succeed; return its output."""
        done = subprocess.run(
            self._inside(*words),
            env=self._environment | options.pop("env", {}),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S * 4,
            check=False,
            **options,
        )
        assert done.returncode == 0, done.stdout + done.stderr + self._logs()
        return done.stdout

    def _start(self, address: str) -> None:
        folder = self.folder
        for name in ("spool", "state"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(name=os.uname().nodename, address=address, folder=folder)
        )
        munge = {
            "socket": "munge.socket",
            "key-file": "munge.key",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }
        options = [f"--{option}={folder / name}" for option, name in munge.items()]
        self._daemon("munged", "--foreground", "--force", *options)
        self.wait_until("[ -S munge.socket ]")
        self._daemon("slurmctld", "-D", "-i")
        self._daemon("slurmd", "-D")
        self.wait_until('[ "$(sinfo --noheader --format=%T)" = idle ]')

    def _daemon(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.out").open("w") as out:
            program = subprocess.Popen(
                self._inside(name, *words), env=self._environment, stdout=out, stderr=out
            )
        self._daemons.append(program)

    def _inside(self, program: object, *words: object) -> list[str]:
        """Return the command that runs a program in the namespace.

        `ip netns exec` would hide the control groups, which slurmd needs.
        """
        found = _find(str(program))
        assert found is not None
        return [_find("nsenter") or "", self._net, found, *map(str, words)]

    def wait_until(self, condition: str, log: Path | None = None) -> None:
        """Wait until a condition of the shell is true; if it never is, show the log of a job."""
        loop = f"until {condition}; do sleep 0.1; done"
        words = self._inside("timeout", str(PATIENCE_S), "bash", "-c", loop)
        done = subprocess.run(
            words, cwd=self.folder, env=self._environment, capture_output=True, check=False
        )
        printed = log.read_text() if log is not None and log.exists() else ""
        assert done.returncode == 0, f"{condition}\n{self._logs()}{printed}"

    def _logs(self) -> str:
        return "".join(path.read_text()[-2000:] for path in self.folder.glob("slurm*.log"))

    def _close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._stack.close()  # kills what is left in the namespace
