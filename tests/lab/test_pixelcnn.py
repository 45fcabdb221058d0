# SPDX-License-Identifier: BSD-3-Clause
"""The PixelCNN experiment: its problem, its time, and which way its effects go."""

from math import isnan

import pytest
import torch

from faults import check_misfortune
from paceline.lab.experiments.pixelcnn import PIXELCNN, RULES, seconds_to_serial, updates_within
from paceline.lab.experiments.settings import picked
from paceline.lab.problem import Draw
from paceline.lab.problems.pixels import Pixels


@pytest.fixture(scope="module")
def tables(cifar10, quick):
    """Of the quick version; without the data all are skipped that need it."""
    del cifar10
    return PIXELCNN.measure(quick)


def last(tables, label):
    return picked(tables["final"], "bits", rule=label)[0]


def test_backups_learn_more_than_one_machine_in_the_same_time(tables):
    assert last(tables, "7+1") < last(tables, "serial") - 0.1


def test_backups_learn_more_than_as_many_asynchronous_machines(tables):
    assert last(tables, "7+1") < last(tables, "async 8") - 0.1


def test_every_rule_has_the_same_time_and_its_own_staleness(tables):
    seconds = picked(tables["final"], "seconds")
    assert max(seconds) < 1.05 * min(seconds)
    assert picked(tables["final"], "staleness", rule="7+1") == [0]
    assert 6 < picked(tables["final"], "staleness", rule="async 8")[0] < 8


def test_figure_and_paragraph_come_from_the_tables(tables):
    assert len(PIXELCNN.draw(tables).axes) == 2
    text = PIXELCNN.tell(tables)
    assert f"7+1 {last(tables, '7+1'):.2f}" in text
    assert "async 16" not in text
    check_misfortune(PIXELCNN, tables)


def test_time_is_counted_in_updates_that_fit_into_it():
    one, many = (updates_within(100.0, RULES[label], 0) for label in ("serial", "async 16"))
    assert 50 < one < 65
    assert many == pytest.approx(16 * one, rel=0.05)


def test_the_time_to_serial_is_that_to_its_mean_end():
    curves = [
        {"rule": rule, "seed": seed, "seconds": seconds, "bits": bits + seed}
        for rule, all_bits in {"serial": (8, 7, 6), "good": (8, 6, 4), "bad": (8, 8, 8)}.items()
        for seed in (0, 1)
        for seconds, bits in zip((0, 10, 20), all_bits, strict=True)
    ]
    assert seconds_to_serial({"curves": curves}, "good") == [7.5, 12.5]
    assert all(isnan(time) for time in seconds_to_serial({"curves": curves}, "bad"))


@pytest.fixture
def small(cifar10, data_folder, data_cache):
    del cifar10
    return Pixels(batch=2, data=data_folder, cache=data_cache, side=4, width=4, layers=2, scored=7)


def test_the_middle_of_an_image_is_what_the_model_sees(small):
    images = torch.arange(32 * 32).view(1, 1, 32, 32)
    assert small.middle(images)[0, 0, 0].tolist() == [14 * 32 + column for column in range(14, 18)]
    assert small.middle(images).shape == (1, 1, 4, 4)


def test_mini_batches_have_the_same_losses_alone_and_together(small):
    model = small.build()
    draws = [Draw(0, 0), Draw(3, 1), Draw(1, 7)]
    alone = torch.cat([small.losses(model, [draw]) for draw in draws])
    assert torch.allclose(small.losses(model, draws), alone, atol=1e-4)
    assert len(set(alone.tolist())) == 3


def test_bits_are_the_mean_over_the_images_that_are_looked_at(small, monkeypatch):
    model = small.build()
    with torch.no_grad():
        at_once = small.evaluate(model)["bits"]
        monkeypatch.setattr("paceline.lab.problems.pixels.SCORED_AT_ONCE", 3)
        assert small.evaluate(model)["bits"] == pytest.approx(at_once)
