# SPDX-License-Identifier: BSD-3-Clause
"""Storms find bugs that are planted into the server, the worker and the checkpointer."""

import pytest
import torch._dynamo  # optimizers import it, and it sets an environment variable

from storm.mutants import MUTANTS
from storm.scenario import make_scenario
from storm.storm import run_storm

assert torch._dynamo


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_planted_bug_is_found(mutant):
    with mutant.planted():
        for seed in mutant.seeds:
            if run_storm(make_scenario(seed)).violation:
                break
        else:
            pytest.fail(f"not found in {len(mutant.seeds)} storms: {mutant.what}")
    assert run_storm(make_scenario(seed)).violation == ""  # it is the bug that was found
