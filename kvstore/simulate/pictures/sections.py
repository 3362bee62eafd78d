"""Rows to pictures: what was simulated, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.simulate.pictures.base import Bar, Bars, Line, Lines, Section
from kvstore.simulate.reuse import Reuse
from kvstore.units import parse_time

Values = dict[str, Any]
"""One of `rows[]`."""

TIMES = (
    (0.01, "10 ms"),
    (0.1, "0.1 s"),
    (1.0, "1 s"),
    (10.0, "10 s"),
    (60.0, "1 min"),
    (600.0, "10 min"),
    (3600.0, "1 h"),
    (21_600.0, "6 h"),
    (86_400.0, "1 d"),
    (604_800.0, "7 d"),
    (2_592_000.0, "30 d"),
)
_RATE = "token hit rate, %"


def sections(rows: Sequence[Values], log: Values, reuse: Reuse, advice: Values | None) -> list[Section]:
    """In the order of a page. `advice`: the recommendation; the states at no edge that it compares with have a bar too."""
    by_ttl = [row for row in rows if row["ttl"] is not None]
    by_size = [row for row in rows if row["ttl"] is None]
    found = [_sizes(by_size, log), _reuse(reuse), _ttl(by_ttl)]
    return [each for each in found if each is not None] + _windows(rows, advice) + _writes(rows)


def _sizes(rows: Sequence[Values], log: Values) -> Section | None:
    """None where no row has a limit."""
    limited = [row for row in rows if row["capacity_blocks"] is not None]
    if not limited:
        return None
    footprint = log["footprint_blocks"]
    unlimited = [row for row in rows if row["capacity_blocks"] is None]
    names = _Names(rows, ("policy", "windows", "admission"))
    lines: dict[str, list[tuple[float, float]]] = {}
    ticks: dict[float, str] = {}
    for row in limited:
        x = 100.0 * row["capacity_blocks"] / footprint
        lines.setdefault(names.of(row), []).append((x, row["token_hit_rate"]))
        ticks.setdefault(x, row["size"])
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    by_name: dict[str, dict[str, float]] = {}
    for row in rows:
        by_name.setdefault(names.of(row), {})[row["size"]] = row["token_hit_rate"]
    levels = {names.of(row): row["token_hit_rate"] for row in unlimited}
    return Section(
        "sizes",
        "Hit rate by size",
        f"How much of all input tokens was held, against the size of the store: shares of the {footprint:,} different blocks "
        "of the log, on a logarithmic scale. A dotted level has no limit.",
        Lines(
            "share of all blocks of the log",
            _RATE,
            tuple(sorted(ticks.items())),
            tuple(Line(name, tuple(sorted(points))) for name, points in lines.items()),
            tuple(levels.items()),
        ),
        ("policy" if names.is_policy else "states kept", *sizes),
        tuple((name, *(_rate_at(rates, size) for size in sizes)) for name, rates in by_name.items()),
    )


def _rate_at(rates: dict[str, float], size: str) -> str:
    return _percent(rates[size]) if size in rates else "-"


def _ttl(rows: Sequence[Values]) -> Section | None:
    if not rows:
        return None
    names = _Names(rows, ("policy", "size", "windows", "admission"))
    lines: dict[str, list[tuple[float, float]]] = {}
    ticks: dict[float, str] = {}
    for row in rows:
        seconds = parse_time(row["ttl"], name="--ttl")
        lines.setdefault(names.of(row), []).append((seconds, row["token_hit_rate"]))
        ticks.setdefault(seconds, row["ttl"])
    since = "its last use" if rows[0]["ttl_from"] == "use" else "it was stored"
    return Section(
        "ttl",
        "Hit rate by retention",
        f"How much of all input tokens was held when a block is kept for so long since {since}. Held: the mean over the log's "
        "time, in percent of all its blocks.",
        Lines(
            f"kept since {since}",
            _RATE,
            tuple(sorted(ticks.items())),
            tuple(Line(name, tuple(sorted(points))) for name, points in lines.items()),
        ),
        ("kept for", "policy", "size", *names.extra, "hit rate", "held"),
        tuple(
            (
                row["ttl"],
                row["policy"],
                row["size"],
                *(row[each] or "-" for each in names.extra),
                _percent(row["token_hit_rate"]),
                _percent(row["held_share"]),
            )
            for row in rows
        ),
    )


def _reuse(reuse: Reuse) -> Section | None:
    if not reuse.reuses:
        return None
    low, high = reuse.curve[0][0], reuse.curve[-1][0]
    return Section(
        "reuse",
        "Reuse intervals",
        f"Of {reuse.reuses:,} accesses to a block seen before ({_percent(reuse.reuse_rate)} of all), how many came within so "
        f"long of the access before: {_quantiles(reuse)}. {_percent(reuse.once_rate)} of the blocks are asked for once.",
        Lines(
            "time since the access before",
            "accesses within, %",
            tuple(each for each in TIMES if low <= each[0] <= high),
            (Line("reuses", reuse.curve),),
        ),
        ("interval", "accesses within"),
        tuple(
            (_time(seconds), _percent(share))
            for seconds, share in (*reuse.within, (reuse.longest_seconds, 100.0))
        ),
    )


def _quantiles(reuse: Reuse) -> str:
    return ", ".join(f"{percent} % within {_time(seconds)}" for percent, seconds in reuse.quantiles)


def _windows(rows: Sequence[Values], advice: Values | None) -> list[Section]:
    """One for each policy, size and retention that window states were compared at."""
    places: dict[tuple[Any, ...], list[Values]] = {}
    for row in rows:
        if row["windows"] is not None:
            here = places.setdefault(
                (row["policy"], row["capacity_blocks"], row["ttl"], row["admission"]), []
            )
            # Without a limit all sizes are one.
            if row["windows"] not in {each["windows"] for each in here}:
                here.append(row)
    found = []
    several = len({row["admission"] for row in rows}) > 1
    for number, here in enumerate(places.values()):
        told = ("policy", "size", "ttl", *(("admission",) if several else ()))
        where = ", ".join(here[0][each] for each in told if here[0][each] is not None)
        replay = here[0]["replay"]
        bars = [
            Bar(row["windows"], row["tokens_saved_rate"], _percent(row["tokens_saved_rate"]) + _weight(row))
            for row in here
        ]
        has_zero = replay == "exact" and "zero" in {bar.name for bar in bars}
        if advice is not None and advice["where"] == where and not has_zero:
            rate = advice["zero_with_exact_replay"]["tokens_saved_rate"]
            bars.append(Bar("zero, exact replays", rate, f"{_percent(rate)}, 0 B/token"))
        cost = {
            "none": "A hit ends at a state that is kept.",
            "exact": "What is missing is replayed exactly, and what the replay computes is not saved.",
            "bounded": "What is missing is replayed over the last window only, and what that computes is not saved.",
        }[replay]
        found.append(
            Section(
                f"windows-{number + 1}",
                f"Window states at {where}",
                f"Input tokens that need not be computed, by which window states are kept. {cost} Bytes are those of states "
                "written, per token of the blocks written.",
                Bars("input tokens not computed, %", tuple(bars)),
                ("states kept", "not computed", "B/token", "states/request", "restored", "state from"),
                tuple(
                    (
                        row["windows"],
                        _percent(row["tokens_saved_rate"]),
                        "-"
                        if row["state_bytes_per_token"] is None
                        else f"{row['state_bytes_per_token']:,.0f}",
                        f"{row['states_per_request']:.2f}",
                        _percent(row["restored_rate"]),
                        sources_words(row["state_sources"]),
                    )
                    for row in here
                ),
            )
        )
    return found


def _writes(rows: Sequence[Values]) -> list[Section]:
    """Where rows differ in what is written, or a disk was simulated, and a model says what that weighs."""
    weighed = [row for row in rows if row["written_bytes_per_day"] is not None]
    on_disk = any(row.get("device_bytes_per_day") is not None for row in weighed)
    if len({row["admission"] for row in weighed}) < 2 and not on_disk:
        return []
    names = _Names(weighed, ("policy", "size", "ttl", "windows", "admission"))
    lives = any(row.get("drive_years") is not None for row in weighed)
    return [
        Section(
            "writes",
            "What is written",
            "Bytes of blocks and states that are written to the drive in a day of the log, by which new blocks are written.",
            Bars(
                "GB written a day",
                tuple(
                    Bar(
                        names.of(row),
                        row["written_bytes_per_day"] / 1e9,
                        f"{row['written_bytes_per_day'] / 1e9:,.1f} GB",
                    )
                    for row in weighed
                ),
            ),
            (
                "case",
                "hit rate",
                "GB written a day",
                *(("GB a day on the device", "times the payload") if on_disk else ()),
                *(("years of the drive",) if lives else ()),
            ),
            tuple(
                (
                    names.of(row),
                    _percent(row["token_hit_rate"]),
                    f"{row['written_bytes_per_day'] / 1e9:,.1f}",
                    *(_device(row) if on_disk else ()),
                    *((_years(row),) if lives else ()),
                )
                for row in weighed
            ),
        )
    ]


def _device(row: Values) -> tuple[str, str]:
    daily, times = row.get("device_bytes_per_day"), row.get("write_amplification")
    return (
        "-" if daily is None else f"{daily / 1e9:,.1f}",
        "-" if times is None else f"{times:.3f}",
    )


def _years(row: Values) -> str:
    years = row.get("drive_years")
    return "-" if years is None else f"{years:.1f}"


class _Names:
    """What tells lines apart: those of the columns that differ, the first where none does. `extra`: what a table shows of
    them beside policy and size."""

    def __init__(self, rows: Sequence[Values], columns: tuple[str, ...]) -> None:
        differ = [each for each in columns if len({row[each] for row in rows}) > 1]
        self._columns = differ or [columns[0]]
        self.is_policy = self._columns[0] == "policy"
        self.extra = tuple(each for each in differ if each not in ("policy", "size"))

    def of(self, row: Values) -> str:
        return " ".join(str(row[each]) for each in self._columns if row[each] is not None)


def sources_words(sources: dict[str, float] | None) -> str:
    """Percent of requests, those that there are."""
    if sources is None:
        return "-"
    return ", ".join(f"{name} {share:.1f} %" for name, share in sources.items() if share)


def _weight(row: Values) -> str:
    each = row["state_bytes_per_token"]
    return "" if each is None else f", {each:,.0f} B/token"


def _percent(value: float) -> str:
    return f"{value:.2f} %"


def _time(seconds: float) -> str:
    for size, unit in ((86_400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
