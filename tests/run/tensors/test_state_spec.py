# SPDX-License-Identifier: BSD-3-Clause
"""Descriptions of tensors: their text, their bounds, and that they need no torch."""

import subprocess
import sys

import msgspec
import pytest

from paceline.run.tensors.state_spec import LARGEST, OptionChange, TensorSpec


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (TensorSpec("bias", "torch.float32", (3,), (1,)), "bias: torch.float32[3]"),
        (TensorSpec("scale", "torch.float64", (), ()), "scale: torch.float64[]"),
        (TensorSpec("w", "torch.float32", (2, 3), (3, 1)), "w: torch.float32[2, 3]"),
        (TensorSpec("none", "torch.float32", (0, 3), (3, 1)), "none: torch.float32[0, 3]"),
        (
            TensorSpec("w", "torch.float32", (2, 3), (1, 2)),
            "w: torch.float32[2, 3] with strides [1, 2]",
        ),
    ],
)
def test_text_names_the_strides_only_if_they_are_unusual(spec, text):
    assert str(spec) == text


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "text", (0.5, 1.0)])
def test_option_survives_encoding(value):
    change = OptionChange(1, 2, "lr", value)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(change), type=OptionChange) == change


@pytest.mark.parametrize(
    "parts",
    [
        [-1, 0, "lr", 0.5],
        [LARGEST + 1, 0, "lr", 0.5],
        [0, 0, "x" * 201, 0.5],
        [0, 0, "lr", [0.5] * 65],
        [0, 0, "lr", {"a": 1}],
        [0, 0, "lr"],
        [0, 0, "lr", 0.5, "more"],
    ],
    ids=["negative", "too large", "long name", "long tuple", "dictionary", "short", "long"],
)
def test_option_out_of_bounds_is_refused(parts):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(parts), type=OptionChange)


def test_torch_is_not_imported():
    """The launcher decodes messages, and must start quickly."""
    source = "import sys, paceline.run.tensors.state_spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
