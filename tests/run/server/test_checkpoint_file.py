# SPDX-License-Identifier: BSD-3-Clause
"""What the newest checkpoint says about the trace can be read without its tensors."""

import subprocess
import sys

import pytest
import torch

from paceline.run.server.checkpoint import Archive, Saved, Snapshot
from paceline.run.server.checkpoint_file import SavedTrace, checkpoint_files, saved_trace


@pytest.fixture
def folder(tmp_path):
    """Return a folder with checkpoints of versions 7 and 10."""
    archive = Archive(tmp_path, pytest.fail)
    for version in (7, 10):
        tensors = {"weights": torch.ones(5)}
        saved = Saved(version, 1, [], None, tensors, {0: b"here"}, trace=(100 * version, version))
        archive.save(Snapshot.of(saved), saved.positions)
        archive.wait()
    return tmp_path


def test_newest_checkpoint_says_how_far_the_trace_had_got(folder):
    assert saved_trace(folder) == SavedTrace(10, 1000, 10)
    assert [path.stem for path in checkpoint_files(folder)] == ["0000000010", "0000000007"]


@pytest.mark.parametrize("keep", [0, 10, 50, 70])
def test_damaged_checkpoint_is_left_out(folder, keep):
    newest = folder / "0000000010.ckpt"
    newest.write_bytes(newest.read_bytes()[:keep])
    assert saved_trace(folder) == SavedTrace(7, 700, 7)


def test_checkpoint_with_a_wrong_checksum_is_left_out(folder):
    newest = folder / "0000000010.ckpt"
    text = bytearray(newest.read_bytes())
    text[80] ^= 1
    newest.write_bytes(text)
    assert saved_trace(folder) == SavedTrace(7, 700, 7)


def test_folder_without_checkpoints_says_nothing(tmp_path):
    assert saved_trace(tmp_path) is None
    assert saved_trace(tmp_path / "missing") is None


def test_torch_is_not_imported():
    code = "import sys, paceline.run.server.checkpoint_file; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
