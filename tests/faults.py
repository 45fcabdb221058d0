# SPDX-License-Identifier: BSD-3-Clause
"""Tables of an experiment in which a second seed has failed."""

from math import nan

SCORES = {"accuracy", "bits", "error_percent", "megabytes", "others", "reserved", "score"}
TO_A_TARGET = {"epochs", "product_s", "seconds", "updates"}
WITH_A_TARGET = {"direct", "large", "majority", "mild", "race", "small", "updates"}


def with_failed_seed(tables):
    """Return the tables with another seed, which diverged and never reached a target."""
    return {name: rows + _failed_rows(name, rows) for name, rows in tables.items()}


def check_failed_seed(experiment, tables):
    """Check that figure and paragraph can be made, and that the paragraph mentions the failure."""
    failed = with_failed_seed(tables)
    assert experiment.draw(failed).axes
    assert "(only 1 of 2)" in experiment.describe(failed)


def _failed_rows(name, rows):
    own = [row for row in rows if row.get("seed") == 0]
    if name == "curves":  # a diverged training has only its first row
        begins = {tuple(v for v in row.values() if isinstance(v, str)): row for row in own[::-1]}
        return [row | {"seed": 1} for row in begins.values()]
    lost = SCORES | (TO_A_TARGET if name in WITH_A_TARGET else set())
    return [{k: nan if k in lost else v for k, v in row.items()} | {"seed": 1} for row in own]
