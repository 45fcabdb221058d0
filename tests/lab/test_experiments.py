# SPDX-License-Identifier: BSD-3-Clause
"""Every experiment states its question and what the papers expect."""

from paceline.lab.experiments import EXPERIMENTS


def test_every_experiment_has_a_question_and_an_expectation():
    for name, experiment in EXPERIMENTS.items():
        assert name == experiment.name
        assert experiment.question.endswith("?")
        assert len(experiment.expected) > 40
