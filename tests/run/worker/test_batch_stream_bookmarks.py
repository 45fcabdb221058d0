# SPDX-License-Identifier: BSD-3-Clause
"""A stream that moves to a bookmark hands out what would have followed it."""

from itertools import chain, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torch.utils.data import SubsetRandomSampler as Subset

from message_examples import unhurried
from paceline.core.events import Fate
from paceline.run.worker.batch_stream import Batches, BatchStream
from paceline.run.worker.position import Bookmark, Generators, PositionTracker
from paceline.run.worker.sampler import with_own_order

SIZE = 11
FATES = [Fate.ACCEPTED, Fate.ACCEPTED, Fate.LATE, Fate.STALE, Fate.NON_FINITE]


class Numbers(Dataset):
    """Records each sample that is loaded, and draws a random number for it."""

    def __init__(self, calls=None):
        self.calls = calls if calls is not None else []

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        self.calls.append(index)
        return torch.tensor([index, torch.rand(()).item()])


class NumberStream(IterableDataset):
    def __init__(self, calls=None):
        self.numbers = Numbers(calls)

    def __iter__(self):
        return (self.numbers[i] for i in range(SIZE))


OWN = {
    "shuffled": lambda calls=None: DataLoader(Numbers(calls), 3, shuffle=True),
    "in order": lambda calls=None: DataLoader(Numbers(calls), 4),
    "drop_last": lambda calls=None: DataLoader(Numbers(calls), 2, True, drop_last=True),
}
OTHERS = {
    "distributed": lambda calls=None: DataLoader(
        Numbers(calls), 2, sampler=DistributedSampler(range(SIZE), 2, 0, seed=3)
    ),
    "batches": lambda calls=None: DataLoader(Numbers(calls), batch_sampler=[[0, 1], [5], [2, 3]]),
    "iterable": lambda calls=None: DataLoader(NumberStream(calls), 2),
    "a list": lambda calls=None: [torch.tensor([[i, 0.0]]) for i in range(5)],
}
SEEDED = {  # its generator continues in the next loop, so a stream can't go back
    "seeded": lambda calls=None: DataLoader(
        Numbers(calls), 2, sampler=Subset(range(SIZE), torch.Generator().manual_seed(3))
    ),
}
LOADERS = {**OWN, **OTHERS, **SEEDED}


class Script:
    """A worker's script with one stream and one optimizer."""

    def __init__(self, loader, requeue=True):
        self.batches = Batches(1)
        own = with_own_order(loader, seed=5, worker=1, workers=3)
        self.stream = BatchStream(loader, own, 0, self.batches, lambda: False, requeue)
        self.loop = None
        self.generators = Generators()

    def next(self):
        if self.loop is None:
            self.loop = iter(self.stream)
        return next(self.loop).tolist()

    def step(self, fate):
        """Compute on the latest batch, push, receive this fate, and record the position."""
        self.batches.touch(0)
        self.batches.settle(0, fate)
        self.generators.read()

    def leave_the_loop(self):
        self.loop = None

    def train(self, fates):
        """Return the batches, one for each fate; at None the script leaves its loop."""
        found = []
        for fate in fates:
            if fate is None:
                self.leave_the_loop()
                continue
            found.append(self.next())
            self.step(fate)
        return found

    def follow(self, other):
        """Continue where the other script is, with its random numbers."""
        self.stream.move_to(other.stream.bookmark(), other.generators.remembered().restore)
        return self


def samples(found):
    return [int(number) for batch in found for number, _ in batch]


# --------------------------------------------------------------------------------- in a new process


def train_in_parts(kind, parts, requeue=True):
    """Return the batches of a run that is restarted after each part."""
    torch.manual_seed(0)
    script = Script(LOADERS[kind](), requeue)
    found = script.train(parts[0])
    for fates in parts[1:]:
        torch.rand(3)  # a script may draw numbers before it trains
        script = Script(LOADERS[kind](), requeue).follow(script)
        found += script.train(fates)
    return found


def parts_of(fates):
    return st.lists(st.lists(fates, min_size=1, max_size=9), min_size=2, max_size=4)


@settings(unhurried, max_examples=50)
@given(st.sampled_from([*LOADERS]), parts_of(st.sampled_from(FATES)), st.booleans())
def test_resumed_run_sees_the_same_samples_as_an_uninterrupted_one(kind, parts, requeue):
    """Batches to hand out again come first, whatever the fates were."""
    whole = train_in_parts(kind, [[*chain(*parts)]], requeue)
    assert samples(train_in_parts(kind, parts, requeue)) == samples(whole)


