# SPDX-License-Identifier: BSD-3-Clause
"""Which batches a gradient was computed on."""

import pytest
import torch
from torch import nn

from paceline.core.events import Fate
from paceline.leases import Use
from paceline.run.worker.batches import Batch, Batches


def test_gradient_counts_the_samples_of_all_its_batches():
    batches = Batches(2)
    assert batches.samples(0) == 1  # no loader was used
    for samples in (4, 3):
        batches.take(0, Batch("x", samples))
        batches.touch(0)
        batches.touch(0)  # once per parameter
    assert batches.samples(0) == 7


def test_batch_that_the_script_has_kept_counts_like_the_last_one():
    """As `itertools.cycle(loader)`, which keeps the batches of the first pass."""
    batches = Batches(1)
    batches.take(0, Batch("x", 4))
    batches.touch(0)
    batches.settle(0, Fate.ACCEPTED)
    batches.touch(0)
    assert (batches.samples(0), batches.new_samples(0)) == (4, 0)  # computed on it again
    batches.settle(0, Fate.ACCEPTED)
    batches.forget_latest(0)
    batches.touch(0)
    assert (batches.samples(0), batches.new_samples(0), batches.uses(0)) == (4, 4, ())


def test_gradient_of_an_empty_batch_counts_as_one_sample():
    """Weights of an update must add up to more than zero."""
    batches = Batches(1)
    batches.take(0, Batch("x", 0))
    batches.touch(0)
    assert batches.samples(0) == 1


def test_of_two_streams_the_one_with_more_samples_counts():
    """They may hold parts of the same samples, such as images and captions."""
    batches = Batches(1)
    for stream, samples in ((0, 4), (1, 6)):
        batches.take(stream, Batch("x", samples))
    batches.touch(0)
    assert batches.samples(0) == 6


def test_discarded_gradient_does_not_count():
    batches, batch = Batches(1), Batch("x", 4)
    batches.take(0, batch)
    batches.touch(0)
    assert batches.is_pending(batch)
    batches.discard(0)
    assert not batches.is_pending(batch)
    assert batches.uses(0) == ()


def test_gradient_set_by_the_script_belongs_to_the_newest_batch():
    batches = Batches(1)
    batches.take(0, Batch("x", 4))
    batches.hand_in(0)
    assert batches.samples(0) == 4


def test_skipped_backward_pass_belongs_to_all_optimizers():
    batches = Batches(2)
    batches.take(0, Batch("x", 4))
    batches.touch_all()
    assert [batches.samples(0), batches.samples(1)] == [4, 4]


# ------------------------------------------------------------------------------------- their fates


@pytest.mark.parametrize("fate", Fate)
def test_batch_knows_the_fate_of_its_gradient(fate):
    batches, batch = Batches(1), Batch("x", 4)
    batches.take(0, batch)
    batches.touch(0)
    batches.settle(0, fate)
    assert batch.is_used
    assert batch.is_accepted == (fate is Fate.ACCEPTED)
    assert batch.is_dropped == (fate not in (Fate.ACCEPTED, Fate.NON_FINITE))
    assert not batches.is_pending(batch)


def test_samples_are_new_until_a_gradient_on_them_is_accepted():
    """A GAN computes two gradients on each batch."""
    batches = Batches(2)
    batches.take(0, Batch("x", 4, number=7))
    batches.touch(0)
    assert batches.new_samples(0) == 4
    batches.settle(0, Fate.ACCEPTED)
    batches.touch(1)
    assert (batches.samples(1), batches.new_samples(1)) == (4, 0)
    assert batches.uses(1) == (Use(0, (7,)),)


def test_gradient_without_a_batch_counts_as_one_new_sample():
    assert Batches(1).new_samples(0) == 1


def test_batches_of_a_step_are_no_longer_the_latest_after_the_next_one_is_fetched():
    batches = Batches(1)
    batches.take(0, Batch("x", 4, number=0))
    batches.take(1, Batch("y", 9, number=0))
    batches.touch(0)
    batches.settle(0, Fate.ACCEPTED)
    batches.take(0, Batch("x", 4, number=1))
    batches.touch(0)
    assert batches.uses(0) == (Use(0, (1,)),)


# -------------------------------------------------------------------------------------- their uses


def test_uses_name_the_batches_of_each_stream():
    batches = Batches(1)
    for number in (3, 5):
        batches.take(0, Batch("x", 4, number=number))
        batches.take(1, Batch("x", 2, position=(0, number)))
        batches.touch(0)
    assert batches.uses(0) == (Use(0, (3, 5)), Use(1, (), 4))
    batches.settle(0, Fate.LATE)
    assert batches.uses(0) == ()


def test_own_batch_that_was_accepted_before_counts_no_more_samples():
    batches = Batches(2)
    batches.take(0, Batch("x", 4, position=(0, 0)))
    batches.touch(0)
    batches.settle(0, Fate.ACCEPTED)
    batches.touch(1)
    assert batches.uses(1) == (Use(0),)


def test_batch_whose_lease_is_void_is_not_named():
    batches = Batches(1)
    pending, latest = Batch("x", 4, number=3), Batch("x", 4, number=4)
    batches.take(0, pending)
    batches.touch(0)
    batches.take(0, latest)
    batches.forget_numbers()
    batches.touch(0)
    assert (pending.number, latest.number) == (None, None)
    assert batches.uses(0) == (Use(0),)
    assert batches.samples(0) == 8


# -------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_batch_of_an_evaluation_does_not_belong_to_the_next_gradient(mode):
    model = nn.Linear(1, 1)
    batches = Batches(1, [model])
    if mode == "eval":
        model.eval()
        batches.take(1, Batch("x", 100))
        model.train()
    else:
        with torch.no_grad():
            batches.take(1, Batch("x", 100))
    batches.take(0, Batch("x", 4))
    batches.touch(0)
    assert batches.samples(0) == 4


def test_latest_batch_of_a_stream_can_be_forgotten():
    batches = Batches(1)
    batches.take(1, Batch("x", 100))
    batches.forget_latest(1)
    batches.forget_latest(0)  # it has none
    batches.take(0, Batch("x", 4))
    batches.touch(0)
    assert batches.samples(0) == 4


def test_batches_know_whether_a_training_pass_is_open():
    batches = Batches(1)
    assert (batches.has_loader, batches.has_begun, batches.is_in_pass) == (False, False, False)
    with batches.training_pass():
        with batches.training_pass():
            assert batches.is_in_pass
        assert batches.is_in_pass
    assert (batches.has_begun, batches.is_in_pass) == (True, False)


def test_run_trains_if_any_model_does():
    one, other = nn.Linear(1, 1), nn.Linear(1, 1).eval()
    assert Batches(1).is_training()
    assert Batches(1, [one, other]).is_training()
    assert not Batches(1, [other]).is_training()
