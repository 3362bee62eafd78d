"""What is compared with what, and from when on it is enough. Pure: numbers in, rows out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.bench.pairs import spread

OURS, RAW = "kvstore", "raw disk"
TIMES_BEST = 2.0
OF_RAW = 0.95
MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run one store. `rival`: whose requirements it needs, empty for none. `threads`: of the client.
    `uncounted`: tiers in which the bars are not about it; `why_not` says why its row is there all the same."""

    name: str
    module: str
    tiers: tuple[str, ...] = ("memory", "disk")
    rival: str = ""
    threads: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    uncounted: tuple[str, ...] = ()
    why_not: str = ""


CONTENDERS = (
    Contender(OURS, "store_kvstore"),
    Contender(RAW, "store_raw", tiers=("disk",), threads=1),
    Contender("LMCache, its default", "store_lmcache_driven", rival="lmcache"),
    Contender("LMCache, shared memory", "store_lmcache", rival="lmcache", threads=1, options={"way": "shm"}),
    Contender(
        "LMCache, by socket",
        "store_lmcache",
        tiers=("memory",),
        rival="lmcache",
        threads=1,
        options={"way": "pickle"},
    ),
    Contender("Mooncake, TCP", "store_mooncake", rival="mooncake"),
    Contender(
        "AIBrix",
        "store_aibrix",
        rival="aibrix",
        uncounted=("memory",),
        why_not="its memory tier lies in the client's own process and is shared with nobody",
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """`phase`: of a turn. `notes`: all that is not like for like in it, for the table's reader."""

    name: str
    tier: str
    phase: str
    raw: bool
    notes: tuple[str, ...]


_STRONGER = "kvstore is asked for DURABLE here too; the others acknowledge what is in memory (AIBrix on disk: in the page cache)"
_CHECKED = "kvstore's client compares checksums; of the others the bench does it (XXH3, block by block, as they come)"

LINES = (
    Line(
        "memory put, ACCEPTED",
        "memory",
        "put",
        False,
        (
            "kvstore acknowledges what others can read from its memory, as the others do; it goes on writing it to the disk meanwhile",
        ),
    ),
    Line(
        "memory get, verified",
        "memory",
        "get_verified",
        False,
        (_CHECKED, "every store was read once before, so that kvstore's blocks are in its memory"),
    ),
    Line(
        "memory get, not verified",
        "memory",
        "get",
        False,
        ("what the others do by themselves; kvstore with its client's check switched off",),
    ),
    Line("disk put, ACCEPTED", "disk", "put", True, (_STRONGER,)),
    Line(
        "disk put, DURABLE",
        "disk",
        "put_durable",
        True,
        (
            "the others: all put, then waited for until all is in files, then one syncfs; kvstore: a sync before each prompt "
            "is acknowledged; raw: one for every 32 MiB. The others have it easier",
            "Mooncake writes to disk at a heartbeat of 1 s, the shortest that it has",
        ),
    ),
    Line(
        "disk get, cold, verified",
        "disk",
        "get_verified",
        True,
        (
            _CHECKED,
            "stores are started again and the page cache is dropped before; AIBrix keeps its tables in memory (192 MiB), since "
            "it does not find them all again in the same process",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One contender's answer in one round: bytes per second of each phase, or why there are none."""

    contender: str
    tier: str
    round: int
    rates: Mapping[str, float]
    failed: str = ""


def order(contenders: Sequence[Contender], tier: str, number: int) -> list[Contender]:
    """Whose turn it is in round `number`: A B C D, then D C B A, so that what drifts favours nobody."""
    taking_part = [each for each in contenders if tier in each.tiers]
    return taking_part[:: 1 if number % 2 == 0 else -1]


def compare(line: Line, contenders: Sequence[Contender], turns: Sequence[Turn]) -> dict[str, Any]:
    """The line's table: a row for each contender of the tier, also for those that have no number, and the verdict."""
    taking_part = order(contenders, line.tier, 0)
    seen = {each.name: _samples(line, each.name, turns) for each in taking_part}
    rows = [_row(line, each, seen, turns) for each in taking_part if each.name != RAW or line.raw]
    counted = [row for row in rows if row["counts"] and "mb_per_second" in row]
    best = max(counted, key=lambda row: row["mb_per_second"], default=None)
    return {
        "line": line.name,
        "rows": rows,
        "notes": list(line.notes),
        "best": None if best is None else best["name"],
        **_verdict(line, seen, None if best is None else best["name"]),
    }


def _samples(line: Line, name: str, turns: Sequence[Turn]) -> dict[int, float]:
    return {
        turn.round: turn.rates[line.phase]
        for turn in turns
        if turn.contender == name and turn.tier == line.tier and line.phase in turn.rates
    }


def _row(
    line: Line, contender: Contender, seen: Mapping[str, dict[int, float]], turns: Sequence[Turn]
) -> dict[str, Any]:
    name, samples = contender.name, seen[contender.name]
    counts = name not in (OURS, RAW) and line.tier not in contender.uncounted
    row: dict[str, Any] = {
        "name": name,
        "counts": counts,
        "threads": contender.threads,
        "rounds": len(samples),
    }
    if line.tier in contender.uncounted:
        row["why_not"] = contender.why_not
    reasons = [
        turn.failed for turn in turns if turn.contender == name and turn.tier == line.tier and turn.failed
    ]
    if reasons:
        row["failed"] = reasons[0]
    if not samples:
        return {"failed": "it took no turn", **row}
    found = spread([rate / MEGABYTE for rate in samples.values()])
    row |= {"mb_per_second": found.median, "interval": [found.low, found.high]}
    ratios = _ratios(seen, name)
    if name != OURS and ratios:
        ours = spread(ratios)
        row |= {"kvstore_times": ours.median, "kvstore_times_interval": [ours.low, ours.high]}
    return row


def _ratios(seen: Mapping[str, dict[int, float]], name: str) -> list[float]:
    """Ours by theirs, of the rounds in which both have a number."""
    ours, theirs = seen.get(OURS, {}), seen[name]
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def _verdict(line: Line, seen: Mapping[str, dict[int, float]], best: str | None) -> dict[str, Any]:
    """met: None where there is nothing to compare with. On disk the lesser of both bars is enough."""
    of_best = _ratios(seen, best) if best is not None else []
    times_best = statistics.median(of_best) if of_best else None
    of_raw = _ratios(seen, RAW) if line.raw else []
    share = statistics.median(of_raw) if of_raw else None
    found = [
        reached
        for reached in (
            None if times_best is None else times_best >= TIMES_BEST,
            None if share is None else share >= OF_RAW,
        )
        if reached is not None
    ]
    return {
        "times_best": times_best,
        "of_raw": share,
        "bar": f"{TIMES_BEST:g} x the best" + (f", or {OF_RAW:g} of raw" if line.raw else ""),
        # Without a rival to compare with, the raw disk alone does not decide.
        "met": None if times_best is None else any(found),
    }
