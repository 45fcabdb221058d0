# SPDX-License-Identifier: BSD-3-Clause
"""The actor passes calls on; `test_ray.py` and `test_ray_cluster.py` call it on real nodes."""

import inspect

import pytest

from paceline.run.launch.ray_actor import _Actor
from paceline.run.launch.remote_host import RemoteHost

OWN = {"where", "close"}


def methods(kind):
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: function for name, function in found if not name.startswith("_")}


def parameters(function):
    """Return names and types; Ray adds a parameter of its own, which begins with _."""
    found = inspect.signature(function)
    named = {name: p.annotation for name, p in found.parameters.items() if name[0] != "_"}
    return {**named, "return": found.return_annotation}


@pytest.mark.parametrize("name", sorted(methods(_Actor).keys() - OWN))
def test_method_takes_and_returns_what_that_of_the_host_does(name):
    assert parameters(methods(_Actor)[name]) == parameters(methods(RemoteHost)[name])


def test_every_method_of_a_host_can_be_called():
    assert methods(RemoteHost).keys() - methods(_Actor).keys() == {"kill_if_abandoned"}
