# SPDX-License-Identifier: BSD-3-Clause
"""Train on Ray from a Ray program: `from paceline.ray import run`."""

try:
    from paceline.run.launch.ray import Trained, run
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ModuleNotFoundError(
        "paceline.ray needs Ray, which is not installed; "
        "install it with: pip install 'paceline[ray]'",
        name="ray",
    ) from None
from paceline.run.launch.ray_placement import Placement

__all__ = ["Placement", "Trained", "run"]
