# SPDX-License-Identifier: BSD-3-Clause
"""Steps on slices of the parameters are steps on the whole, to the bit, and so are the states."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch._dynamo  # an optimizer loads it, and it sets an environment variable
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from paceline.errors import InternalError, ProtocolError
from paceline.run.tensors.optimizer_parts import (
    ELEMENTWISE,
    can_split,
    cut,
    join,
    merge_states,
    split_state,
)
from paceline.run.tensors.optimizer_states import load_checked
from paceline.run.tensors.partition import Slice
from paceline.run.tensors.state_spec import TensorSpec
from split_training import Servers, Whole, is_same, make_grads, same_bits

OPTIONS = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}),
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    (optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.NAdam, {}),
    (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {}),
    (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.Adamax, {"weight_decay": 0.1}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    (optim.Adadelta, {"weight_decay": 0.1}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    (optim.ASGD, {"t0": 2, "weight_decay": 0.1}),
    (optim.Rprop, {}),
]
FUSED = [
    (kind, {**options, "fused": True})
    for kind, options in OPTIONS
    if kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
]
CASES = [
    *((kind, {**options, "foreach": foreach}) for kind, options in OPTIONS for foreach in (0, 1)),
    *OPTIONS,  # foreach=None
    *FUSED,
]


def names(cases):
    return [
        "-".join([kind.__name__, *(f"{name}={value:g}" for name, value in options.items())])
        for kind, options in cases
    ]


every_optimizer = pytest.mark.parametrize(("kind", "options"), CASES, ids=names(CASES))


def is_broken(options, dtype):
    """Return whether torch itself isn't reproducible.

    When the same steps are repeated, its fused SGD leaves another momentum in half precision.
    """
    return "momentum" in options and "fused" in options and dtype == torch.bfloat16


def begin(kind, options, dtype=torch.float32):
    """Return how to make an optimizer, and one server with it."""
    make = partial(kind, lr=0.01, **options)
    # Fused SGD can't begin a momentum when other parameters already have one.
    is_regular = "fused" in options and "momentum" in options
    return make, Whole(make, dtype, is_regular=is_regular)


def is_equal(servers, whole):
    parameters, state = servers.merged()
    pairs = zip(parameters, whole.parameters, strict=True)
    return all(same_bits(a, b) for a, b in pairs) and is_same(state, whole.optimizer.state_dict())


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_on_slices_are_steps_on_the_whole(kind, options, dtype):
    if is_broken(options, dtype):
        return
    make, whole = begin(kind, options, dtype)
    several = [Servers(whole, make, servers, unit) for servers, unit in [(2, 64), (5, 32)]]
    for _ in range(3):
        whole.step()
        for servers in several:
            servers.step()
    assert can_split(whole.optimizer)
    assert all(is_equal(servers, whole) for servers in several)


@pytest.mark.parametrize(("kind", "options"), OPTIONS + FUSED, ids=names(OPTIONS + FUSED))
def test_run_continues_with_another_number_of_servers(kind, options):
    make, whole = begin(kind, options)
    several = Servers(whole, make, 3, 32)
    for number in (1, 4, 2, 5, 3):
        whole.step()
        several.step()
        together = several.become(begin(kind, options)[1])
        assert is_equal(several, whole)
        several = Servers(together, make, number, 64 if number == 2 else 32)
        assert is_equal(several, whole)


@pytest.mark.parametrize(("kind", "options"), OPTIONS + FUSED, ids=names(OPTIONS + FUSED))
def test_servers_accept_their_parts_of_a_state_that_a_script_uploads(kind, options):
    make, whole = begin(kind, options)
    servers = Servers(whole, make, 3, 32)
    whole.step(make_grads(0, torch.float32))
    saved = deepcopy(whole.optimizer.state_dict())
    slices = [part.slices[0] for part in servers.parts]
    specs = servers.spec.optimizers[0].parameters
    for own, state in zip(servers.own, split_state(saved, specs, slices), strict=True):
        load_checked(own.optimizer, dict(enumerate(own.parameters)), state)
    assert is_same(servers.merged()[1], saved)


def test_classes_that_can_be_split_are_all_tested():
    assert {kind for kind, _ in CASES} == set(ELEMENTWISE)


# -------------------------------------------------------------------------------- what can be split


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.LBFGS, optim.SparseAdam, optim.Muon])
def test_optimizer_that_looks_at_whole_tensors_cannot_be_split(kind):
    assert not can_split(kind([nn.Parameter(torch.ones(2, 2))], lr=0.1))


def test_subclass_cannot_be_split():
    class Own(optim.SGD):
        pass

    assert not can_split(Own([nn.Parameter(torch.ones(2))], lr=0.1))


def test_optimizer_with_step_hooks_cannot_be_split():
    for name in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
        handle = getattr(optimizer, name)(lambda *_: None)
        assert not can_split(optimizer)
        handle.remove()
        assert can_split(optimizer)


def test_hook_of_all_optimizers_counts():
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        handle = register(lambda *_: None)
        assert not can_split(optimizer)
        handle.remove()
    assert can_split(optimizer)


def test_optimizer_whose_step_was_replaced_cannot_be_split():
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    StepLR(optimizer, step_size=1)  # replaces it with one that counts
    assert can_split(optimizer)
    optimizer.step = lambda: None
    assert not can_split(optimizer)


def test_differentiable_optimizer_cannot_be_split():
    assert not can_split(optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1, differentiable=True))


def test_complex_parameter_cannot_be_split():
    parameter = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    assert not can_split(optim.SGD([parameter], lr=0.1))


# ---------------------------------------------------------------------------------- tensors, states

ROWS = TensorSpec("w", "torch.float32", (2, 3), (3, 1))
COLUMNS = TensorSpec("w", "torch.float32", (2, 3), (1, 2))
HALVES = [Slice(0, 0, 4)], [Slice(0, 4, 6)]


def test_cut_is_a_view_in_the_order_of_memory():
    tensor = torch.arange(6.0).view(3, 2).T  # has the order of COLUMNS
    assert cut(tensor, COLUMNS).tolist() == [0, 1, 2, 3, 4, 5]
    assert cut(tensor, COLUMNS).data_ptr() == tensor.data_ptr()


def test_cut_reorders_a_tensor_with_other_strides():
    tensor = torch.arange(6.0).view(2, 3)
    assert cut(tensor, COLUMNS).tolist() == [0, 3, 1, 4, 2, 5]
    assert cut(torch.ones(1, 1).expand(2, 3), ROWS).tolist() == [1] * 6


def test_strides_of_single_elements_do_not_matter():
    spec = TensorSpec("w", "torch.float32", (4, 1, 2), (2, 1, 1))
    tensor = torch.ones(4, 1, 2).as_strided((4, 1, 2), (2, 7, 1))
    assert cut(tensor, spec).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("spec", [ROWS, COLUMNS])
def test_join_is_the_inverse_of_cut(spec):
    tensor = torch.randn(2, 3)
    elements = cut(tensor, spec)
    joined = join([(one, elements[one.begin : one.end]) for [one] in HALVES], spec)
    assert torch.equal(joined, tensor)
    assert joined.stride() == spec.stride


def state_of(values, key=0):
    return {"state": {key: values}, "param_groups": [{"params": [0]}]}


def test_count_of_steps_is_on_every_server_and_not_shared():
    step = torch.tensor(3.0)
    states = split_state(state_of({"step": step, "other": None}), [ROWS], HALVES)
    steps = [state["state"][0]["step"] for state in states]
    assert steps == [3, 3]
    assert len({one.data_ptr() for one in (step, *steps)}) == 3
    assert [state["state"][0]["other"] for state in states] == [None, None]


def test_scalars_are_told_by_their_names():
    scalar = TensorSpec("w", "torch.float32", (), ())
    saved = state_of({"step": torch.tensor(3.0), "exp_avg": torch.tensor(5.0)})
    one = [Slice(0, 0, 1)]
    states = split_state(saved, [scalar], [one, []])
    assert states[0]["state"][0]["step"].shape == ()
    assert states[0]["state"][0]["exp_avg"].shape == (1,)
    assert states[1]["state"] == {}
    assert is_same(merge_states([states[0], None], [scalar], [one, []]), saved)


def test_tensor_of_another_shape_is_refused():
    saved = state_of({"exp_avg": torch.ones(4)})
    with pytest.raises(ProtocolError, match=r"exp_avg of w has the shape \[4\], expected \[2, 3\]"):
        split_state(saved, [ROWS], HALVES)


@pytest.mark.parametrize("saved", [None, [], {"state": {}}, {"state": [], "param_groups": []}])
def test_what_is_no_state_is_refused(saved):
    with pytest.raises(ProtocolError, match="expected the state"):
        split_state(saved, [ROWS], HALVES)


def test_what_is_not_of_a_parameter_stays_on_the_head():
    saved = state_of({"step": 1}, key="own")
    states = split_state(saved, [ROWS], HALVES)
    assert [state["state"] for state in states] == [saved["state"], {}]
    assert merge_states(states, [ROWS], HALVES) == saved


def test_state_that_is_no_dictionary_is_left_for_the_optimizer_to_refuse():
    states = split_state(state_of("nonsense"), [ROWS], HALVES)
    assert [state["state"][0] for state in states] == ["nonsense"] * 2


def test_optimizer_that_is_not_split_has_its_state_on_the_head():
    saved = state_of({"step": torch.tensor(3.0)})
    states = split_state(saved, [ROWS], [None, ()])
    assert states[0] is saved
    assert states[1]["state"] == {}
    assert merge_states([saved, None], [ROWS], [None, ()]) is saved


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: state.clear(), "only some servers have a complete state of w"),
        (lambda state: state[0].pop("exp_avg"), "only some servers have a complete state of w"),
        (lambda state: state[0]["step"].add_(1), "servers differ in step of w"),
        (lambda state: state[0].update(other=2), "servers differ in other of w"),
    ],
)
@pytest.mark.parametrize("server", [0, 1])
def test_servers_that_have_not_made_the_same_steps_are_found(server, change, problem):
    values = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3), "other": 1}
    states = split_state(state_of(values), [ROWS], HALVES)
    change(states[server]["state"])
    with pytest.raises(InternalError, match=problem):
        merge_states(states, [ROWS], HALVES)
