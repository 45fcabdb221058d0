# SPDX-License-Identifier: BSD-3-Clause
"""The result of a run is in files that torch alone can read, equal to what was trained."""

import errno
import gc
from weakref import ref

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn

from disk import small_disk
from paceline.run.net.shared_memory import SharedMemoryStore
from paceline.run.server.export_weights import write_weights
from paceline.run.tensors.layout import gather
from paceline.run.tensors.shard import Shard
from paceline.run.tensors.sums import SlotGradient
from shard_updates import make_update


def shard_of(*models, **options):
    """Return a shard of these models, after an update of each that moved everything."""
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for model in models
    ]
    state = gather(models, optimizers)
    store = SharedMemoryStore(state.spec)
    shard = Shard(state, [], store, **options)
    store.close()  # the memory stays mapped
    slot = store.new_accumulator()
    for index in range(len(optimizers)):
        for flat in (*slot.flats[index], *slot.buffer_flats, *slot.counter_flats):
            flat.fill_(index + 2)
        make_update(shard, [SlotGradient(0, index, 1, 1.0, frozenset(), slot)])
    return shard


def read(path):
    return torch.load(path, weights_only=True)


def assert_equal(found, model):
    expected = model.state_dict()
    assert list(found) == list(expected)
    for name, value in found.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name


def names(folder):
    return sorted(path.name for path in folder.iterdir())


class Odd(nn.Module):
    """Everything that a model may have besides plain parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight  # tied
        self.brief = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.image = nn.Parameter(torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last))
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("passing", torch.ones(2), persistent=False)


def test_torch_reads_what_was_trained(tmp_path):
    torch.manual_seed(0)
    model = Odd()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write_weights(tmp_path, [model], shard_of(model))
    assert names(tmp_path) == ["weights.pt"]
    found = read(tmp_path / "weights.pt")
    assert_equal(found, model)
    assert "passing" not in found
    moved = {name for name in found if not torch.equal(found[name], before[name])}
    assert moved == set(found) - {"frozen"}
    assert torch.equal(found["norm.running_mean"], torch.full((3,), 2.0))
    assert found["norm.num_batches_tracked"] == 2
    assert torch.equal(found["expanded"], torch.full((4,), 2.0))
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    another = Odd()
    another.expanded = another.expanded.clone()
    another.load_state_dict(found)
    assert_equal(another.state_dict(), model)


def test_file_is_no_larger_than_the_model(tmp_path):
    """Parameters are views of one memory; it must not be written once for each of them."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])
    write_weights(tmp_path, [model], shard_of(model))
    size = sum(p.nbytes for p in model.parameters())
    assert (tmp_path / "weights.pt").stat().st_size < 1.2 * size


def test_several_models_are_written_to_several_files(tmp_path):
    models = [nn.Linear(2, 3), nn.BatchNorm1d(4)]
    write_weights(tmp_path, models, shard_of(*models))
    assert names(tmp_path) == ["weights-0.pt", "weights-1.pt"]
    for number, model in enumerate(models):
        assert_equal(read(tmp_path / f"weights-{number}.pt"), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_moving_average_is_written_besides_the_weights(tmp_path, dtype):
    model = nn.Linear(2, 3, bias=False, dtype=dtype)
    nn.init.ones_(model.weight)
    shard = shard_of(model, ema=0.75)
    write_weights(tmp_path, [model], shard)
    assert names(tmp_path) == ["weights-averaged.pt", "weights.pt"]
    now = torch.zeros(3, 2, dtype=dtype)  # 1 - 0.5 x 2
    mean = torch.full((3, 2), 0.75, dtype=dtype)
    assert torch.equal(read(tmp_path / "weights.pt")["weight"], now)
    averaged = read(tmp_path / "weights-averaged.pt")["weight"]
    assert averaged.dtype == dtype
    assert torch.equal(averaged, mean)
    # The model itself is unchanged.
    assert model.weight.data_ptr() == shard.newest.views.parameters[0][0].data_ptr()
    assert torch.equal(model.weight.detach(), now)


def test_each_of_several_models_has_its_own_average(tmp_path):
    models = [nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)]
    shard = shard_of(*models, ema=0.5)
    write_weights(tmp_path, models, shard)
    for number in (0, 1):
        found = read(tmp_path / f"weights-{number}-averaged.pt")
        assert torch.equal(found["weight"], shard.average[number][0])


def test_older_files_are_replaced(tmp_path):
    model = nn.Linear(2, 2)
    (tmp_path / "weights.pt").write_text("old")
    (tmp_path / ".weights.pt.partial").write_text("never finished")
    write_weights(tmp_path, [model], shard_of(model))
    assert names(tmp_path) == ["weights.pt"]
    assert_equal(read(tmp_path / "weights.pt"), model)


class Fails(nn.Linear):
    def __getstate__(self):
        raise OSError("cannot be written")

    def state_dict(self, *arguments, **options):
        return {**super().state_dict(*arguments, **options), "odd": self}


def test_model_that_cannot_be_written_leaves_the_older_file(tmp_path):
    model = Fails(2, 2)
    shard = shard_of(model, ema=0.5)
    before = model.weight.data_ptr()
    (tmp_path / "weights.pt").write_text("old")
    with pytest.raises(OSError, match="cannot be written"):
        write_weights(tmp_path, [model], shard)
    assert names(tmp_path) == ["weights.pt"]
    assert (tmp_path / "weights.pt").read_text() == "old"
    assert model.weight.data_ptr() == before


def test_full_disk_keeps_nothing_in_memory(tmp_path):
    """Frames of the server refer to workers' slots, so none may be part of a cycle."""
    model = nn.Linear(200, 200)
    shard = shard_of(model)

    def failed_write():
        slot, failed_with = nn.Linear(1, 1), None
        try:
            write_weights(tmp_path / "disk", [model], shard)
        except OSError as error:  # not `pytest.raises`, which keeps it
            failed_with = error.errno
        assert failed_with == errno.ENOSPC
        return ref(slot)

    gc.disable()
    try:
        with small_disk(tmp_path / "disk", "64k"):
            assert failed_write()() is None
    finally:
        gc.enable()
