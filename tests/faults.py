# SPDX-License-Identifier: BSD-3-Clause
"""Tables of an experiment in which a second seed has come to nothing."""

from math import nan

SCORES = {"accuracy", "bits", "error_percent", "megabytes", "others", "reserved", "score"}
TO_A_TARGET = {"epochs", "product_s", "seconds", "updates"}
WITH_A_TARGET = {"direct", "large", "majority", "mild", "race", "small", "updates"}


def with_a_failure(tables):
    """The same with another seed, which diverged, and never came to a target."""
    return {name: rows + _failed(name, rows) for name, rows in tables.items()}


def check_misfortune(experiment, tables):
    """Figure and paragraph are made all the same, and say how many came to something."""
    unlucky = with_a_failure(tables)
    assert experiment.draw(unlucky).axes
    assert "(only 1 of 2)" in experiment.tell(unlucky)


def _failed(name, rows):
    own = [row for row in rows if row.get("seed") == 0]
    if name == "curves":  # of them there is only the beginning
        begins = {tuple(v for v in row.values() if isinstance(v, str)): row for row in own[::-1]}
        return [row | {"seed": 1} for row in begins.values()]
    lost = SCORES | (TO_A_TARGET if name in WITH_A_TARGET else set())
    return [{k: nan if k in lost else v for k, v in row.items()} | {"seed": 1} for row in own]
