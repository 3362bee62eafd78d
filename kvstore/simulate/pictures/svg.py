"""Pictures as SVG, for a given width in pixels. Colours are classes of the page."""

from __future__ import annotations

import math
from html import escape

from kvstore.simulate.pictures.base import Bars, Lines, spread, steps

COLOURS = 8
LETTER = 6.9
"""Pixels that a letter of a label takes, at most."""

_LINE_GAP = 15.0
_TOP, _BOTTOM, _LEFT = 26.0, 46.0, 40.0
_BAR_ROW, _BAR_HEIGHT = 42.0, 15.0


def drawn(picture: Lines | Bars, *, width: int, title: str) -> str:
    """An `svg` element with text of 12 pixels at that width."""
    body, height = _lines(picture, width) if isinstance(picture, Lines) else _bars(picture, width)
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(title)}">{"".join(body)}</svg>'
    )


def _text(x: float, y: float, words: str, *, kind: str = "t", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _lines(picture: Lines, width: int) -> tuple[list[str], float]:
    names = [line.name for line in picture.lines] + [name for name, _ in picture.levels]
    # One line needs no name: the title has it.
    is_named = len(names) > 1
    beside = max(map(len, names)) * LETTER + 22
    is_beside = is_named and beside <= width * 0.4
    right = width - (beside if is_beside else 16.0)
    plot = width * (0.8 if width < 500 else 0.5)
    if is_beside:
        plot = max(plot, _TOP + _BOTTOM + len(names) * _LINE_GAP)
    bottom = plot - _BOTTOM
    height = plot + (8 + len(names) * _LINE_GAP if is_named and not is_beside else 0)
    (x_low, x_high), (y_low, y_high) = picture.x_range(), picture.y_range()

    def across(x: float) -> float:
        return _LEFT + (right - _LEFT) * math.log(x / x_low) / math.log(x_high / x_low)

    def up(y: float) -> float:
        return bottom - (bottom - _TOP) * (y - y_low) / (y_high - y_low)

    body = [_text(0, 12, picture.y_label, kind="t axis")]
    for tick in steps(y_low, y_high):
        body.append(_rule("grid", _LEFT, up(tick), right, up(tick)))
        body.append(_text(_LEFT - 6, up(tick) + 4, f"{tick:.6g}", anchor="end"))
    taken = -math.inf
    for x, words in picture.x_ticks:
        half = len(words) * LETTER / 2
        if across(x) - half < taken:
            continue
        taken = across(x) + half + 6
        body.append(_rule("grid", across(x), bottom, across(x), bottom + 5))
        body.append(_text(across(x), bottom + 18, words, anchor="middle"))
    body.append(_text((_LEFT + right) / 2, plot - 6, picture.x_label, kind="t axis", anchor="middle"))
    ends = [(across(line.points[-1][0]), up(line.points[-1][1])) for line in picture.lines]
    ends += [(right, up(y)) for _, y in picture.levels]
    for number, line in enumerate(picture.lines):
        kind = _kind(number)
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in line.points)
        body.append(f'<polyline class="line {kind}" points="{path}"/>')
        if len(line.points) <= 24:
            body += [
                f'<circle class="dot {kind}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.8"/>'
                for x, y in line.points
            ]
    for number, (_, y) in enumerate(picture.levels, len(picture.lines)):
        body.append(_rule(f"line level {_kind(number)}", _LEFT, up(y), right, up(y)))
    if is_beside:
        places = spread([y for _, y in ends], _LINE_GAP, _TOP, bottom)
        for number, (name, (x, y), place) in enumerate(zip(names, ends, places, strict=True)):
            body.append(_rule(f"leader {_kind(number)}", x + 3, y, right + 12, place))
            body.append(_text(right + 15, place + 4, name, kind=f"name {_kind(number)}"))
    elif is_named:
        # As the lines end, from the top down.
        order = sorted(range(len(names)), key=lambda number: ends[number][1])
        for row, number in enumerate(order, 1):
            y = plot + row * _LINE_GAP
            is_level = number >= len(picture.lines)
            body.append(_rule(f"line {'level ' if is_level else ''}{_kind(number)}", 8, y, 30, y))
            body.append(_text(36, y + 4, names[number], kind=f"name {_kind(number)}"))
    return body, height


def _kind(number: int) -> str:
    """Past the last colour they come again, with dashes."""
    return f"c{number % COLOURS}" + (" again" if number >= COLOURS else "")


def _bars(picture: Bars, width: int) -> tuple[list[str], float]:
    # Name and words share a line where all have room.
    together = all((len(bar.name) + len(bar.words) + 2) * LETTER < width - 24 for bar in picture.bars)
    row = _BAR_ROW + (0 if together else _LINE_GAP)
    bottom = row * len(picture.bars) + 4
    height = bottom + _BOTTOM - 4
    low, high = picture.x_range()
    left, right = 2.0, width - 16.0

    def across(x: float) -> float:
        return left + (right - left) * (x - low) / (high - low)

    body = []
    for tick in steps(low, high):
        anchor = "start" if tick == low else "middle"
        body.append(_rule("grid", across(tick), bottom, across(tick), bottom + 5))
        body.append(_text(across(tick), bottom + 18, f"{tick:.6g}", anchor=anchor))
    body.append(_rule("grid", left, 0, left, bottom))
    body.append(_text((left + right) / 2, height - 2, picture.x_label, kind="t axis", anchor="middle"))
    for number, bar in enumerate(picture.bars):
        top = number * row
        body.append(_text(left + 4, top + 14, bar.name, kind="name"))
        if together:
            body.append(_text(right, top + 14, bar.words, anchor="end"))
        else:
            top += _LINE_GAP
            body.append(_text(left + 4, top + 14, bar.words))
        body.append(
            f'<rect class="bar" x="{left:.1f}" y="{top + 19:.1f}" width="{max(across(bar.value) - left, 0.5):.1f}" '
            f'height="{_BAR_HEIGHT:.0f}"/>'
        )
    return body, height
