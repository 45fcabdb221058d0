# SPDX-License-Identifier: BSD-3-Clause
"""The tensors of a run with several servers, as the head sees them.

The head has a part itself. Whatever it does to that, it has the other servers do to theirs, in the
same order. So all servers make each update of the same gradients, and what the whole run needs,
such as the norm of an update, is put together here.

At the beginning and after a restart, the other servers get their parts from the head: either from
the script's own tensors or from a checkpoint. So it doesn't matter what their scripts have made.
"""

import copy
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.events import ApplyUpdate
from paceline.run.net import server_messages as to_servers
from paceline.run.server.other_servers import OtherServers
from paceline.run.tensors.group_options import all_options
from paceline.run.tensors.layout import TrainingState
from paceline.run.tensors.optimizer_states import load_checked, load_exactly
from paceline.run.tensors.part_tensors import dense, take_part
from paceline.run.tensors.shard import Shard, infinite_ones
from paceline.run.tensors.state_parts import merge_shard_state, split_shard_state
from paceline.run.tensors.sums import SlotGradient, combined
from paceline.run.tensors.version_buffers import BufferStore, ParameterBuffer

__all__ = ["HeadShard"]


class HeadShard(Shard):
    """The tensors of a run, on the head and on the other servers."""

    def __init__(
        self,
        state: TrainingState,
        schedulers: Iterable[LRScheduler],
        store: BufferStore,
        others: OtherServers,
    ) -> None:
        """`state`: everything that the run trains. `store`: memory for the head's part."""
        self._whole = state
        self._others = others
        self._parts = others.parts
        whole = dense(state)
        begin = {
            "parameters": whole,
            "average": whole if others.welcome.ema is not None else None,
            "optimizers": [optimizer.state_dict() for optimizer in state.optimizers],
        }
        first, *self._unsent = split_shard_state(begin, state.spec, self._parts)
        infinite = infinite_ones(whole)
        super().__init__(
            take_part(state, self._parts[0]),
            schedulers,
            store,
            versions_kept=others.welcome.versions_kept,
            ema=others.welcome.ema,
            apart=others.welcome.is_apart,
        )
        self._infinite = infinite
        for index, optimizer in enumerate(state.optimizers):  # some have a state from the beginning
            if self._parts[0].slices[index] is not None:
                load_exactly(optimizer, self.state.parameters[index], first["optimizers"][index])
        self._options_known = self.first_options  # to the other servers
        self._gathered: dict[str, Any] | None = None  # everything, as it is now

    @property
    def whole(self) -> TrainingState:
        """What the run trains."""
        return self._whole

    def send_parts(self) -> None:
        """Give the other servers their parts, once all of them are there."""
        for number, part in enumerate(self._unsent, start=1):
            self._others.send_state(number, to_servers.LoadPart(self.version), part, "parameters")
        self._unsent.clear()
        self._options_known = all_options(self.state.optimizers)

    # --------------------------------------------------------------------------------- versions

    def add_reader(
        self, worker: int, version: int, optimizer: int | None = None
    ) -> ParameterBuffer:
        """Return the head's buffer of a version; it stays unchanged until `remove_reader`."""
        self._others.broadcast(to_servers.AddReader(worker, version, optimizer))
        return super().add_reader(worker, version, optimizer)

    def remove_reader(self, worker: int, optimizer: int | None = None) -> None:
        """Note that the worker no longer computes with any version."""
        self._others.broadcast(to_servers.RemoveReader(worker, optimizer))
        super().remove_reader(worker, optimizer)

    # ---------------------------------------------------------------------------------- updates

    def add(self, update: int, gradient: SlotGradient) -> None:
        """Keep an accepted gradient for an update."""
        optimizer = gradient.optimizer
        self._others.broadcast(
            to_servers.AddPart(
                update,
                gradient.worker,
                optimizer,
                gradient.samples,
                gradient.scale,
                tuple(sorted(gradient.unused)),
                gradient.host,
                gradient.slot is None,
            )
        )
        unused = self._parts[0].unused(optimizer, gradient.unused)
        super().add(update, gradient._replace(unused=unused))

    def sum_early(self, update: int, limit: float) -> None:
        """Add the gradients of workers below `limit` to the sum of an update that isn't due."""
        if update in self._pending:
            self._others.broadcast(to_servers.SumEarly(update, limit))
        super().sum_early(update, limit)

    def release_slot(self, worker: int) -> None:
        """Add what is still in a worker's slots to its sums, because the slots are needed."""
        self._others.broadcast(to_servers.ReleaseSlot(worker))
        super().release_slot(worker)

    def reduce(self, decided: ApplyUpdate) -> float:
        """Average the contributions with the decided weights; return the squared norm."""
        contributions = decided.contributions
        self._others.broadcast(
            to_servers.ReducePart(
                decided.update,
                tuple([one.worker for one in contributions]),
                tuple([one.samples for one in contributions]),
                decided.weights,
                decided.scales,
            )
        )
        own = self.measure(decided)
        others = self._others.answers(to_servers.PartReduced)
        return combined([own, *(one.squares for one in others)])

    def step(self, update: int, scale: float = 1.0) -> None:
        """Step the optimizers along the reduced gradient, times `scale`."""
        options = all_options(self.state.optimizers)  # schedulers may change them in this step
        changed = tuple([one for one in options if one not in self._options_known])
        self._others.broadcast(to_servers.StepUpdate(update, scale, changed))
        self._options_known = options
        self._gathered = None
        super().step(update, scale)

    def skip(self, update: int) -> None:
        """Make a new version without a step, and forget the gradients."""
        self._others.broadcast(to_servers.SkipUpdate(update))
        self._gathered = None
        super().skip(update)

    def workers_to_blame(self, update: int) -> list[int]:
        """Return the contributors whose gradients aren't finite, because their average isn't."""
        self._others.broadcast(to_servers.FindBlame(update))
        found = set(super().workers_to_blame(update))
        others = self._others.answers(to_servers.Blamed)
        return sorted(found.union(*(one.workers for one in others)))

    # ------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next update depends on, from all servers."""
        own = super().state_dict()
        if self._gathered is None:
            others = self._unsent or self._others.collect()  # as they begin, or as they are now
            parts = [self.part_dict(), *others]
            self._gathered = merge_shard_state(parts, self._whole.spec, self._parts)
        # Options may have changed since then.
        pairs = zip(self._gathered["optimizers"], own["optimizers"], strict=True)
        optimizers = [{**all_, "param_groups": now["param_groups"]} for all_, now in pairs]
        contents = msgspec.to_builtins(self._whole.spec)
        return {**own, **self._gathered, "contents": contents, "optimizers": optimizers}

    def _load(self, version: int, saved: dict[str, Any]) -> None:
        first, *self._unsent = split_shard_state(saved, self._whole.spec, self._parts)
        self._gathered = None
        super()._load(version, first)

    def averages(self) -> list[list[Tensor]] | None:
        """Return the moving average of the weights; None if the run keeps none."""
        found: list[list[Tensor]] | None = self.state_dict()["average"]
        return found

    def optimizer_state(self, index: int) -> dict[str, Any]:
        """Return the state of an optimizer; raises ProtocolError if there is no such optimizer."""
        self._optimizer(index)
        found: dict[str, Any] = self.state_dict()["optimizers"][index]
        return found

    def load_optimizer_state(self, index: int, state: Any) -> None:
        """Load a worker's state of an optimizer; raises ProtocolError if it can't be used."""
        self._optimizer(index)
        if self._parts[0].slices[index] is None:  # the head has all of it
            super().load_optimizer_state(index, state)
            self._gathered = None
            return
        now = self.state_dict()
        checked = self._checked(index, now["optimizers"][index], state)
        everything = {**now, "optimizers": list(now["optimizers"])}
        everything["optimizers"][index] = checked
        parts = split_shard_state(everything, self._whole.spec, self._parts)
        for number, part in enumerate(parts[1:], start=1):
            own = part["optimizers"][index]
            if own is not None:
                message = to_servers.LoadOptimizerPart(index)
                self._others.send_state(number, message, own, "state of the optimizer")
        optimizer = self.state.optimizers[index]
        load_exactly(optimizer, self.state.parameters[index], parts[0]["optimizers"][index])
        self._gathered = None

    def _checked(self, index: int, now: dict[str, Any], state: Any) -> dict[str, Any]:
        """Return a state that an optimizer of the whole parameters has loaded."""
        specs = self._whole.spec.optimizers[index].parameters
        originals = self._whole.parameters[index]
        wholes = {
            id(parameter): torch.empty_strided(spec.shape, spec.stride, dtype=parameter.dtype)
            for spec, parameter in zip(specs, originals, strict=True)
        }
        stand_in = copy.copy(self._optimizer(index))
        stand_in.param_groups = [
            {**group, "params": [wholes[id(parameter)] for parameter in group["params"]]}
            for group in stand_in.param_groups
        ]
        stand_in.state = type(stand_in.state)(dict)
        stand_in.load_state_dict(now)
        names = [spec.name for spec in specs]
        load_checked(stand_in, dict(zip(names, wholes.values(), strict=True)), state)
        return stand_in.state_dict()
