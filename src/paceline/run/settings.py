# SPDX-License-Identifier: BSD-3-Clause
"""What a real run is told beside its `RunSpec`, and the file that tells it to the server."""

from math import inf
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.core.policies import parse_policy
from paceline.errors import SpecError
from paceline.files import written_whole
from paceline.latency import parse_latency
from paceline.run.tensors.state_spec import LARGEST
from paceline.spec import RunSpec, parse_seconds

__all__ = ["Every", "Settings", "parse_every"]


class Every(NamedTuple):
    """How often something is done."""

    updates: float = inf
    seconds: float = inf


def parse_every(text: str) -> Every:
    """Read a number of updates ("100") or a duration ("60s"); "0" means never."""
    what = "how often a checkpoint is made"
    try:
        if text.strip().isdecimal():
            return Every(updates=int(text) or inf)
        return Every(seconds=parse_seconds(text, what) or inf)
    except ValueError:  # also of a number with thousands of digits
        raise SpecError(
            f"{what} must be a number of updates or a duration such as 60s, got {text!r}"
        ) from None


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a run is told; nothing of it changes while it lasts."""

    spec: RunSpec
    policy: str = "sync"

    samples: int | None = None
    """The run ends when so many samples have come into updates."""

    epochs: float | None = None
    """The run ends when so many times the data set has come into updates."""

    ema: float | None = None
    """The server keeps a moving average of the weights: old x ema + new x (1 - ema)."""

    clip_norm: float | None = None
    """The averaged gradient of an update is clipped to this norm."""

    slow: str = ""
    """A latency: each gradient takes at least as long as it says."""

    requeue: bool = True
    """Whether a worker gets the batch again whose gradient was dropped."""

    checkpoint_every: str = "60s"
    """How often the run is saved: a number of updates, or a duration; "0": never."""

    patience_s: float = 60.0
    """A run that has paused for so long ends."""

    restart: bool = True
    """Whether who dies is started again."""

    progress: bool = True
    """Whether the server says every few seconds how it gets on."""

    script: str = ""
    """The path of the script, for whoever resumes the run."""

    arguments: tuple[str, ...] = ()
    """What the script is given."""

    folder: str = ""
    """That the script works in, which its relative paths begin at; "": where it is started."""

    def __post_init__(self) -> None:
        parse_policy(self.policy).validate(self.spec)
        if self.slow:
            parse_latency(self.slow).validate(self.spec)
        if self.spec.seed > LARGEST:
            raise SpecError(f"seed must be at most {LARGEST} to travel, got {self.spec.seed}")
        if self.samples is not None and self.samples < 1:
            raise SpecError(f"samples must be >= 1, got {self.samples}")
        if self.epochs is not None and not 0 < self.epochs < inf:
            raise SpecError(f"epochs must be > 0 and finite, got {self.epochs}")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise SpecError(f"ema must be between 0 and 1, got {self.ema}; 0.9999 is usual")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise SpecError(f"clip_norm must be > 0, got {self.clip_norm}")
        if not 0 <= self.patience_s < inf:
            raise SpecError(f"patience must be >= 0 and finite, got {self.patience_s}")
        parse_every(self.checkpoint_every)

    def write(self, path: Path) -> None:
        """Write it for the server, and for people; raises SpecError if that cannot be."""
        try:
            with written_whole(path) as partial:
                body = msgspec.json.format(msgspec.json.encode(self), indent=2)
                partial.write_bytes(body + b"\n")
        except OSError as error:
            raise SpecError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def read(cls, path: Path) -> "Settings":
        """Read what `write` wrote; raises SpecError that names the file."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise SpecError(f"cannot read {path}: {error.strerror}") from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SpecError(f"{path}: {error}") from None
