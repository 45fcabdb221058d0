# SPDX-License-Identifier: BSD-3-Clause
"""A pass over a loader: how it ends before and after the end of the run."""

from collections.abc import Callable, Iterable
from itertools import islice

import pytest

from paceline.run.worker.pass_iterator import LoaderEnded, PassEnded, PassIterator


def a_pass(values: Iterable[int], end: Callable[[], StopIteration], plain_length=0):
    """Return a pass with these values, and with the same ones in each epoch after it."""
    return PassIterator(lambda: iter(values), end, lambda: 7, lambda: plain_length)


def test_batches_come_in_order():
    assert list(a_pass([1, 2, 3], StopIteration)) == [1, 2, 3]


@pytest.mark.parametrize("kind", [StopIteration, PassEnded, LoaderEnded])
def test_pass_says_how_it_ends(kind):
    values = a_pass([1], kind)
    assert next(values) == 1
    with pytest.raises(StopIteration) as end:
        next(values)
    assert type(end.value) is kind


def test_for_loop_ends_with_the_run():
    seen = list(a_pass((), LoaderEnded))
    assert seen == []


def test_pass_that_is_left_is_closed():
    closed = []

    def values():
        try:
            yield from range(3)
        finally:
            closed.append(True)

    for value in PassIterator(values, StopIteration, int, int):
        if value == 1:
            break
    assert closed == [True]


def test_pass_has_the_length_of_its_loader():
    assert len(a_pass([1, 2], StopIteration)) == 7


def test_next_goes_on_in_the_next_epoch_until_the_plain_loader_would_end():
    values = a_pass([1, 2], PassEnded, plain_length=5)
    assert [next(values) for _ in range(5)] == [1, 2, 1, 2, 1]
    values = a_pass([1, 2], PassEnded, plain_length=4)
    for _ in range(4):
        next(values)
    with pytest.raises(PassEnded):
        next(values)


def test_next_skips_epochs_that_the_worker_has_missed():
    epochs = [[], [], [1], []]
    values = PassIterator(lambda: iter(epochs.pop(0)), PassEnded, int, lambda: 5)
    assert next(values) == 1
    assert epochs == [[]]


def test_next_does_not_go_on_after_the_run():
    values = a_pass([1], LoaderEnded, plain_length=5)
    next(values)
    with pytest.raises(LoaderEnded):
        next(values)


@pytest.mark.parametrize("wrap", [iter, enumerate, lambda values: islice(values, 9)])
def test_loops_end_with_the_epoch(wrap):
    seen = 0
    for _ in wrap(a_pass([1, 2], PassEnded, plain_length=5)):
        seen += 1
    assert seen == 2
    assert len(list(a_pass([1, 2], PassEnded, plain_length=5))) == 2


def test_next_goes_on_wherever_it_is_called():
    values = a_pass([(1, 2)], PassEnded, plain_length=200)
    for _ in range(60):  # many times, because Python specializes code that is hot
        first, second = next(values)
        assert (first, second) == (1, 2)
        assert "ä" + str(next(
            values
        )) == "ä(1, 2)"  # fmt: skip # an expression on several lines


def test_script_with_its_own_answer_to_the_end_of_a_pass_gets_it():
    values = a_pass([1, 2], PassEnded, plain_length=5)
    seen = []
    while (value := next(values, None)) is not None:
        seen.append(value)
    assert seen == [1, 2]
    values = a_pass([1, 2], PassEnded, plain_length=5)
    try:
        while True:
            seen.append(next(values))
    except StopIteration:
        seen.append(0)
    assert seen == [1, 2, 1, 2, 0]


def test_text_names_the_remedy():
    assert "run.finished" in str(LoaderEnded())
    assert "loop over the loader with `for`" in str(PassEnded())
