"""The same pictures as PNG, drawn by matplotlib, which is an extra and imported when it is asked for."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Sequence
from typing import Any

from kvstore.errors import ConfigError
from kvstore.simulate.pictures.base import Bars, Lines, Section, spread, steps

_WIDTH_INCHES = 8.0
_DOTS_PER_INCH = 150
_COLOURS = ("#0b62c4", "#b8420a", "#157347", "#8a2be2", "#b01e3c", "#0b7285", "#8a6100", "#b0307f")


def check_drawing(name: str) -> None:
    """Raise ConfigError where matplotlib is not installed. Imports nothing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "PNG needs matplotlib, which is not installed",
            field="--png",
            value=name,
            allowed="pip install 'kvstore[pictures]'; or --html, which needs nothing",
        )


def png(sections: Sequence[Section], *, title: str) -> bytes:
    """One image, with the sections one below the other; at least one."""
    from matplotlib.figure import Figure

    heights = [_height(each.picture) for each in sections]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights) + 0.4), layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=11, parse_math=False)
    axes = figure.subplots(len(sections), 1, squeeze=False, height_ratios=heights)
    for section, [panel] in zip(sections, axes, strict=True):
        panel.set_title(section.title, loc="left", fontweight="bold", fontsize=11, parse_math=False)
        panel.spines[["top", "right"]].set_visible(False)
        if isinstance(section.picture, Lines):
            _lines(panel, section.picture)
        else:
            _bars(panel, section.picture)
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=_DOTS_PER_INCH)
    return target.getvalue()


def _height(picture: Lines | Bars) -> float:
    if isinstance(picture, Bars):
        return 1.1 + 0.45 * len(picture.bars)
    return max(4.0, 1.2 + 0.19 * (len(picture.lines) + len(picture.levels)))


def _lines(panel: Any, picture: Lines) -> None:
    x_low, x_high = picture.x_range()
    y_low, y_high = picture.y_range()
    panel.set_xscale("log")
    panel.set_xlim(x_low / 1.02, x_high * 1.02)
    panel.set_ylim(y_low, y_high)
    panel.set_xticks([x for x, _ in picture.x_ticks], [words for _, words in picture.x_ticks])
    panel.set_xticks([], minor=True)
    panel.set_yticks(steps(y_low, y_high))
    panel.set_xlabel(picture.x_label)
    panel.set_ylabel(picture.y_label)
    panel.grid(axis="y", color="#d8dee4")
    ends = []
    for number, line in enumerate(picture.lines):
        colour, style = _COLOURS[number % len(_COLOURS)], "-" if number < len(_COLOURS) else "--"
        marker = "o" if len(line.points) <= 24 else ""
        panel.plot(*zip(*line.points, strict=True), style, color=colour, marker=marker, markersize=4)
        ends.append((line.name, line.points[-1], colour))
    for number, (name, y) in enumerate(picture.levels, len(picture.lines)):
        colour = _COLOURS[number % len(_COLOURS)]
        panel.axhline(y, color=colour, linestyle=":")
        ends.append((name, (x_high, y), colour))
    if len(ends) < 2:
        return
    gap = (y_high - y_low) * 0.19 / (_height(picture) - 1.2)
    places = spread([y for _, (_, y), _ in ends], gap, y_low, y_high)
    beyond = math.exp(math.log(x_high) + 0.04 * math.log(x_high / x_low))
    for (name, point, colour), place in zip(ends, places, strict=True):
        panel.annotate(
            name,
            point,
            (beyond, place),
            color=colour,
            va="center",
            fontsize=9,
            fontweight="bold",
            annotation_clip=False,
            parse_math=False,
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.4, "relpos": (0, 0.5)},
        )


def _bars(panel: Any, picture: Bars) -> None:
    low, high = picture.x_range()
    names = [bar.name for bar in picture.bars]
    drawn = panel.barh(range(len(names)), [bar.value for bar in picture.bars], 0.55, color=_COLOURS[0])
    panel.bar_label(drawn, [bar.words for bar in picture.bars], padding=4, fontsize=9)
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    # A third more than the scale: the words stand beside the longest bar.
    panel.set_xlim(low, high * 1.35)
    panel.set_xticks(steps(low, high))
    panel.set_xlabel(picture.x_label)
