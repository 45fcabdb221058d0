# SPDX-License-Identifier: BSD-3-Clause
"""Batch norm that keeps workers apart, and weight norm."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d

from paceline.errors import SpecError
from paceline.lab.models.normalization import BatchNorm, WeightNormConv2d, set_groups


def batch_norm(**options):
    """Return a batch norm of three channels with a non-initial state."""
    torch.manual_seed(0)
    norm = BatchNorm(3, **options)
    for tensor in (*norm.parameters(), *norm.buffers()):
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    return norm.double()


def batches(groups, size=4):
    """Return mini-batches with different statistics."""
    torch.manual_seed(1)
    scales = torch.arange(1.0, groups + 1, dtype=torch.double).view(-1, 1, 1, 1, 1)
    return scales * torch.randn(groups, size, 3, 5, 5, dtype=torch.double) + scales


def plain(norm, x):
    """Return the output of torch's batch norm, and the module with its new state."""
    theirs = nn.BatchNorm2d(3, momentum=norm.momentum).double()
    theirs.load_state_dict(norm.state_dict())
    return theirs(x), theirs


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_each_group_is_normalized_separately(groups, momentum, layout):
    norm = batch_norm(momentum=momentum)
    parts = batches(groups)
    alone = [plain(norm, part) for part in parts]
    set_groups(norm, groups)
    together = norm(parts.flatten(0, 1).contiguous(memory_format=layout))
    torch.testing.assert_close(together, torch.cat([out for out, _ in alone]))
    assert together.is_contiguous(memory_format=layout)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(theirs, name) for _, theirs in alone]).mean(0)
        torch.testing.assert_close(getattr(norm, name), mean)
    assert norm.num_batches_tracked == 1


def test_groups_differ_from_one_large_batch():
    norm = batch_norm()
    parts = batches(2)
    set_groups(norm, 2)
    assert not torch.allclose(norm(parts.flatten(0, 1)), plain(norm, parts.flatten(0, 1))[0])


def test_gradients_match_finite_differences():
    norm = batch_norm()
    set_groups(norm, 3)
    x = batches(3, size=2)[..., :2, :1].flatten(0, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda *_: norm(x), (x, norm.weight, norm.bias))


def test_groups_do_not_matter_in_evaluation():
    norm = batch_norm().eval()
    set_groups(norm, 4)
    x = batches(1, size=7)[0]  # not divisible by four
    before = norm.running_mean.clone()
    shape = (1, 3, 1, 1)
    by_hand = (x - before.view(shape)) / (norm.running_var.view(shape) + norm.eps).sqrt()
    torch.testing.assert_close(norm(x), by_hand * norm.weight.view(shape) + norm.bias.view(shape))
    torch.testing.assert_close(norm.running_mean, before)


def test_groups_work_without_running_statistics():
    norm = BatchNorm(3, track_running_stats=False)
    set_groups(norm, 2)
    out = norm(batches(2).flatten(0, 1).float())
    assert out[:4].mean().abs() < 1e-5
    assert out[4:].mean().abs() < 1e-5


def test_unequal_groups_are_refused():
    norm = BatchNorm(3)
    set_groups(norm, 3)
    with pytest.raises(SpecError, match="cannot split a batch of 8 into 3 equal mini-batches"):
        norm(torch.zeros(8, 3, 2, 2))


def test_number_of_groups_must_be_positive():
    with pytest.raises(SpecError, match="groups must be >= 1, got 0"):
        set_groups(BatchNorm(3), 0)


def test_set_groups_reaches_every_layer():
    model = nn.Sequential(BatchNorm(3), nn.Sequential(nn.ReLU(), BatchNorm(3)))
    set_groups(model, 3)
    assert [m.groups for m in model.modules() if isinstance(m, BatchNorm)] == [3, 3]
    set_groups(model, 1)
    assert [m.groups for m in model.modules() if isinstance(m, BatchNorm)] == [1, 1]


def test_weight_norm_starts_as_a_plain_convolution():
    torch.manual_seed(0)
    conv = WeightNormConv2d(2, 5, 3, padding=1)
    other = nn.Conv2d(2, 5, 3, padding=1)
    other.load_state_dict({"weight": conv.weight, "bias": conv.bias})
    x = torch.randn(2, 2, 6, 6)
    torch.testing.assert_close(conv(x), other(x))


def test_kernel_has_the_direction_of_weight_and_the_length_of_gain():
    torch.manual_seed(0)
    conv = WeightNormConv2d(2, 5, 3)
    x = torch.randn(2, 2, 6, 6)
    before = conv(x)
    with torch.no_grad():
        conv.weight *= 7.0
        torch.testing.assert_close(conv(x), before)
        conv.gain.copy_(torch.arange(5.0))
        kernels = torch.stack(
            [k / k.norm() * g for k, g in zip(conv.weight, conv.gain, strict=True)]
        )
    torch.testing.assert_close(conv(x), conv2d(x, kernels, conv.bias))


def test_weight_norm_can_be_copied_and_pickled():
    conv = WeightNormConv2d(2, 5, 3)
    x = torch.randn(1, 2, 4, 4)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        torch.testing.assert_close(other(x), conv(x))
        assert len(list(other.parameters())) == 3
