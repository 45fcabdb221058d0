# SPDX-License-Identifier: BSD-3-Clause
"""A pass over a loader: how it ends before and after the end of the run."""

import pytest

from paceline.run.worker.pass_iterator import LoaderEnded, PassEnded, PassIterator


def test_batches_come_in_order():
    assert list(PassIterator(iter([1, 2, 3]), StopIteration, int)) == [1, 2, 3]


@pytest.mark.parametrize("kind", [StopIteration, PassEnded, LoaderEnded])
def test_pass_says_how_it_ends(kind):
    values = PassIterator(iter([1]), kind, int)
    assert next(values) == 1
    with pytest.raises(StopIteration) as end:
        next(values)
    assert type(end.value) is kind


def test_for_loop_ends_with_the_run():
    seen = list(PassIterator(iter(()), LoaderEnded, int))
    assert seen == []


def test_pass_that_is_left_is_closed():
    closed = []

    def values():
        try:
            yield from range(3)
        finally:
            closed.append(True)

    for value in PassIterator(values(), StopIteration, int):
        if value == 1:
            break
    assert closed == [True]


def test_pass_has_the_length_of_its_loader():
    assert len(PassIterator(iter([1, 2]), StopIteration, lambda: 7)) == 7


def test_text_names_the_remedy():
    assert "run.finished" in str(LoaderEnded())
    assert "loop over the loader with `for`" in str(PassEnded())
