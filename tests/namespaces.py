# SPDX-License-Identifier: BSD-3-Clause
"""Network namespaces that belong to a process: their names, their programs and their removal.

A name contains the pid of its owner. So pytest workers that run at the same time don't collide, and
what a killed process left behind is recognized and removed.

Every change is made by the programs `ip`, `tc` and `nft`, which must run as root.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

__all__ = [
    "enter",
    "entered",
    "ip",
    "ip_json",
    "name_of",
    "names_of",
    "nft",
    "nft_json",
    "remove",
    "remove_leftovers",
    "tc",
    "why_unavailable",
]

CLONE_NEWNET = 0x40000000
PREFIX = "paceline"
NAMES = Path("/run/netns")
PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}  # and their Debian packages
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def name_of(serial: int, role: str) -> str:
    """Return the name of a namespace of this process."""
    return f"{PREFIX}-{os.getpid()}-{serial}-{role}"


def names_of(pid: int) -> list[str]:
    """Return the namespaces that belong to this process."""
    return sorted(path.name for path in NAMES.glob(f"{PREFIX}-{pid}-*"))


def ip(*lines: str, namespace: str | None = None) -> None:
    """Run commands of `ip`, all in one process: `ip("link set lo up", namespace=name)`."""
    inside = ["-netns", namespace] if namespace else []
    _call([_find("ip"), *inside, "-batch", "-"], "\n".join(lines))


def ip_json(words: str, namespace: str) -> Any:
    """Return what a command of `ip` shows."""
    return json.loads(_call([_find("ip"), "-netns", namespace, "-json", *words.split()]))


def tc(words: str, namespace: str) -> None:
    """Run a command of `tc`."""
    _call([_find("tc"), "-netns", namespace, *words.split()])


def nft(rules: str, namespace: str) -> None:
    """Run commands of `nft`."""
    _call(enter(namespace, [_find("nft"), "-f", "-"]), rules)


def nft_json(words: str, namespace: str) -> list[dict[str, Any]]:
    """Return the objects that a command of `nft` shows."""
    command = enter(namespace, [_find("nft"), "--json", *words.split()])
    return list(json.loads(_call(command))["nftables"])


def enter(namespace: str, command: Sequence[Any]) -> list[str]:
    """Return the command that runs a command in a namespace.

    `ip` replaces itself with the command, so the pid stays the same.
    """
    return [_find("ip"), "netns", "exec", namespace, *map(str, command)]


@contextmanager
def entered(namespace: str) -> Iterator[None]:
    """Move this thread into a namespace, and back at the end."""
    with open("/proc/thread-self/ns/net", "rb") as home, open(NAMES / namespace, "rb") as there:
        _set_namespace(there.fileno())
        try:
            yield
        finally:
            _set_namespace(home.fileno())


def remove(names: Sequence[str]) -> None:
    """Kill every process in these namespaces and delete them.

    A namespace that has gone already is fine: another process may be removing the same leftovers.
    """
    while pids := list(_processes_in(names)):  # they may be starting others
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for name in names:
        command = [_find("ip"), "netns", "delete", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if (NAMES / name).exists():
            raise RuntimeError(f"can't delete network namespace {name}: {done.stderr.strip()}")


def remove_leftovers() -> list[str]:
    """Remove the namespaces of processes that no longer exist, and return their names."""
    owners = {path.name: path.name.split("-")[1] for path in NAMES.glob(f"{PREFIX}-*-*-*")}
    names = sorted(name for name, pid in owners.items() if not Path("/proc", pid).exists())
    remove(names)
    return names


@cache
def why_unavailable() -> str | None:
    """Return why this process can't create namespaces, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = sorted({package for name, package in PROGRAMS.items() if not _find_or_none(name)})
    if missing:
        return f"network namespaces need the Debian packages {' and '.join(missing)}"
    name = name_of(0, "trial")
    try:
        ip(f"netns add {name}")
        ip("link add trial0 type veth peer name trial1", namespace=name)
        ip("link add trial2 type bridge", namespace=name)
        tc("qdisc add dev trial0 root tbf rate 1mbit burst 65536 limit 65536", namespace=name)
        nft("add table bridge trial; add table netdev trial", namespace=name)
    except RuntimeError as problem:
        return f"this system doesn't permit network namespaces: {problem}"
    finally:
        if (NAMES / name).exists():
            remove([name])
    return None


def _processes_in(names: Sequence[str]) -> Iterator[int]:
    inodes = set()
    for name in names:
        with suppress(OSError):
            inodes.add((NAMES / name).stat().st_ino)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just exited
            is_inside = (process / "ns" / "net").stat().st_ino in inodes
            if is_inside and int(process.name) != os.getpid():
                yield int(process.name)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns needs Python 3.12
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "can't enter the network namespace")


def _call(command: Sequence[str], stdin: str | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        what = stdin or " ".join(command)
        raise RuntimeError(f"{done.stderr.strip()} (while running: {what})")
    return done.stdout


def _find_or_none(program: str) -> str | None:
    return shutil.which(program, path=PATH)


@cache
def _find(program: str) -> str:
    path = _find_or_none(program)
    if path is None:
        raise RuntimeError(f"{program} is missing; install {PROGRAMS[program]}")
    return path
