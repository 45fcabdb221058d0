# SPDX-License-Identifier: BSD-3-Clause
"""Every rule has its own colour everywhere, and axes and legends are readable."""

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from figure_checks import legends
from paceline.core.policies import POLICIES
from paceline.watch.figure_style import (
    OWN_RULE,
    RULE_COLOURS,
    describe_axes,
    draw_seed_bars,
    draw_stacked_bars,
    label_target,
    legend_below,
    line_style,
    plain_log,
    rule_colour,
    tint,
    whole_numbers,
)

# Machado, Oliveira and Fernandes 2009, for linear RGB.
VISION = {
    "full": np.eye(3),
    "no red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
CLEAR = 15.0  # the distance in CIELAB of colours that are easy to tell apart


@pytest.fixture
def figure():
    return Figure(figsize=(6, 4), layout="constrained")


def lab(colour, vision):
    """Return the CIELAB coordinates of a colour as somebody with this vision sees it."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    parts = XYZ @ np.clip(VISION[vision] @ linear, 0, 1) / XYZ.sum(axis=1)
    x, y, z = np.where(parts > 0.008856, np.cbrt(parts), 7.787 * parts + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_every_rule_has_a_colour():
    assert set(RULE_COLOURS) == set(POLICIES)


@pytest.mark.parametrize("vision", VISION)
def test_colours_of_rules_are_distinct_with_any_colour_vision(vision):
    seen = {rule: lab(colour, vision) for rule, colour in RULE_COLOURS.items()}
    seen |= {"own": lab(OWN_RULE, vision), "white": lab("white", vision)}
    close = [
        pair
        for pair in combinations(seen, 2)
        if np.linalg.norm(np.subtract(*map(seen.get, pair))) < CLEAR
    ]
    assert close == []


def test_rules_of_one_kind_share_a_colour_and_differ_in_dashes_and_markers():
    one, two = line_style("backup:1"), line_style("backup:2")
    assert one["color"] == two["color"] == rule_colour("backup")
    assert one["linestyle"] != two["linestyle"]
    assert one["marker"] != two["marker"]
    assert line_style("sync") == {"color": RULE_COLOURS["sync"], "linestyle": "-"}
    assert line_style("backup:1", member=2) == two


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("softsync:c=4,lr=constant", "softsync"),
        ("backup:4, finish", "backup"),
        ("async, clipped", "async"),
        ("async 16", "async"),
        ("deadline", "deadline"),
    ],
)
def test_settings_and_notes_leave_the_colour_of_a_rule(text, rule):
    assert rule_colour(text) == RULE_COLOURS[rule]


def test_own_rule_always_looks_the_same():
    assert rule_colour("mine:Majority") == OWN_RULE
    assert line_style("mine:Majority") == line_style("mine:Majority")


def test_tint_is_between_the_colour_and_white():
    assert tint("#000000") == pytest.approx((0.65, 0.65, 0.65))
    assert tint("#ffffff") == (1, 1, 1)


def test_counts_have_ticks_at_whole_numbers(figure):
    axes = figure.subplots()
    axes.plot([0, 1, 2], [1, 2, 3])
    whole_numbers(axes.xaxis)
    assert axes.get_xticks().tolist() == [round(tick) for tick in axes.get_xticks()]


def test_logarithmic_axis_has_plain_numbers(figure):
    axes = figure.subplots()
    axes.plot([1, 2], [0.4, 6])
    plain_log(axes, "y")
    figure.draw_without_rendering()
    assert axes.get_yscale() == "log"
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert {"0.5", "1", "2", "5"} <= set(shown)
    assert {label.get_text() for label in axes.get_yticklabels(minor=True)} <= {""}


def test_legend_is_below_the_panels_and_names_each_label_once(figure):
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.plot([0, 1], [0, 1], label="sync")
        describe_axes(axes, "title", "time (s)", "loss")
    right.plot([0, 1], [1, 0], label="async")
    legend_below(figure, left, right)
    figure.draw_without_rendering()
    (legend,) = legends(figure)
    assert [text.get_text() for text in legend.get_texts()] == ["sync", "async"]
    assert legend.get_window_extent().y1 <= left.get_tightbbox().y0


def test_target_is_labelled_beside_the_panel(figure):
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1])
    label_target(axes, 0.9, "target 0.9")
    figure.draw_without_rendering()
    (text,) = axes.texts
    assert text.get_text() == "target 0.9"
    assert axes.get_window_extent().x1 <= text.get_window_extent().x0
    assert text.get_window_extent().x1 <= figure.bbox.x1
    assert axes.get_lines()[-1].get_ydata() == [0.9, 0.9]


def test_parts_of_a_bar_are_stacked_in_the_colour_of_the_rule(figure):
    axes = figure.subplots()
    draw_stacked_bars(axes, ["sync", "backup:1"], {"useful": [0.5, 0.6], "dropped": [0.0, 0.3]})
    bars = [patch for patch in axes.patches if patch.get_y() > 0.5]
    widths = [bar.get_width() for bar in bars]
    assert [bar.get_x() for bar in bars] == [0.0, 0.6]
    assert widths == pytest.approx([0.6, 0.3])
    assert bars[0].get_facecolor()[:3] == to_rgb(RULE_COLOURS["backup"])
    assert bars[1].get_facecolor()[:3] == tint(RULE_COLOURS["backup"])
    assert axes.get_legend_handles_labels()[1] == ["useful", "dropped"]
    assert axes.yaxis_inverted()


def test_seeds_are_dots_over_the_bar_of_their_mean(figure):
    axes = figure.subplots()
    draw_seed_bars(axes, ["sync", "async"], [[1.0, 3.0], []])
    assert [patch.get_width() for patch in axes.patches][:2] == [2.0, 0.0]
    assert axes.get_lines()[0].get_xdata().tolist() == [1.0, 3.0]
    assert axes.get_legend_handles_labels()[1] == ["one seed (bar: mean)"]


def test_style_is_loaded_without_matplotlib():
    program = "import sys, paceline.watch.figure_style; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