@settings(unhurried, max_examples=50)
@given(st.sampled_from([*LOADERS]), parts_of(st.sampled_from([Fate.ACCEPTED, Fate.NON_FINITE])))
def test_resumed_run_draws_the_same_random_numbers_for_its_batches(kind, parts):
    """Only if no batch comes again: loading it once more draws more numbers."""
    assert train_in_parts(kind, parts) == train_in_parts(kind, [[*chain(*parts)]])


@settings(unhurried, max_examples=30)
@given(st.data())
def test_resumed_script_may_leave_its_loop_and_begin_another(data):
    kind = data.draw(st.sampled_from([*OWN, *OTHERS]))
    # Without our own order, a batch that was dropped in one loop can't be found in the next.
    last = [None] if kind in OWN else [Fate.ACCEPTED, None]
    loops = data.draw(st.lists(parts_of(st.sampled_from(FATES)), min_size=2, max_size=3))
    parts = [[]]
    for number, loop in enumerate(loops):
        parts[-1] += [*(last if number else []), *loop[0]]
        parts += loop[1:]
    whole = train_in_parts(kind, [[*chain(*parts)]])
    assert samples(train_in_parts(kind, parts)) == samples(whole)


@pytest.mark.parametrize("kind", LOADERS)
def test_every_batch_is_accepted_once_and_in_order_across_restarts(kind):
    plain = Script(LOADERS[kind]()).train([Fate.ACCEPTED] * 12)
    script, accepted = Script(LOADERS[kind]()), []
    for fate in [Fate.LATE, Fate.ACCEPTED, Fate.LATE, Fate.LATE, Fate.ACCEPTED] * 6:
        [batch] = script.train([fate])
        accepted += [batch] if fate is Fate.ACCEPTED else []
        script = Script(LOADERS[kind]()).follow(script)
    assert samples(accepted) == samples(plain)


@pytest.mark.parametrize("kind", LOADERS)
def test_prefetched_batch_comes_again(kind):
    script = Script(LOADERS[kind]())
    script.train([Fate.ACCEPTED] * 2)
    script.next()
    script.batches.touch(0)
    ahead = script.next()
    script.batches.settle(0, Fate.LATE)
    bookmark = script.stream.bookmark()
    assert bookmark == Bookmark(0, 4, ((0, 2), (0, 3)))
    plain = Script(LOADERS[kind]()).train([Fate.ACCEPTED] * 6)
    follower = Script(LOADERS[kind]()).follow(script)
    found = follower.train([Fate.ACCEPTED] * 4)
    assert samples(found) == samples(plain[2:])
    assert samples([ahead]) == samples([found[1]])


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_of_a_pending_gradient_come_again(kind):
    """A gradient is accumulated over three batches, and the server is lost before the step."""
    script = Script(LOADERS[kind]())
    plain = script.train([Fate.ACCEPTED, Fate.LATE])
    waiting = []
    for _ in range(3):
        waiting.append(script.next())
        script.batches.touch(0)
    assert script.stream.bookmark() == Bookmark(0, 4, ((0, 1), (0, 2), (0, 3)))
    follower = Script(LOADERS[kind]()).follow(script)
    assert samples(follower.train([Fate.ACCEPTED] * 3)) == samples(waiting)
    assert samples(waiting[:1]) == samples(plain[1:])


def test_dropped_batch_is_not_lost_when_the_script_leaves_its_loop():
    script = Script(OWN["shuffled"]())
    script.stream.move_to(Bookmark(2, 7, ((0, 1), (2, 3), (1, 4))), lambda: None)
    first = script.train([Fate.ACCEPTED, None])
    assert script.stream.bookmark() == Bookmark(2, 7, ((2, 3), (1, 4)))
    again = script.train([Fate.LATE])
    assert script.stream.bookmark() == Bookmark(3, 0, ((2, 3), (1, 4)))
    order = with_own_order(OWN["shuffled"](), 5, 1, 3).batch_sampler.sampler
    batches = {loop: [*islice(order.in_loop(loop), 40)] for loop in (0, 1, 2)}
    found = samples([*first, *again, *script.train([Fate.ACCEPTED] * 2)])
    assert found == [*batches[0][3:6], *batches[2][9:12], *batches[2][9:12], *batches[1][12:15]]
    assert script.stream.bookmark() == Bookmark(3, 0)


def test_evaluation_does_not_move_the_bookmark():
    script = Script(OWN["shuffled"]())
    script.train([Fate.ACCEPTED] * 2 + [Fate.LATE])
    before = script.stream.bookmark()
    with torch.no_grad():
        assert len(list(script.stream)) == 4
        assert script.stream.bookmark() == before
    expected = samples(Script(OWN["shuffled"]()).train([Fate.ACCEPTED] * 5)[2:])
    assert samples(script.train([Fate.ACCEPTED] * 3)) == expected


