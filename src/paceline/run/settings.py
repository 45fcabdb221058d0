# SPDX-License-Identifier: BSD-3-Clause
"""The settings of a real run: its `RunSpec`, everything else, and the file that holds them."""

from math import inf
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from paceline.core.policies import parse_policy
from paceline.core.policy import Policy
from paceline.core.policy_import import split_own
from paceline.errors import SpecError
from paceline.files import DISK, Disk, atomic_write
from paceline.latency import parse_latency
from paceline.run.tensors.state_spec import LARGEST
from paceline.spec import RunSpec, parse_seconds

__all__ = ["WORKERS_MAX", "Every", "Settings", "WireFormat", "parse_every"]

WORKERS_MAX = 1000  # each is a process of this machine, with a slot for its gradients

SERVERS_MAX = 100

WireFormat = Literal["exact", "bfloat16", "float16"]
"""How numbers in single and double precision travel over TCP: as they are, or rounded."""


class Every(NamedTuple):
    """How often to do something."""

    updates: float = inf
    seconds: float = inf


def parse_every(text: str) -> Every:
    """Parse a number of updates ("100") or a duration ("60s"); "0" means never."""
    text, what = text.strip(), "checkpoint_every"
    try:
        if text.isdecimal():
            return Every(updates=int(text) or inf)
        seconds = parse_seconds(text, what)
    except ValueError:  # also raised for a number with thousands of digits
        raise SpecError(
            f"{what} must be a number of updates or a duration such as 60s, got {text!r}"
        ) from None
    if not text.endswith(("s", "m", "h")):
        raise SpecError(
            f"{what} must be a whole number of updates, or a duration with a unit, got {text!r}; "
            f"for seconds, write {text}s"
        )
    return Every(seconds=seconds or inf)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a run, which don't change while it runs."""

    spec: RunSpec
    policy: str = "sync"

    epochs: float | None = None
    """Stop after this many epochs."""

    ema: float | None = None
    """Decay of the server's moving average of the weights: old x ema + new x (1 - ema)."""

    clip_norm: float | None = None
    """Clip the averaged gradient of each update to this norm."""

    latency: str = ""
    """An injected latency: each gradient takes at least this long."""

    requeue: bool = True
    """Whether a worker processes a batch again if its gradient was dropped."""

    checkpoint_every: str = "60s"
    """How often to save a checkpoint: a number of updates, or a duration; "0": never."""

    patience_s: float = 60.0
    """End the run after it has been paused for this long."""

    grace_s: float = 60.0
    """Kill workers that still run this long after the last update; worker 0 only if it is idle."""

    servers: int = 1
    """How many servers share the parameters."""

    transport: Literal["auto", "tcp"] = "auto"
    """How gradients and parameters move: shared memory where it is possible, or always TCP."""

    wire: WireFormat = "exact"
    """How gradients travel over TCP. Shared memory is always exact."""

    wire_parameters: WireFormat = "exact"
    """How parameters travel over TCP. Shared memory is always exact."""
    tls_cert: str = ""
    """The path of the server's TLS certificate; "": TCP connections aren't encrypted."""

    tls_key: str = ""
    """The path of its key."""

    tls_ca: str = ""
    """The path of the CA's certificate; "": the server's own certificate is what workers trust."""

    restart: bool = True
    """Whether processes that die are restarted."""

    output: Literal["first", "all"] = "first"
    """Whose standard output to show: that of the head and worker 0, or that of all processes."""

    progress: bool = True
    """Whether the server prints its progress every few seconds."""

    script: str = ""
    """The path of the script."""

    arguments: tuple[str, ...] = ()
    """The arguments of the script."""

    folder: str = ""
    """The working directory of the script; "": the current one."""

    def __post_init__(self) -> None:
        if self.spec.workers > WORKERS_MAX:
            raise SpecError(
                f"workers must be at most {WORKERS_MAX} in a run on one machine, got "
                f"{self.spec.workers}; to find out what more of them would do: paceline simulate"
            )
        self.parse_policy().validate(self.spec)
        if self.latency:
            parse_latency(self.latency).validate(self.spec)
        if self.spec.seed > LARGEST:
            raise SpecError(f"seed must be at most {LARGEST}, got {self.spec.seed}")
        if self.epochs is not None and not 0 < self.epochs < inf:
            raise SpecError(f"epochs must be > 0 and finite, got {self.epochs}")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise SpecError(f"ema must be between 0 and 1, got {self.ema}; 0.9999 is usual")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SpecError(f"clip_norm must be > 0, got {self.clip_norm}")
        if not 0 <= self.patience_s < inf:
            raise SpecError(f"patience must be >= 0 and finite, got {self.patience_s}")
        if not 0 < self.grace_s < inf:
            raise SpecError(f"grace must be > 0 and finite, got {self.grace_s}")
        parse_every(self.checkpoint_every)
        if not 1 <= self.servers <= SERVERS_MAX:
            raise SpecError(f"servers must be between 1 and {SERVERS_MAX}, got {self.servers}")
        self._check_tls()

    def _check_tls(self) -> None:
        if not (self.tls_cert or self.tls_key or self.tls_ca):
            return
        if not (self.tls_cert and self.tls_key):
            raise SpecError("TLS needs both --tls-cert and --tls-key")

    def parse_policy(self) -> Policy:
        """Return the rule; a user's own is searched next to the script, then in its folder."""
        own = split_own(self.policy)
        if own is not None and own[0] == Path(self.script).stem:
            raise SpecError(
                f"policy {self.policy!r} must be in a module of its own: importing it from "
                f"{self.script} would run the script"
            )
        return parse_policy(self.policy, (Path(self.script).parent, self.folder))

    def with_absolute_paths(self) -> "Settings":
        """Return settings with absolute paths; raise SpecError if a path doesn't exist."""
        script, folder = Path(self.script), Path(self.folder or ".")
        if not script.is_file():
            raise SpecError(f"there is no script {script}")
        if not folder.is_dir():
            raise SpecError(
                f"the script's working directory {folder} no longer exists; create it, or name the "
                "script and its arguments to run it in the current directory"
            )
        try:
            script, folder = script.resolve(), folder.resolve()
        except OSError as error:
            raise SpecError(f"cannot find the current directory: {error.strerror}") from None
        for text in (str(script), str(folder), *self.arguments):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise SpecError(f"a script and its arguments must be UTF-8, got {text!r}") from None
        files = {
            name: str(folder / path)
            for name in ("tls_cert", "tls_key", "tls_ca")
            if (path := getattr(self, name))
        }
        return msgspec.structs.replace(self, script=str(script), folder=str(folder), **files)

    def write(self, path: Path, disk: Disk = DISK) -> None:
        """Write the settings as JSON; raise SpecError if the file can't be written."""
        try:
            with atomic_write(path, disk=disk) as file:
                body = msgspec.json.format(msgspec.json.encode(self), indent=2)
                file.write(body + b"\n")
        except OSError as error:
            raise SpecError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> "Settings":
        """Read what `write` wrote; raise SpecError with the file's name if it is invalid."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise SpecError(f"cannot read {path}: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            hint = (
                "; the run was started with another release of Paceline, continue it with that one"
                if "unknown field" in str(error)
                else ""
            )
            raise SpecError(f"{path}: {error}{hint}") from None
