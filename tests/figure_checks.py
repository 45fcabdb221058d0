# SPDX-License-Identifier: BSD-3-Clause
"""What holds for every figure: the colours of rules, whole ticks, labels, and free data."""

import re
from itertools import combinations

from matplotlib.colors import to_hex, to_rgb

from paceline.core.policies import POLICIES
from paceline.watch.figure_style import OWN_RULE, RULE_COLOURS, SERIES, rule_colour, tint

__all__ = ["check_figure", "legends", "panel"]

RULE = re.compile(rf"({'|'.join(POLICIES)})\b(?=[:,. ]|$)")
COUNT = re.compile(r"[bkKNW], ")  # the label of an axis of whole numbers

STRONG = {*RULE_COLOURS.values(), *SERIES, OWN_RULE}
ALLOWED = STRONG | {to_hex(tint(colour)) for colour in STRONG}


def check_figure(figure):
    """Check everything that holds for all figures of the project."""
    figure.draw_without_rendering()
    assert figure.axes
    for axes in figure.axes:
        assert axes.get_title(loc="left"), "a panel has no title"
        below = axes.get_shared_x_axes().get_siblings(axes)
        assert any(each.get_xlabel() for each in below), "a panel has no label below it"
        _check_colours(axes)
        _check_ticks(axes)
    _check_layout(figure)
    _check_legends(figure)


def legends(figure):
    """Return all legends of a figure, of its parts and of its panels."""
    parts = [figure]
    for part in parts:
        parts += part.subfigs
    inside = [axes.get_legend() for axes in figure.axes]
    return [*(legend for part in parts for legend in part.legends), *filter(None, inside)]


def panel(figure, title):
    """Return the panel whose title contains these words."""
    (found,) = [axes for axes in figure.axes if title in axes.get_title(loc="left")]
    return found


def is_grey(colour):
    red, green, blue = to_rgb(colour)
    return red == green == blue


def _check_colours(axes):
    for line in axes.get_lines():
        colour = to_hex(line.get_color())
        assert colour in ALLOWED or is_grey(colour), f"{line.get_label()} has the colour {colour}"
        if RULE.match(line.get_label()):
            assert colour == rule_colour(line.get_label()), line.get_label()
    rules = [label.get_text() for label in axes.get_yticklabels()]
    for patch in axes.patches:
        colour = to_hex(patch.get_facecolor())
        assert colour in ALLOWED or is_grey(colour), f"a bar has the colour {colour}"
        row = round(patch.get_y() + patch.get_height() / 2)
        if patch.get_width() and not is_grey(colour) and RULE.match(rules[row]):
            own = rule_colour(rules[row])
            assert colour in (own, to_hex(tint(own))), rules[row]


def _check_ticks(axes):
    for axis in (axes.xaxis, axes.yaxis):
        if COUNT.match(axis.get_label().get_text()):
            low, high = sorted(axis.get_view_interval())
            shown = [tick for tick in axis.get_ticklocs() if low <= tick <= high]
            assert shown
            assert shown == [round(tick) for tick in shown]


def _check_layout(figure):
    """Titles and labels stay inside the figure and off other panels."""
    boxes = {axes.get_title(loc="left"): axes.get_tightbbox().padded(-1) for axes in figure.axes}
    for title, box in boxes.items():
        assert figure.bbox.x0 <= box.x0, title
        assert box.x1 <= figure.bbox.x1, title
    for (title, box), (other, other_box) in combinations(boxes.items(), 2):
        assert not _overlaps(box, other_box), (title, other)


def _check_legends(figure):
    """No legend covers a panel, so none covers data, and none sticks out of the figure."""
    for legend in legends(figure):
        box = legend.get_window_extent()
        covered = [axes for axes in figure.axes if _overlaps(box, axes.get_window_extent())]
        assert not covered, [axes.get_title(loc="left") for axes in covered]
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1, [text.get_text() for text in legend.get_texts()]


def _overlaps(one, other):
    return one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1
