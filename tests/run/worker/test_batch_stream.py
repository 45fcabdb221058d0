# SPDX-License-Identifier: BSD-3-Clause
"""Passes over a stream, without processes: when they begin and end, and what becomes of batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from leased_workers import FakeRun
from message_examples import unhurried
from paceline.core.events import Fate
from paceline.run.worker import batch_stream
from paceline.run.worker.extra_steps import LoopEnded

DROPPED = [Fate.LATE, Fate.STALE, Fate.CANCELLED, Fate.DUPLICATE]


class Counting(IterableDataset):
    """Has no length."""

    def __init__(self, size=6):
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def alone(loader, **options):
    """Return a run of one worker, and the worker."""
    run = FakeRun([loader], **options)
    return run, run.workers[0]


def shuffled(size=24, batch=4, **options):
    return DataLoader(range(size), batch, shuffle=True, **options)


def flat(batches):
    return [int(x) for batch in batches for x in torch.as_tensor(batch).flatten()]


# ---------------------------------------------------------------------------- the end of a pass


@pytest.mark.parametrize("loader", [shuffled(), DataLoader(range(24), 4), list(range(24))])
def test_pass_ends_with_the_epoch_and_has_every_sample_once(loader):
    run, worker = alone(loader)
    for epoch in range(3):
        [found] = worker.train()
        assert sorted(flat(found)) == list(range(24))
        assert run.epoch == epoch + 1


def test_workers_share_the_batches_of_an_epoch():
    run = FakeRun([shuffled()], workers=3)
    passes = [iter(worker.stream) for worker in run.workers]
    found = []
    for _ in range(2):
        for worker, batches in zip(run.workers, passes, strict=True):
            found.append(next(batches))
            worker.step()
    assert sorted(flat(found)) == list(range(24))
    assert run.epoch == 1
    run.workers[0].receive()  # they learn it with their next turns
    run.workers[1].receive()
    assert [list(batches) for batches in passes] == [[], [], []]


def test_fast_worker_computes_on_more_of_an_epoch():
    run = FakeRun([list(range(6))], workers=2)
    fast, slow = run.workers
    assert slow.next() == 1
    assert fast.train() == [[0, 2, 3, 4, 5, 6 % 6]]
    assert run.epoch == 1
    slow.step()  # batch 1 counts in the next epoch
    with pytest.raises(StopIteration):
        slow.next()
    assert fast.train() == [[1, 3, 4, 5, 0]]  # slow holds batch 2
    assert run.epoch == 2


def test_worker_that_has_missed_an_epoch_gets_an_empty_pass():
    run = FakeRun([list(range(4))], workers=2)
    fast, slow = run.workers
    slow.next()
    fast.train(3)
    assert run.epoch == 3
    slow.step(Fate.LATE)
    with pytest.raises(StopIteration):
        slow.next()
    assert [list(slow.stream), list(slow.stream)] == [[], []]
    assert len(slow.train()[0]) > 0, "the fourth pass is that of the current epoch"
    assert run.epoch == 4


def test_restarted_worker_gets_empty_passes_up_to_the_epoch_of_the_run():
    run = FakeRun([list(range(4))], workers=2)
    run.workers[0].train(3)
    run.book.release(0)
    new = FakeRun([list(range(4))]).workers[0]
    new.run, new.streams = run, new.streams
    new.leases.forget()
    new.receive([1])
    assert [len(found) for found in new.train(5)][:3] == [0, 0, 0]
    assert run.epoch == 5


def test_stream_ends_when_the_run_is_over():
    run, worker = alone([1, 2, 3])
    worker.next()
    worker.step()
    run.is_over = True
    with pytest.raises(StopIteration):
        worker.next()
    assert list(worker.stream) == []


def test_batch_that_arrives_after_the_epoch_has_ended_belongs_to_the_next_pass():
    run = FakeRun([list(range(4))], workers=2)
    one, other = run.workers
    assert one.next() == 0
    one.step()
    one.leases._queues[0].clear()  # so that it has to ask
    run.book.release(0)
    other.train()
    with pytest.raises(StopIteration):
        one.next()
    assert one.asked == 1
    held = [number for number, holder in run.book._streams[0].leased.items() if holder == 0]
    assert held
    assert one.next() == held[0] % 4


@pytest.mark.parametrize(("shares", "length"), [(1, 6), (2, 3), (4, 2)])
def test_length_is_a_share_of_the_epoch(shares, length):
    run = FakeRun([shuffled()], workers=4, shares=shares)
    assert [len(worker.stream) for worker in run.workers] == [length] * 4


def test_end_of_a_training_pass_says_what_to_do_if_it_is_not_expected():
    worker = alone([1, 2])[1]
    worker.train()
    batches = iter(worker.stream)
    for _ in range(2):
        next(batches)
        worker.step()
    with pytest.raises(StopIteration, match="begin a new pass"):
        next(batches)


def test_endless_loop_after_the_end_of_the_run_ends_the_script(monkeypatch, capsys):
    run, worker = alone([1, 2])
    worker.train()
    run.is_over = True
    for _ in range(3):
        assert list(worker.stream) == []
    monkeypatch.setattr(batch_stream, "AFTER_END_S", 0.0)
    with pytest.raises(LoopEnded):
        list(worker.stream)
    assert "leave the loop when run.finished is true" in capsys.readouterr().err


def test_loader_that_was_only_evaluated_on_is_not_empty_after_the_end():
    run, worker = alone([1, 2])
    run.is_over = True
    assert list(worker.stream) == [1, 2]


@pytest.mark.parametrize("loader", [[], iter([])])
def test_stream_of_an_empty_loader_ends(loader):
    assert alone(loader)[1].train(2) == [[], []]


def test_stream_of_a_generator_ends_when_the_generator_does():
    assert alone(iter([1, 2]))[1].train(2) == [[1, 2], []]


def test_pass_over_a_loader_without_a_length_is_the_loaders_own():
    worker = alone(DataLoader(Counting(), 4))[1]
    assert [flat(found) for found in worker.train(2)] == [list(range(6))] * 2


# ----------------------------------------------------------------------------- leaving a pass


@pytest.mark.parametrize("loader", [shuffled(), list(range(24)), DataLoader(Counting(24), 4)])
def test_next_iter_yields_a_batch_whenever_the_script_asks(loader):
    run, worker = alone(loader)
    found = []
    for _ in range(30):
        found.append(next(iter(worker.stream)))
        worker.step()
    if not isinstance(loader, list) and isinstance(loader.dataset, Counting):
        assert found[0].tolist() == found[1].tolist(), "a new pass over its own loader"
        return
    seen = flat(found)
    assert len(seen) == run.done
    for epoch in range(len(seen) // 24):
        assert sorted(seen[epoch * 24 : epoch * 24 + 24]) == list(range(24))


def test_pass_after_one_that_the_script_has_left_is_a_whole_epoch():
    run, worker = alone(shuffled())
    first = []
    for value in worker.stream:
        first.append(value)
        worker.step()
        if len(first) == 2:
            break
    [second] = worker.train()
    assert len(second) == 6
    assert sorted(flat([*first, *second[:4]])) == list(range(24)), "in the shared order"
    assert run.done == 8 + 24
    assert [len(found) for found in worker.train(2)] == [6, 6]


@pytest.mark.parametrize("most", [1, 4, 5])
def test_script_may_limit_its_passes(most):
    """`if i == most: break` gives as many batches in each pass."""
    run, worker = alone(shuffled(), workers=2)
    counts = []
    for _ in range(7):
        counts.append(0)
        for _ in worker.stream:
            worker.step()
            counts[-1] += 1
            if counts[-1] == most:
                break
    assert counts == [most] * 7
    assert run.done == 7 * most * 4


@pytest.mark.parametrize("processes", [0, 2])
def test_batch_that_was_only_looked_at_comes_again(processes):
    options = {"num_workers": processes, "multiprocessing_context": "fork"} if processes else {}
    run, worker = alone(shuffled(**options))
    peeked = [next(iter(worker.stream)).tolist() for _ in range(3)]
    assert peeked[0] == peeked[1] == peeked[2]
    [found] = worker.train()
    assert found[0].tolist() == peeked[0]
    assert sorted(flat(found)) == list(range(24))
    assert run.done == 24


def test_batch_that_was_fetched_last_but_not_used_comes_again():
    run, worker = alone(list(range(8)))
    for value in worker.stream:
        if value == 3:
            break
        worker.step()
    assert worker.train() == [[3, 4, 5, 6, 7, 0, 1, 2]]
    assert run.done == 3 + 8


def test_another_pass_inside_a_pass_loses_nothing():
    run, worker = alone(list(range(8)))
    found = []
    for value in worker.stream:
        found.append(value)
        worker.step()
        found.append(next(iter(worker.stream)))
        worker.step()
    assert found[:8] == list(range(8))
    assert run.done == len(found)


@pytest.mark.parametrize("held", [True, False])
def test_worker_that_leaves_its_passes_does_not_collect_leases(held):
    loader = shuffled(num_workers=1, multiprocessing_context="fork")
    run, worker = alone(loader)
    kept = []
    for _ in range(8):
        batches = iter(worker.stream)
        next(batches)
        worker.step()
        if held and not kept:
            kept.append(batches)
        del batches
    assert len(run.book._streams[0].leased) <= 2 * 3


# --------------------------------------------------------------------------- dropped batches


@pytest.mark.parametrize("fate", DROPPED)
def test_dropped_batch_comes_again_before_any_new_one(fate):
    run = FakeRun([list(range(4))], workers=2)
    one, other = run.workers
    assert (one.next(), other.next()) == (0, 1)
    one.step(fate)  # it holds batch 2 already
    assert one.next() == 2
    assert one.returned == [((0,), False)]
    other.step()
    assert other.next() == 0


@pytest.mark.parametrize("fate", DROPPED)
def test_dropped_batch_of_the_workers_own_order_comes_again_before_any_new_one(fate):
    worker = alone(DataLoader(Counting(), 2))[1]
    assert worker.next().tolist() == [0, 1]
    worker.step(fate)
    assert worker.next().tolist() == [0, 1]
    worker.step()
    assert worker.next().tolist() == [2, 3]


@pytest.mark.parametrize(
    ("requeue", "fate"), [(False, Fate.LATE), (True, Fate.NON_FINITE)], ids=["no requeue", "inf"]
)
def test_batch_is_not_repeated_if_it_need_not_be(requeue, fate):
    run, worker = alone([1, 2, 3], requeue=requeue)
    assert worker.next() == 1
    worker.step(fate)
    assert worker.next() == 2
    assert worker.returned == [((0,), True)]
    worker.step()
    worker.next()
    worker.step()
    assert run.epoch == 1, "it counts as done"


def test_batch_that_the_script_passes_over_counts_as_done():
    run, worker = alone(list(range(6)))
    for value in worker.stream:
        if value != 3:
            worker.step()
    assert worker.returned == [((3,), True)]
    assert run.epoch == 1


def test_accumulated_gradient_settles_all_its_batches():
    run, worker = alone(list(range(6)))
    for _ in range(2):
        worker.next()
        worker.batches.touch(0)
    assert worker.returned == []
    worker.step(Fate.LATE)
    assert worker.next() == 2
    assert worker.returned == [((0, 1), False)]
    worker.batches.touch(0)
    found = worker.next()
    worker.step()
    assert (found, run.done) == (3, 2)
    assert [worker.next() for _ in range(2)] == [0, 1]


def test_gradient_that_the_script_discards_counts_its_batch_as_done():
    run, worker = alone(list(range(3)))
    worker.next()
    worker.batches.touch(0)
    worker.batches.discard(0)
    worker.next()
    assert worker.returned == [((0,), True)]
    assert run.done == 1


@pytest.mark.parametrize("fates", [(Fate.ACCEPTED, Fate.LATE), (Fate.LATE, Fate.ACCEPTED)])
def test_batch_of_two_optimizers_counts_once(fates):
    """As in a GAN: one of its two gradients may be late."""
    run, worker = alone(list(range(3)), optimizers=2)
    for _ in worker.stream:
        for optimizer, fate in enumerate(fates):
            worker.step(fate, optimizer)
    assert (run.done, run.epoch, worker.returned) == (3, 1, [])


@unhurried
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([Fate.ACCEPTED, *DROPPED])), max_size=60),
    st.integers(1, 7),
)
def test_every_batch_is_accepted_once(turns, size):
    run = FakeRun([list(range(size))], workers=3)
    accepted = []
    for number, fate in turns:
        worker = run.workers[number]
        value = None
        while value is None:
            try:
                value = worker.next()
            except StopIteration:  # the next pass, or an empty one
                assert run.epoch > 0
        worker.step(fate)
        accepted += [value] if fate is Fate.ACCEPTED else []
    assert run.done == len(accepted)
    _, following, undone = run.book.plain()[0]
    expected = sorted(number % size for number in set(range(following)) - set(undone))
    assert sorted(accepted) == expected


# ------------------------------------------------------------------------------- lost leases


@pytest.mark.parametrize("processes", [0, 2])
def test_worker_that_lost_its_leases_loads_only_what_it_gets_anew(processes):
    options = {"num_workers": processes, "multiprocessing_context": "fork"} if processes else {}
    run = FakeRun([DataLoader(range(24), 2, **options)], workers=2)
    stopped, other = run.workers
    stopped.next()
    stopped.park()
    found = [other.next() for _ in range(1)]
    other.step()
    stopped.batches.touch(0)
    stopped.wake()  # its gradient was on a batch that it no longer holds
    assert stopped.batches.uses(0)[0].numbers == ()
    stopped.batches.settle(0, Fate.LATE)
    for _ in range(4):
        for worker in (stopped, other):
            found.append(worker.next())
            worker.step()
    assert stopped.returned == []
    assert len(set(flat(found))) == len(flat(found)) == run.done
    for worker in run.workers:
        worker.leave()


# -------------------------------------------------------------------------------- evaluation


def test_pass_without_gradients_is_a_plain_pass():
    run, worker = alone(shuffled())
    worker.next()
    worker.step()
    with torch.no_grad():
        assert len(flat(list(worker.stream))) == 24
    assert run.done == 4


def test_pass_in_evaluation_mode_is_a_plain_pass():
    model = nn.Linear(1, 1).eval()
    run, worker = alone(DataLoader(range(24), 4), models=[model])
    assert flat(list(worker.stream)) == list(range(24))
    assert run.book.plain()[0][0] == 0
    model.train()
    assert len(worker.train()[0]) == 6
    assert run.epoch == 1


@pytest.mark.parametrize("size", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("kind", ["a list", "shuffled", "in order", "its own", "its own sampler"])
def test_validation_in_training_mode_is_a_whole_plain_pass(size, kind):
    """A script may forget `model.eval()` and `no_grad`."""
    loader = {
        "a list": list(range(size)),
        "shuffled": DataLoader(range(size), 1, shuffle=True),
        "in order": DataLoader(range(size), 1),
        "its own": DataLoader(Counting(size), 1),
        "its own sampler": DataLoader(range(size), 1, sampler=SubsetRandomSampler(range(size))),
    }[kind]
    run = FakeRun([list(range(4)), loader], workers=2)
    for worker in run.workers:
        for epoch in range(2):
            if worker.number == 0:
                assert run.epoch == epoch
            for _ in worker.stream:
                worker.step()
            for _ in range(2):
                assert sorted(flat(list(worker.streams[1]))) == list(range(size))
    assert run.book.done[1] == 0


def test_pass_over_the_training_data_before_the_training_loses_nothing():
    """As for the mean of the data."""
    run, worker = alone(shuffled())
    assert sorted(flat(list(worker.stream))) == list(range(24))
    assert run.done == 0
    assert sorted(flat(worker.train()[0])) == list(range(24))
    assert (run.done, run.epoch) == (24, 1)


@pytest.mark.parametrize("loader", [shuffled(), list(range(6)), DataLoader(range(24), 4)])
def test_evaluation_in_training_mode_after_an_epoch_ends(loader):
    """As for the accuracy on the training data, or `len(list(loader))`."""
    run, worker = alone(loader)
    for epoch in range(3):
        assert len(worker.train()[0]) == 6
        assert run.epoch == epoch + 1
        for _ in range(2):
            assert len(list(worker.stream)) == 6
        assert run.epoch == epoch + 1


def test_evaluation_in_training_mode_ends_while_others_train():
    run = FakeRun([list(range(12))], workers=2)
    one, other = run.workers
    assert len(one.train()[0]) == 12
    assert sorted(one.stream) == list(range(12))
    assert len(other.train(2)[1]) > 0
    assert len(one.train()[0]) > 0


def test_script_that_skips_batches_at_first_trains_on_the_others():
    """As one that continues in the middle of an epoch."""
    run, worker = alone(shuffled(size=48))
    passes = [0, 0]
    for epoch in range(2):
        for number, _ in enumerate(worker.stream):
            if epoch or number >= 6:
                worker.step()
                passes[epoch] += 1
    assert run.epoch == 2
    assert passes == [12 - 4 + 1, 12]  # four were skipped, and one was not from the order


def test_script_that_fetches_several_batches_before_it_computes_gets_whole_epochs():
    run, worker = alone(list(range(32)))
    for _ in range(3):
        batches = iter(worker.stream)
        while fetched := [value for value, _ in zip(batches, range(8), strict=False)]:
            worker.step()
            assert len(fetched) <= 8
    assert run.epoch == 3


def test_training_in_evaluation_mode_has_epochs():
    """As with frozen batch norm."""
    model = nn.Linear(1, 1).eval()
    run, worker = alone(shuffled(), models=[model])
    assert [len(found) for found in worker.train(3)] == [7, 6, 6]  # one was not from the order
    assert run.epoch == 3
    with torch.no_grad():
        assert len(list(worker.stream)) == 6
    assert run.epoch == 3


def test_gradient_in_an_evaluation_is_no_training():
    """As for adversarial examples, which need the gradients of the inputs."""
    model = nn.Linear(1, 1).eval()
    run, worker = alone(shuffled(), models=[model])
    found = []
    for batch in worker.stream:
        found.append(batch)
        worker.batches.touch(0)
    assert sorted(flat(found)) == list(range(24))
    assert run.epoch == 0


# ------------------------------------------------------------------------------ the rest


def test_script_may_compute_on_a_batch_again_that_another_worker_has():
    """As `itertools.cycle(loader)`, which keeps the batches of the first pass."""
    run = FakeRun([list(range(4))], workers=2)
    one, other = run.workers
    assert one.next() == 0
    one.step(Fate.LATE)
    other.train()
    one.receive()
    with pytest.raises(StopIteration):
        one.next()
    assert one.returned == [((0,), False)]
    one.batches.touch(0)
    assert (one.batches.uses(0), one.batches.new_samples(0)) == ((), 1)
    one.step()


def test_two_streams_end_independently():
    run = FakeRun([list(range(3)), list(range(5))])
    [worker] = run.workers
    pairs = []
    for pair in zip(*worker.streams, strict=False):
        pairs.append(pair)
        worker.step()
    assert pairs == [(0, 0), (1, 1), (2, 2)]
    for pair in zip(*worker.streams, strict=False):
        pairs.append(pair)
        worker.step()
    assert pairs[3:] == [(0, 3), (1, 4), (2, 0)]
    assert run.book.done == (6, 6)


def test_stream_has_the_attributes_of_its_loader():
    worker = alone(DataLoader(range(10), batch_size=4))[1]
    assert (len(worker.stream), worker.stream.batch_size) == (3, 4)
    with pytest.raises(AttributeError):
        _ = worker.stream.nonsense


@pytest.mark.parametrize(("workers", "length"), [(1, 6), (2, 3), (4, 2), (7, 1)])
def test_length_is_the_share_of_one_worker(workers, length):
    run = FakeRun([shuffled()], workers)
    assert {len(worker.stream) for worker in run.workers} == {length}


def test_length_of_a_loader_for_evaluation_is_that_of_all_batches():
    model = nn.Linear(1, 1)
    run = FakeRun([shuffled(), DataLoader(range(24), 4)], workers=3, models=[model])
    worker = run.workers[0]
    training, validation = worker.streams
    assert [len(training), len(validation)] == [2, 2], "nothing is known yet"
    worker.train()
    model.eval()
    assert [len(training), len(validation)] == [2, 6]
    with torch.no_grad():
        assert len(list(validation)) == 6
    model.train()
    assert [len(training), len(validation)] == [2, 6]


def test_iterator_has_the_length_of_its_loader():
    worker = FakeRun([shuffled()], workers=3).workers[0]
    assert len(iter(worker.stream)) == len(worker.stream) == 2


def test_length_of_a_loader_without_epochs_is_unknown():
    stream = alone(DataLoader(Counting(), 2))[1].stream
    for values in (stream, iter(stream)):
        with pytest.raises(TypeError):
            len(values)
    assert len(list(stream)) == 3


def test_training_pass_lasts_until_its_loop_ends():
    worker = alone([1, 2, 3])[1]
    batches = worker.batches
    assert (batches.has_loader, batches.has_begun, batches.is_in_pass) == (True, False, False)
    with torch.no_grad():
        for _ in worker.stream:
            assert not batches.is_in_pass
    assert not batches.has_begun
    for _ in worker.stream:
        assert batches.is_in_pass
        worker.step()
    assert (batches.has_begun, batches.is_in_pass) == (True, False)
    for _ in worker.stream:
        break
    assert not batches.is_in_pass
