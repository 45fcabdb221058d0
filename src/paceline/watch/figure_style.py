# SPDX-License-Identifier: BSD-3-Clause
"""The look of every figure: one colour per rule, plain axes, and legends beside the data.

The command line, the lab and docs/figures.py all draw with this module. A rule always has the same
colour, and no two rules share one. Rules that differ only in a number, such as `backup:1` and
`backup:4`, share a colour and differ in dashes and markers. Colours that stand for anything else
come from `SERIES`, or are grey.

The functions work on axes that the caller created, so this module doesn't import matplotlib.
"""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal
from zlib import crc32

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import FigureBase, SubFigure

__all__ = [
    "DPI",
    "GREY",
    "LEGEND",
    "LIGHT_GREY",
    "RULE_COLOURS",
    "SERIES",
    "WIDTH",
    "describe_axes",
    "describe_bars",
    "draw_seed_bars",
    "draw_stacked_bars",
    "label_target",
    "legend_below",
    "line_style",
    "plain_log",
    "rule_colour",
    "split_figure",
    "split_style",
    "tint",
    "whole_numbers",
]

RULE_COLOURS = {
    "sync": "#0072b2",
    "backup": "#d55e00",
    "batchsync": "#e69f00",
    "deadline": "#56b4e9",
    "async": "#cc79a7",
    "softsync": "#009e73",
    "ssp": "#882255",
    "delayed": "#332288",
}
"""A colour for each rule, distinct for people with a red-green colour vision deficiency, too."""

OWN_RULE = "#000000"
"""The colour of rules that aren't part of Paceline; dashes and markers tell them apart."""

SERIES = ("#440154", "#443a83", "#306a8e", "#20928c", "#3bbb75", "#9bd93c")
"""Colours for lines that aren't rules, dark to light, for ordered values such as noise scales."""

GREY = "0.45"  # reference lines and notes
LIGHT_GREY = "0.88"  # waiting
LEGEND = "#4d4d4d"  # parts of bars, in legends that hold for all rules

WIDTH = 9.0  # inches; at the width of a README, text of 10 points is then as large as the page's
DPI = 150

SEED_DOTS: dict[str, Any] = {
    "linestyle": "",
    "marker": "o",
    "markersize": 4,
    "color": "black",
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
}

_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (6, 2, 1.5, 2)), (0, (1.5, 1.5)), (0, (9, 3)))
_MARKERS = "os^Dv"


def rule_colour(rule: str) -> str:
    """Return the colour of a rule such as `backup:1`, also if a note follows it."""
    return RULE_COLOURS.get(_family(rule), OWN_RULE)


def line_style(rule: str, member: int | None = None) -> dict[str, Any]:
    """Return the colour, dashes and markers of a rule's line.

    `member` tells rules of one colour apart; by default it is the first number in the rule.
    """
    if member is None:
        member = _number(rule)
    style: dict[str, Any] = {"color": rule_colour(rule), "linestyle": "-"}
    if member is not None:
        index = (member - 1) % len(_DASHES)
        style |= {"linestyle": _DASHES[index], "marker": _MARKERS[index]}
        style |= {"markersize": 4, "markevery": 0.15}
    return style


def tint(colour: str) -> tuple[float, float, float]:
    """Return a pale version of a colour, mixed with white."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (1 - 0.35 * (1 - part) for part in parts)
    return red, green, blue


def split_style(colour: str, part: int) -> dict[str, Any]:
    """Return the look of a part of a bar: solid, then hatched, then the grey of waiting."""
    return (
        {"facecolor": colour, "linewidth": 0},
        {"facecolor": tint(colour), "edgecolor": colour, "hatch": "////", "linewidth": 0},
        {"facecolor": LIGHT_GREY, "linewidth": 0},
    )[part]


def draw_stacked_bars(
    axes: "Axes", rules: Sequence[str], parts: Mapping[str, Sequence[float]]
) -> None:
    """Draw a bar per rule, from top to bottom, in the rule's colour and split into its parts.

    `parts` has at most three labels, with a value for each rule. The legend shows them in grey.
    """
    ends = [0.0] * len(rules)
    for part, (label, values) in enumerate(parts.items()):
        for row, rule in enumerate(rules):
            style = split_style(rule_colour(rule), part)
            axes.barh(row, values[row], left=ends[row], **style)
        axes.barh(-1, 0, label=label, **split_style(LEGEND, part))
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    axes.set_yticks(range(len(rules)), rules)
    axes.set_ylim(len(rules) - 0.4, -0.6)


def draw_seed_bars(axes: "Axes", rules: Sequence[str], values: Sequence[Sequence[float]]) -> None:
    """Draw a bar per rule with the mean of its values, and a dot for each value, one per seed."""
    means = [fmean(own) if own else 0.0 for own in values]
    draw_stacked_bars(axes, rules, {"_mean": means})  # not in the legend
    for row, own in enumerate(values):
        axes.plot(
            own, [row] * len(own), **SEED_DOTS, label="one seed (bar: mean)" if row == 0 else None
        )


def split_figure(
    figure: "FigureBase", rows: int, columns: int, **options: Any
) -> "list[SubFigure]":
    """Split a figure into parts, row by row, so that each can have a legend of its own."""
    parts: Any = figure.subfigures(rows, columns, squeeze=False, **options)
    return list(parts.flat)


def describe_axes(axes: "Axes", title: str, xlabel: str, ylabel: str = "") -> None:
    """Set title and labels in the sizes that all figures share, and draw a light grid."""
    axes.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.tick_params(labelsize="small")
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def describe_bars(axes: "Axes", title: str, xlabel: str) -> None:
    """Set title and label of a panel of horizontal bars."""
    describe_axes(axes, title, xlabel)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, None)


def legend_below(figure: "FigureBase", *panels: "Axes", columns: int = 4) -> None:
    """Put a legend of all distinct labels of the panels below them, where it covers no data."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside lower center",
        ncols=max(1, min(columns, len(found))),
        frameon=False,
        fontsize="small",
        handlelength=3,
    )


def whole_numbers(axis: "Axis") -> None:
    """Put ticks at whole numbers only, for counts such as b and N."""
    axis.get_major_locator().set_params(integer=True, min_n_ticks=1)  # type: ignore[call-arg]


def plain_log(axes: "Axes", which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with ticks such as 0.5, 1 and 2 instead of powers of ten.

    Call it after drawing: it chooses the ticks by the range of the data.
    """
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    axis.get_major_locator().set_params(subs=subs)  # type: ignore[call-arg]
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")
    axis.set_tick_params(which="minor", length=0)


def label_target(axes: "Axes", value: float, text: str = "") -> None:
    """Draw a target as a dashed line, with a text to the right of the panel."""
    axes.axhline(value, color=GREY, linewidth=1, linestyle="--", zorder=1.5)
    axes.annotate(
        text,
        (1, value),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize="small",
        color=GREY,
    )


def _family(rule: str) -> str:
    return re.split(r"[:, ]", rule, maxsplit=1)[0]


def _number(rule: str) -> int | None:
    """Return the number that tells a rule from others of its colour; None: it has none."""
    if _family(rule) not in RULE_COLOURS:
        return crc32(rule.encode()) % len(_DASHES) + 1
    found = re.search(r"\d+", rule)
    return int(found[0]) if found else None
