"""What a picture shows, whatever it is drawn with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
Tick = tuple[float, str]


@dataclass(frozen=True, slots=True)
class Line:
    """Points ascending in x, which is above 0."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """Percent against a logarithmic x. `levels`: heights that do not depend on x. At least one line has a point."""

    x_label: str
    y_label: str
    x_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    levels: tuple[tuple[str, float], ...] = ()

    def x_range(self) -> tuple[float, float]:
        """Never empty."""
        values = [x for line in self.lines for x, _ in line.points]
        low, high = min(values), max(values)
        return (low, high) if low < high else (low / 2, high * 2)

    def y_range(self) -> tuple[float, float]:
        """From 0, unless all that is to be seen lies far above."""
        values = [y for line in self.lines for _, y in line.points] + [y for _, y in self.levels]
        low, high = min(values), max(values)
        step = nice_step(high - low if low > 0.6 * high else high)
        bottom = math.floor(low / step) * step if low > 0.6 * high else 0.0
        return bottom, max(math.ceil(high / step - 1e-9) * step, bottom + step)


@dataclass(frozen=True, slots=True)
class Bar:
    """`words`: the value as it is to be read."""

    name: str
    value: float
    words: str


@dataclass(frozen=True, slots=True)
class Bars:
    """Percent, from 0."""

    x_label: str
    bars: tuple[Bar, ...]

    def x_range(self) -> tuple[float, float]:
        high = max((bar.value for bar in self.bars), default=0.0)
        step = nice_step(high)
        return 0.0, max(math.ceil(high / step - 1e-9) * step, step)


@dataclass(frozen=True, slots=True)
class Section:
    """A picture with its numbers. `key` is a name for files and links: letters, digits and hyphens."""

    key: str
    title: str
    words: str
    picture: Lines | Bars
    head: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]


def nice_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that a span has two to six of them."""
    if span <= 0:
        return 1.0
    scale: float = 10.0 ** math.floor(math.log10(span / 4))
    return next(scale * each for each in (1, 2, 5, 10) if scale * each * 6 >= span)


def steps(low: float, high: float) -> list[float]:
    """Ticks from `low`, a multiple of the step, to `high`."""
    step = nice_step(high - low)
    return [low + step * n for n in range(int((high - low) / step + 1e-9) + 1)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near to those wanted as it goes, in their order, at least `gap` apart and within [low, high] while all have
    room there."""
    order = sorted(range(len(wanted)), key=lambda each: wanted[each])
    places = list(wanted)
    floor = low
    for each in order:
        places[each] = floor = max(wanted[each], floor)
        floor += gap
    ceiling = high
    for each in reversed(order):
        places[each] = min(places[each], ceiling)
        ceiling = places[each] - gap
    return places
