# SPDX-License-Identifier: BSD-3-Clause
"""Rows of tables: what came of a trial, at its end and on the way there."""

from collections.abc import Mapping

from paceline.lab.experiment import Rows
from paceline.lab.trial import Outcome

__all__ = ["curve_rows", "end_row"]

About = Mapping[str, float | str]
"""Columns that tell one trial of a table from another."""


def end_row(about: About, outcome: Outcome, **scores: str) -> dict[str, float | str]:
    """How a trial ended; `scores` are columns, and which score stands in each."""
    return {
        **about,
        "updates": outcome.updates,
        "seconds": outcome.seconds,
        "staleness": outcome.staleness,
        **{column: outcome.last(score) for column, score in scores.items()},
    }


def curve_rows(about: About, outcome: Outcome, **scores: str) -> Rows:
    """How it went until then, a row for each time that the model was evaluated."""
    return [
        {
            **about,
            "updates": row.update,
            "seconds": row.time,
            "epochs": row.epochs,
            **{column: row.scores[score] for column, score in scores.items()},
        }
        for row in outcome.rows
    ]
