# SPDX-License-Identifier: BSD-3-Clause
"""Create matplotlib figures for the experiments; matplotlib is imported on first use."""

from typing import TYPE_CHECKING

from paceline.lab import extras

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["new_figure", "show_percent"]


def new_figure(width: float, height: float, title: str = "") -> "Figure":
    """Return an empty figure of this size in inches, which arranges its panels by itself."""
    figure: Figure = extras.load("matplotlib.figure").Figure(
        figsize=(width, height), layout="constrained"
    )
    if title:
        figure.suptitle(title, fontsize="large")
    return figure


def show_percent(axes: "Axes") -> None:
    """Label the y axis in percent; its values are fractions of 1."""
    formatter = extras.load("matplotlib.ticker").PercentFormatter(1.0, 0, " %")
    axes.yaxis.set_major_formatter(formatter)
