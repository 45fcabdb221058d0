# SPDX-License-Identifier: BSD-3-Clause
"""Which memory of a host holds which version, and when it is free for another."""

import pytest
import torch
from torch import nn

from paceline.errors import ProtocolError
from paceline.run.net.host_messages import HostVersion
from paceline.run.net.messages import Assignment, RunEnded
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.server.host_versions import HostVersions
from paceline.run.tensors.layout import gather


@pytest.fixture
def store():
    one, other = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (one, other)]
    store = SharedMemoryStore(gather([one, other], optimizers).spec)
    yield store
    store.close()


@pytest.fixture
def versions(store):
    return HostVersions(store)


def told(payload, version=0, keep=(), worker=None, optimizer=None, is_last=False):
    return HostVersion(payload, version, optimizer, is_last, worker, keep)


def assignment(version, optimizer=None):
    return Assignment(1, version, 0, (0, 0), 0.0, optimizer)


def arrive(versions, message, value=None):
    views = versions.begin(message)
    if value is not None:
        for own in views.flats:
            for flat in own:
                flat.fill_(value)
    versions.complete(message)
    return views


def test_version_is_found_when_all_of_it_has_arrived(versions):
    message = told(1)
    versions.begin(message)
    assert versions.find(0, assignment(0)) is None
    versions.complete(message)
    assert versions.find(0, assignment(0)) is not None
    assert versions.find(0, assignment(1)) is None


def test_all_workers_find_the_same_memory(versions):
    arrive(versions, told(1))
    assert versions.find(0, assignment(0)) is versions.find(1, assignment(0))


def test_memory_that_is_no_longer_used_is_used_again(versions):
    arrive(versions, told(1, 0))
    first = versions.find(0, assignment(0))
    arrive(versions, told(2, 1))
    assert versions.find(0, assignment(1)) is first


def test_memory_that_is_still_used_stays(versions):
    arrive(versions, told(1, 0), 1.0)
    arrive(versions, told(2, 1, keep=(1,)), 2.0)
    old, new = versions.find(0, assignment(0)), versions.find(1, assignment(1))
    assert old.number != new.number
    assert old.views.flats[0][0].eq(1.0).all()


def test_last_version_is_not_the_rounded_one_of_the_same_number(versions):
    arrive(versions, told(1, 5))
    assert versions.find(0, RunEnded(5, 0, (5,))) is None
    arrive(versions, told(2, 5, is_last=True))
    assert versions.find(0, RunEnded(5, 0, (5,))) is not None


def test_version_that_was_cut_short_is_never_found(versions):
    message = told(1)
    versions.begin(message)
    versions.drop(message)
    assert versions.find(0, assignment(0)) is None
    arrive(versions, told(2))
    assert versions.find(0, assignment(0)).number == 0  # its memory is used again


def test_version_that_arrives_although_nobody_wants_it_is_ignored(versions):
    message = told(1, 0)
    versions.begin(message)
    versions.begin(told(2, 1))
    versions.complete(message)
    assert versions.find(0, assignment(0)) is None


def test_part_of_a_version_is_loaded_into_a_copy_for_one_worker(versions):
    arrive(versions, told(1, 0), 1.0)
    shared = versions.find(0, assignment(0))
    versions.find(1, assignment(0))
    message = told(2, 1, keep=(1,), worker=0, optimizer=1)
    views = versions.begin(message)
    for flat in views.flats[1]:
        flat.fill_(2.0)
    assert versions.find(0, assignment(1, 1)) is None
    versions.complete(message)
    own = versions.find(0, assignment(1, 1))
    assert own.number != shared.number
    assert own.views.flats[0][0].eq(1.0).all()
    assert own.views.flats[1][0].eq(2.0).all()
    assert shared.views.flats[1][0].eq(1.0).all()
    assert versions.find(1, assignment(1, 1)) is None


def test_worker_without_a_version_cannot_load_a_part(versions):
    with pytest.raises(ProtocolError, match="worker 3 has no version yet"):
        versions.begin(told(1, worker=3, optimizer=0))


def test_copy_of_a_worker_that_is_gone_is_used_again(versions):
    arrive(versions, told(1, 0), 1.0)
    versions.find(0, assignment(0))
    message = told(2, 1, keep=(1,), worker=0, optimizer=1)
    versions.begin(message)
    versions.complete(message)
    own = versions.find(0, assignment(1, 1))
    versions.forget(0)
    arrive(versions, told(3, 2, keep=(1,)))
    assert versions.find(1, assignment(2)).number == own.number
