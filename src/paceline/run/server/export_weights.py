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
    state, saved = shard.whole, shard.state_dict()
    for own, values in ((state.buffers, saved["buffers"]), (state.counters, saved["counters"])):
        for buffer, value in zip(own, values, strict=True):
            buffer.data = value
    for number, model in enumerate(models):
        name = "weights" if len(models) == 1 else f"weights-{number}"
        with _Holding(state, saved["parameters"]):
            _write(folder / f"{name}.pt", model, disk)
        if saved["average"] is not None:
            with _Holding(state, saved["average"]):
                _write(folder / f"{name}-averaged.pt", model, disk)


class _Holding:
    """Context in which the parameters hold these values; a server may have only a part of them."""

    def __init__(self, state: TrainingState, values: list[list[Tensor]]) -> None:
        self._triples = [
            (parameter, parameter.data, value)
            for own, others in zip(state.parameters, values, strict=True)
            for parameter, value in zip(own, others, strict=True)
        ]

    def __enter__(self) -> None:
        for parameter, _, value in self._triples:
            parameter.data = value.to(parameter.dtype)

    def __exit__(self, *error: object) -> None:
        for parameter, before, _ in self._triples:
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
