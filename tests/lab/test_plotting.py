# SPDX-License-Identifier: BSD-3-Clause
"""Figures have the size that was asked for, and percent labels on request."""

from paceline.lab.plotting import new_figure, show_percent


def test_percent_labels_are_shown():
    figure = new_figure(4, 3)
    axes = figure.subplots()
    axes.plot([0.0, 0.5])
    show_percent(axes)
    figure.draw_without_rendering()
    assert "50 %" in [label.get_text() for label in axes.get_yticklabels()]
