# SPDX-License-Identifier: BSD-3-Clause
"""The result of a run as plain files that torch alone can load."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.files import DISK, Disk, atomic_write
from paceline.run.tensors.layout import TrainingState
from paceline.run.tensors.shard import Shard

__all__ = ["write_weights"]


@torch.no_grad()
def write_weights(
    folder: Path, models: Sequence[nn.Module], shard: Shard, disk: Disk = DISK
) -> None:
    """Write the `state_dict` of each model, and of its moving average if there is one.

    One model is weights.pt, several are weights-0.pt and so on. Raises OSError, and anything that
    a script's model raises.
    """
    state, views, average = shard.state, shard.newest.views, shard.average
    for own, values in ((state.buffers, views.buffers), (state.counters, views.counters)):
        for buffer, value in zip(own, values, strict=True):
            buffer.data = value
    for number, model in enumerate(models):
        name = "weights" if len(models) == 1 else f"weights-{number}"
        _write(folder / f"{name}.pt", model, disk)
        if average is not None:
            with _Averaged(state, average):
                _write(folder / f"{name}-averaged.pt", model, disk)


class _Averaged:
    """Context in which the parameters hold their moving average."""

    def __init__(self, state: TrainingState, average: list[list[Tensor]]) -> None:
        self._pairs = [
            (parameter, parameter.data, mean)
            for own, means in zip(state.parameters, average, strict=True)
            for parameter, mean in zip(own, means, strict=True)
        ]

    def __enter__(self) -> None:
        for parameter, _, mean in self._pairs:
            parameter.data = mean.to(parameter.dtype)

    def __exit__(self, *error: object) -> None:
        for parameter, before, _ in self._pairs:
            parameter.data = before


def _write(path: Path, model: nn.Module, disk: Disk) -> None:
    try:
        with atomic_write(path, disk=disk) as file:
            torch.save(model.state_dict(), file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # torch's writer replaces it
            # Neither raise it again nor name it: a cycle would keep all frames, and so the slots
            # of workers, until the garbage is collected.
            raise OSError(error.__context__.errno, error.__context__.strerror) from None
        raise
