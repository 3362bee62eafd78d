"""What a replay and a computation have to do: layer-tokens, and entries that index scans look at. Whole numbers, exact."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

from kvstore.plan.figures import Figures, Replay, Scan

REPLAYS_KEPT = 2048
"""Edges of one profile whose replays are not worked out anew: prompts part at few of them."""


def triangle(figures: Figures, span: int) -> int:
    """Layer-tokens of an exact replay of `span` tokens with entries read: layer l of L runs at the last (L - l)(W - 1) of
    them."""
    # The last layer runs at W-1 positions, the one before at twice as many, and so on, but none at more than the span:
    # `whole` of them need no more than it holds.
    rows, layers = figures.window_rows, figures.layer_count
    whole = min(span // rows, layers)
    return rows * whole * (whole + 1) // 2 + (layers - whole) * span


def seen(ratio: int, position: int) -> int:
    """Entries that the queries before `position` see in one layer: the sum of (p + 1) // ratio for p < position.

    Its steps never get smaller, so it is convex in `position`.
    """
    groups, left = divmod(position, ratio)
    return ratio * groups * (groups - 1) // 2 + groups * (left + 1)


def scanned(figures: Figures, start: int, end: int) -> int:
    """Entries that computing [start, end) in all layers looks at."""
    return scanned_before(figures, end) - scanned_before(figures, start)


def scanned_before(figures: Figures, position: int) -> int:
    """Entries that computing [0, position) in all layers looks at."""
    total = 0
    for scan in figures.scans:
        # `seen`, written out: a plan asks for little else.
        ratio = scan.ratio
        groups = position // ratio
        total += scan.layers * (ratio * groups * (groups - 1) // 2 + groups * (position % ratio + 1))
    return total


def replay_scanned(figures: Figures, start: int, end: int) -> int:
    """Entries that an exact replay of [start, end) looks at: a layer's queries run only where its output is needed, from
    end - (L - l - 1)(W - 1) on, and nowhere in the last layer."""
    total = 0
    for scan in figures.scans:
        ratio, reaches = scan.ratio, scan.reaches
        near = bisect_left(reaches, end - start)
        total += len(reaches) * seen(ratio, end)
        if start:
            total -= (len(reaches) - near) * seen(ratio, start)
        if near:
            groups, left = divmod(end, ratio)
            square, linear, constant = _twice_seen_before(scan, near, left)
            total -= (square * groups * groups + linear * groups + constant) // 2
    return total


def replay_to(figures: Figures, edge: int) -> Replay:
    """The exact replay that rebuilds the state at `edge`."""
    known = figures.replays.get(edge)
    if known is None:
        start = max(edge - figures.exact_replay_tokens, 0)
        known = Replay(
            start,
            triangle(figures, edge - start),
            replay_scanned(figures, start, edge),
            scanned_before(figures, edge),
        )
        if len(figures.replays) >= REPLAYS_KEPT:
            figures.replays.clear()
        figures.replays[edge] = known
    return known


@lru_cache(maxsize=4096)
def _twice_seen_before(scan: Scan, near: int, left: int) -> tuple[int, int, int]:
    """Twice the sum of seen(ratio, end - reach) over the first `near` reaches, as a polynomial in G: (of G squared, of G,
    the rest), where end = ratio x G + left."""
    ratio = scan.ratio
    square = linear = constant = 0
    for reach in scan.reaches[:near]:
        # The position is ratio x (G + shift) + rest, and `seen` of it ratio x g(g - 1)/2 + g(rest + 1) with g = G + shift.
        shift, rest = divmod(left - reach, ratio)
        square += ratio
        linear += ratio * (2 * shift - 1) + 2 * (rest + 1)
        constant += ratio * shift * (shift - 1) + 2 * shift * (rest + 1)
    return square, linear, constant
