# SPDX-License-Identifier: BSD-3-Clause
"""The experiment on delayed exchange: its clock, its problem, and which way its effects go."""

from math import isnan

import pytest
import torch

from faults import check_misfortune
from paceline.lab.experiments.delay import (
    DELAY,
    NOTHING,
    RULES,
    SUBJECTS,
    iterations_per_s,
    seconds_to,
)
from paceline.lab.experiments.settings import picked
from paceline.lab.problem import Draw
from paceline.lab.problems.tiny import Tiny, halved


@pytest.fixture(scope="module")
def tables(tiny_imagenet, quick):
    """Of the quick version; without the data all are skipped that need it."""
    del tiny_imagenet
    return DELAY.measure(quick)


# ------------------------------------------------------------------------------------- the clock


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=list(SUBJECTS))
def test_the_clock_is_that_of_the_paper_with_and_without_exchange(subject):
    for rule in (NOTHING, "sync"):
        assert iterations_per_s(subject, rule) == pytest.approx(subject.paper[rule], rel=0.02)


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=list(SUBJECTS))
def test_a_delay_hides_a_part_of_the_exchange(subject):
    rates = [iterations_per_s(subject, rule) for rule in (*RULES[1:], NOTHING)]
    assert all(rate > 1.1 * subject.paper["sync"] for rate in rates)
    assert max(rates) == rates[-1]


# ----------------------------------------------------------------------------------- the effects


def test_a_delay_makes_updates_faster_and_gradients_older(tables):
    sync, late = (
        [row for row in tables["final"] if row["rule"] == r] for r in ("sync", "delayed:3")
    )
    assert late[0]["updates"] == sync[0]["updates"]
    assert late[0]["seconds"] < 0.8 * sync[0]["seconds"]
    assert sync[0]["staleness"] == 0
    assert late[0]["staleness"] == pytest.approx(3, abs=0.1)


def test_after_as_many_updates_a_delay_has_learnt_less(tables):
    sync, late = (
        picked(tables["curves"], "loss", rule=rule, kind="same")[-1]
        for rule in ("sync", "delayed:3")
    )
    assert sync < late - 0.05


def test_figure_and_paragraph_come_from_the_tables(tables):
    assert len(DELAY.draw(tables).axes) == 3
    text = DELAY.tell(tables)
    assert "alexnet: iterations a second" in text
    assert "(22.6)" in text
    assert "googlenet" not in text
    check_misfortune(DELAY, tables)


# ------------------------------------------------------------------------------- from the tables


def made_up(late):
    """Tables in which `sync` comes to 0.4 in 40 s, and the delayed rule as it is given."""
    curves, final = [], []
    for kind in ("same", "own"):
        for rule, points in {"sync": ((0, 0), (20, 0.2), (40, 0.4)), "delayed:1": late}.items():
            about = {"model": "m", "kind": kind, "rule": rule, "rate": 0.1, "seed": 0}
            curves += [{**about, "updates": s, "seconds": s, "accuracy": a} for s, a in points]
            final.append({**about, "updates": 9, "accuracy": points[-1][1]})
    rates = [{"model": "m", "rule": "sync", "paper": 1.0, "simulated": 1.0}]
    return {"rates": rates, "tried": [], "final": final, "curves": curves}


def test_a_rule_that_is_later_at_half_of_the_accuracy_loses_early():
    tables = made_up(late=((0, 0), (25, 0.2), (30, 0.4)))
    assert seconds_to(tables, "m", "same", "sync", 0.5) == [20]
    assert seconds_to(tables, "m", "same", "delayed:1", 0.5) == [25]
    assert "lose to sync in time: yes, all." in DELAY.tell(tables)


def test_a_rule_that_is_there_first_does_not_lose_early():
    tables = made_up(late=((0, 0), (10, 0.2), (30, 0.3)))
    assert all(isnan(time) for time in seconds_to(tables, "m", "own", "delayed:1", 1.0))
    assert "lose to sync in time: no." in DELAY.tell(tables)


# ----------------------------------------------------------------------------------- the problem


def test_a_smaller_image_has_the_means_of_four_pixels():
    image = torch.tensor([[[[0, 1, 255, 255], [2, 4, 255, 255]]]], dtype=torch.uint8)
    assert halved(image).tolist() == [[[[2, 255]]]]
    assert halved(image).dtype == torch.uint8


@pytest.mark.parametrize("model", ["alexnet", "googlenet"])
def test_mini_batches_have_the_same_losses_alone_and_together(
    tiny_imagenet, data_folder, data_cache, model
):
    problem = Tiny(batch=2, data=data_folder, cache=data_cache, model=model, width=0.25)
    assert problem.samples == len(tiny_imagenet.train_y)
    net = problem.build()
    draws = [Draw(0, 0), Draw(3, 1), Draw(1, 7)]
    alone = torch.cat([problem.losses(net, [draw]) for draw in draws])
    assert torch.allclose(problem.losses(net, draws), alone, atol=1e-4)
    assert len(set(alone.tolist())) == 3