def test_moving_far_ahead_loads_nothing_in_between():
    for kind, make in OWN.items():
        calls = []
        script = Script(make(calls))
        script.stream.move_to(Bookmark(3, 1000, ((1, 500),)), lambda: None)
        found = script.train([Fate.ACCEPTED] * 2)
        assert len(calls) == len(samples(found)), kind


def test_batches_prefetched_by_loader_processes_do_not_count():
    def make():
        return DataLoader(Numbers(), 2, shuffle=True, num_workers=1, prefetch_factor=4)

    whole = samples(Script(make()).train([Fate.ACCEPTED] * 6))
    script = Script(make())
    found = samples(script.train([Fate.ACCEPTED, Fate.LATE, Fate.ACCEPTED]))
    assert script.stream.bookmark() == Bookmark(0, 2)
    follower = Script(make()).follow(script)
    found += samples(follower.train([Fate.ACCEPTED] * 2))
    assert found == [*whole[:4], *whole[2:8]]
    for one in (script, follower):  # end the loader processes
        one.leave_the_loop()


# -------------------------------------------------------------------------------- in a live process


@pytest.mark.parametrize("kind", OWN)
def test_live_stream_with_its_own_order_goes_back(kind):
    torch.manual_seed(0)
    script = Script(OWN[kind]())
    script.train([Fate.ACCEPTED, Fate.LATE, Fate.ACCEPTED])
    bookmark, remembered = script.stream.bookmark(), script.generators.remembered()
    expected = script.train([Fate.ACCEPTED, Fate.LATE, Fate.ACCEPTED, Fate.LATE])
    assert script.stream.can_go_back
    script.stream.move_to(bookmark, remembered.restore)  # the server was restarted
    assert script.stream.bookmark() == bookmark
    assert script.train([Fate.ACCEPTED, Fate.LATE, Fate.ACCEPTED, Fate.LATE]) == expected


@pytest.mark.parametrize("kind", OWN)
def test_live_stream_goes_back_into_a_loop_that_was_left(kind):
    script = Script(OWN[kind]())
    script.train([Fate.ACCEPTED] * 2)
    bookmark = script.stream.bookmark()
    rest = [Fate.ACCEPTED, None, Fate.ACCEPTED, Fate.LATE]
    expected = samples(script.train(rest))
    script.stream.move_to(bookmark, lambda: None)
    assert samples(script.train(rest)) == expected


@pytest.mark.parametrize("kind", {**OTHERS, **SEEDED})
def test_live_stream_with_the_scripts_order_continues(kind):
    calls = []
    fates = [Fate.ACCEPTED, Fate.ACCEPTED, Fate.LATE, Fate.ACCEPTED, Fate.ACCEPTED]
    expected = samples(Script(LOADERS[kind]()).train(fates))
    script = Script(LOADERS[kind]())
    found = samples(script.train(fates[:3]))
    assert not script.stream.can_go_back
    script.stream.move_to(Bookmark(0, 1), lambda: calls.append("callback"))
    assert found + samples(script.train(fates[3:])) == expected
    assert calls == []


# ------------------------------------------------------------------------------------- the callback


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "a list"])
@pytest.mark.parametrize("bookmark", [Bookmark(0, 0), Bookmark(0, 2), Bookmark(0, 2, ((0, 1),))])
def test_callback_runs_just_before_the_first_batch_is_loaded(kind, bookmark):
    calls = []
    script = Script(LOADERS[kind](calls))
    script.stream.move_to(bookmark, lambda: calls.append("callback"))
    assert calls == []
    first = samples([script.next()])
    second = samples([script.next()])
    skipped = calls.index("callback")
    assert calls.count("callback") == 1
    if kind in OWN:
        assert skipped == 0
        assert calls[1:] == first + second
    elif bookmark.again:
        assert calls[skipped + 1 :] == second
    else:
        assert calls[skipped + 1 :] == first + second


def test_two_resumed_streams_draw_the_random_numbers_they_would_have_drawn():
    def make():
        scripts = [Script(OWN["shuffled"]()), Script(OWN["in order"]())]
        return scripts, PositionTracker()

    def train(scripts, steps):
        found = []
        for _ in range(steps):
            found.append([script.next() for script in scripts])
            for script in scripts:
                script.step(Fate.ACCEPTED)
        return found

    torch.manual_seed(0)
    scripts, tracker = make()
    for script in scripts:
        tracker.add(script.stream)
    train(scripts, 3)
    tracker.record()
    position = tracker.encode()
    expected = train(scripts, 3)
    torch.manual_seed(1)
    scripts, tracker = make()
    tracker.move_to(position)
    for script in scripts:
        tracker.add(script.stream)
    torch.rand(5)
    assert train(scripts, 3) == expected
