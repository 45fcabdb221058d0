# SPDX-License-Identifier: BSD-3-Clause
"""A run over TLS trains what a run over shared memory trains; bad certificates end it at once."""

import json

import pytest
import torch

from certificates import issue
from paceline.errors import SpecError

SOURCE = """
import torch
from torch import nn

import paceline

torch.manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300), nn.Linear(300, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
for epoch in range(20):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""


LARGE = SOURCE.replace("300", "600")  # enough for two servers


def weights(ran):
    return torch.load(ran.folder / "weights.pt", weights_only=True)


def assert_same_weights(ran, other):
    expected = weights(other)
    for name, weight in weights(ran).items():
        assert torch.equal(weight, expected[name]), name


def options(files):
    return {
        "transport": "tcp",
        "tls_cert": files.cert,
        "tls_key": files.key,
        "tls_ca": files.ca,
    }


def test_run_over_tls_equals_one_over_shared_memory(launch, tls_files):
    plain = launch(SOURCE, workers=2, steps=6)
    ran = launch(SOURCE, workers=2, steps=6, **options(tls_files))
    assert (plain.code, ran.code) == (0, 0)
    assert_same_weights(ran, plain)
    spec = json.loads((ran.folder / "spec.json").read_text(encoding="utf-8"))
    assert (spec["tls_cert"], spec["tls_key"]) == (tls_files.cert, tls_files.key)
    assert "BEGIN" not in json.dumps(spec)


@pytest.fixture(scope="module")
def self_signed(tmp_path_factory):
    """A certificate that signs itself."""
    return issue(tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(("files", "wire"), [("tls_files", "exact"), ("self_signed", "bfloat16")])
def test_two_servers_over_tls_train_what_they_train_without(launch, files, wire, request):
    """Workers connect to both servers, and the second server to the first, with TLS."""
    formats = {"wire": wire, "wire_parameters": wire}
    files = options(request.getfixturevalue(files))
    plain = launch(LARGE, workers=2, steps=6, servers=2, **formats)
    ran = launch(LARGE, workers=2, steps=6, servers=2, **formats, **files)
    assert (plain.code, ran.code) == (0, 0)
    assert_same_weights(ran, plain)
    assert ran.trace.header.about["servers"] == "2"
    pushed = [[record.pushed_bytes for record in one.trace.gradients()] for one in (ran, plain)]
    assert pushed[0] == pushed[1]


def test_expired_certificate_ends_the_run_before_it_begins(launch, authority):
    with pytest.raises(SpecError, match="certificate has expired"):
        launch(SOURCE, **options(authority.issue("old-run", days=-1)))
