# SPDX-License-Identifier: BSD-3-Clause
"""What the authors of the scripts in `tests/scripts` meant.

Each script prints facts about its training as a line of JSON at its end: how many epochs,
validations, scheduler steps and checkpoints it made, and how good the model is. A function below
checks the facts of the script of its name. They must hold without Paceline, alone, and in a run.

Scripts save to a fixed path, in every worker. Under rules that don't keep the workers in step, the
best weights in that file may be those of another worker, and almost as good.

Limits on the quality are plain numbers. Under such rules, what a worker measures before its first
step isn't a baseline: the others may have trained the model already.
"""

import json
from collections.abc import Callable, Iterable
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

__all__ = ["MEANT", "SCRIPTS", "WITH_EQUAL_EPOCHS", "facts_in", "measured_twice"]

Facts = dict[str, Any]

SCRIPTS = Path(__file__).parent / "scripts"

WITH_EQUAL_EPOCHS = frozenset(
    {"image_classification", "vae", "dcgan", "wgan", "siamese", "fine_tuning"}
)
"""Scripts with a prepared loader and a fixed number of epochs: every worker counts the same."""


def facts_in(output: Iterable[str]) -> Facts | None:
    """Return the facts among the lines that a script printed; None if it printed none."""
    found = [line for line in output if line.startswith("{")]
    return json.loads(found[-1]) if found else None


def measured_twice(facts: Facts) -> str | None:
    """Return what the script measured at its end and, as "before", at its beginning, if it did."""
    if "before" not in facts:
        return None
    [quality] = facts.keys() & {"loss", "distance", "reward"}
    return quality


def image_classification(facts: Facts) -> None:
    assert facts["epochs"] == facts["validations"] == facts["scheduler_steps"] == 6
    assert facts["rates"][0] == 0.1
    assert facts["rates"] == sorted(facts["rates"], reverse=True)
    assert facts["lr"] == 0.0125
    assert 1 <= facts["checkpoints"] <= 6
    assert facts["best"] >= facts["accuracy"] > 0.85


def vae(facts: Facts) -> None:
    assert facts["epochs"] == facts["validations"] == facts["checkpoints"] == 6
    assert facts["test_batches"] == 16
    assert facts["loss"] < 27


def _is_best(facts: Facts) -> bool:
    """Return whether the weights that the script loaded at its end are as good as its best."""
    return bool(facts["loss_of_best"] < 1.3 * facts["best_loss"])


def word_rnn(facts: Facts) -> None:
    assert facts["epochs"] == facts["validations"] == 5
    assert facts["batches"] == [50] * 5
    assert 1 <= facts["checkpoints"] <= 5
    assert _is_best(facts)
    assert facts["perplexity"] < 4.5


def char_transformer(facts: Facts) -> None:
    assert facts["iterations"] == 161
    assert facts["validations"] == 5
    assert 1 <= facts["checkpoints"] <= 4
    assert isclose(facts["lr"], 1e-3)
    assert facts["loss"] < 1.95


def trainer_class(facts: Facts) -> None:
    assert facts["iterations"] == 150
    assert facts["validations"] == 3
    assert 1 <= facts["checkpoints"] <= 3
    assert facts["accuracy"] > 0.6


def dcgan(facts: Facts) -> None:
    assert facts["epochs"] == facts["validations"] == 4
    assert facts["checkpoints"] == 8
    assert facts["distance"] < 3.5


def wgan(facts: Facts) -> None:
    assert facts["epochs"] == facts["validations"] == 12
    assert facts["checkpoints"] == 1
    assert facts["generator_steps"] >= 12  # at least one in each epoch
    assert facts["largest_weight"] <= 0.1 + 1e-6
    assert facts["distance"] < 0.9


def siamese(facts: Facts) -> None:
    assert facts["epochs"] == facts["validations"] == facts["scheduler_steps"] == 6
    assert isclose(facts["lr"], 0.8**6)
    assert facts["checkpoints"] == 1
    assert facts["accuracy"] > 0.8


def reinforce(facts: Facts) -> None:
    assert facts["episodes"] < 3000  # it was solved
    assert facts["checkpoints"] == 1
    assert facts["reward"] > 0.7


def actor_critic(facts: Facts) -> None:
    assert facts["episodes"] == 250
    assert facts["checkpoints"] == 1
    assert facts["reward"] > 0.7


def graph(facts: Facts) -> None:
    assert facts["epochs"] == 120
    assert facts["validations"] == 6
    assert facts["checkpoints"] == 1
    assert facts["accuracy"] > 0.8


def fine_tuning(facts: Facts) -> None:
    assert facts["epochs"] == facts["validations"] == facts["checkpoints"] == 4
    assert abs(facts["scheduler_steps"] - facts["max_train_steps"]) <= 6
    assert facts["lr"] < 0.02 * 8e-3  # the cosine has come to its end
    assert facts["accuracy"] > 0.75


def early_stopping(facts: Facts) -> None:
    assert facts["stopped_early"]
    assert facts["epochs"] == facts["validations"] == facts["best_epoch"] + 4 < 200
    assert 1 <= facts["checkpoints"] <= facts["best_epoch"]
    assert _is_best(facts)
    assert facts["loss"] < 0.4


def plateau(facts: Facts) -> None:
    assert facts["epochs"] == facts["validations"] == facts["checkpoints"]
    assert facts["rates"] == _plateau_rates(facts["val_losses"])
    assert facts["epochs"] == 40 or facts["rates"][-1] < 0.0002
    assert facts["accuracy"] > 0.85


def _plateau_rates(losses: list[float]) -> list[float]:
    """Return the learning rate that each epoch should have had, from the losses before it."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.2, patience=1)
    rates = []
    for loss in losses:
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(loss)
    return rates


MEANT: dict[str, Callable[[Facts], None]] = {
    check.__name__: check
    for check in (
        *(image_classification, vae, word_rnn, char_transformer, trainer_class, dcgan, wgan),
        *(siamese, reinforce, actor_critic, graph, fine_tuning, early_stopping, plateau),
    )
}
"""The check of each script, by the script's name."""
