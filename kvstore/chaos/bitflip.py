"""Single bits flipped in every file of a store: what is served is right or a miss.

Most flips fall into segment files below an open log, one per record and pass, and are followed by reads of everything.
The rest fall into one file of a closed store, by kind, which is then opened: a flip outside of the records may lose
nothing that was acknowledged.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.chaos import records
from kvstore.chaos.base import ChaosFailed, Check, Outcome, Progress, undisturbed
from kvstore.chaos.inspect import sightings
from kvstore.chaos.journal import Journal, policy_text, read_journal
from kvstore.chaos.ledger import Ledger, Sight
from kvstore.chaos.load import MIB, SEGMENT_BYTES
from kvstore.chaos.nursery import Nursery
from kvstore.chaos.starving import Starving
from kvstore.clock import SystemClock
from kvstore.errors import StoreDamaged
from kvstore.store import open_log
from kvstore.store.base import Place, RecordLog, Recovery

BUDGET_BYTES = 8 * MIB
_PAGE = 4096
_BATCHES = 24
_PASSES_PER_JOB = 20
_STARTS_PER_JOB = 50
_STARTS = (100, 5_000)
_STARTS_SHARE = 50
"""One flip in so many is followed by a start, within the limits above."""

# What a flip may cost. Of the records of a segment that was met itself, those that the flip touched are lost.
_NOTHING_LOST = ("catalogue", "footer", "footer, catalogue lost", "segment header", "unused")


class Target(NamedTuple):
    """Bytes [first, last) of a file. without_catalogue: the start must make do without it."""

    kind: str
    name: str
    first: int
    last: int
    without_catalogue: bool = False


def bit_flips(
    flips: int, *, seed: int, scratch: Path, progress: Progress, check: Check = undisturbed
) -> Outcome:
    """`flips` flips in all."""
    outcome = Outcome("bitflip", seed, "flips")
    begun = time.monotonic()
    rng = random.Random(seed)
    pristine, journal = scratch / "pristine", scratch / "journal"
    starts = min(flips, max(_STARTS[0], min(_STARTS[1], flips // _STARTS_SHARE)))
    with Nursery(check) as nursery:
        made = nursery.run(make_store, {"directory": str(pristine), "journal": str(journal)})
        if made.trouble:
            raise ChaosFailed(f"the store to damage could not be made: {made.trouble}")
        ledger = Ledger()
        ledger.apply(read_journal(journal))
        outcome.acknowledged = ledger.acknowledged
        shared = {"pristine": str(pristine), "copy": str(scratch / "copy"), "journal": str(journal)}

        def tell() -> None:
            progress(f"flip {outcome.rounds:,} of {flips:,}, {len(outcome.violations)} violations")

        for job, count in ((flip_below_open_log, flips - starts), (flip_and_start, starts)):
            _in_jobs(nursery, job, shared, count, outcome=outcome, rng=rng, tell=tell)
    outcome.seconds = time.monotonic() - begun
    return outcome


def _in_jobs(
    nursery: Nursery,
    job: Callable[[dict[str, Any], Callable[[], None]], Any],
    shared: dict[str, str],
    flips: int,
    *,
    outcome: Outcome,
    rng: random.Random,
    tell: Callable[[], None],
) -> None:
    """A start on damaged bytes may end a process, so that there are many of few flips each."""
    left = flips
    while left:
        seed = rng.getrandbits(32)
        ended = nursery.run(job, {**shared, "seed": seed, "flips": left})
        where = f"{job.__name__} with seed {seed} and {left} flips to go"
        if ended.trouble or ended.result is None:
            outcome.blame(where, [f"the reader {ended.trouble or 'gave no answer'}"])
            return
        done = ended.result
        outcome.blame(where, done["trouble"])
        outcome.rounds += done["flips"]
        outcome.checked += done["checked"]
        left -= done["flips"]
        for kind, counts in done["kinds"].items():
            known = outcome.figures.setdefault(kind, {})
            for name, count in counts.items():
                known[name] = known.get(name, 0) + count
        tell()


def make_store(arguments: dict[str, Any], opened: Any) -> int:
    """A job: several sealed segments, an open one that was closed in order, policies and uses."""
    with Journal(Path(arguments["journal"])) as journal:
        log, _ = _open(Path(arguments["directory"]))
        opened()
        work = Starving(log, journal, 0)
        for _ in range(_BATCHES):
            work.append()
        for namespace in range(records.NAMESPACES):
            log.put_policy(records.namespace_digest(namespace), policy_text(namespace))
        log.note_uses([(place, SystemClock().wall()) for place in work.places.values()])
        log.close()
        return len(work.places)


def flip_below_open_log(arguments: dict[str, Any], opened: Any) -> dict[str, Any]:
    """A job: passes over a fresh copy, in each of which one bit of every record's bytes is flipped at once (its header,
    payload or padding, with what lies before it), then everything is read."""
    rng = random.Random(arguments["seed"])
    copy = Path(arguments["copy"])
    counts = {"flips": 0, "served": 0, "missed": 0}
    trouble: list[str] = []
    checked = 0
    for _ in range(_PASSES_PER_JOB):
        if counts["flips"] >= arguments["flips"]:
            break
        _fresh_copy(Path(arguments["pristine"]), copy)
        log, recovery = _open(copy)
        known = {n: found for found in recovery.records if (n := records.number_of(found.key)) is not None}
        regions = record_regions(copy, {number: found.place for number, found in known.items()})
        wanted = arguments["flips"] - counts["flips"]
        chosen = rng.sample(sorted(regions), min(wanted, len(regions)))
        for number in chosen:
            name, first, last = regions[number]
            flip(copy / name, rng.randrange(first * 8, last * 8))
        counts["flips"] += len(chosen)
        seen, more = sightings(log, recovery)
        trouble += more
        for number, sight in seen.items():
            checked += 1
            counts["served" if sight is Sight.RIGHT else "missed"] += 1
            if sight is Sight.WRONG:
                trouble.append(f"record {number} was served with wrong bytes")
        log.close()
    return {
        "flips": counts["flips"],
        "checked": checked,
        "kinds": {"below an open log": counts},
        "trouble": trouble,
    }


def flip_and_start(arguments: dict[str, Any], opened: Any) -> dict[str, Any]:
    """A job: one bit of a closed store, and a start on it, again and again."""
    rng = random.Random(arguments["seed"])
    pristine, copy = Path(arguments["pristine"]), Path(arguments["copy"])
    ledger = Ledger()
    ledger.apply(read_journal(Path(arguments["journal"])))
    _fresh_copy(pristine, copy)
    log, recovery = _open(copy)
    kinds: dict[str, list[Target]] = {}
    for target in _targets(copy, recovery):
        kinds.setdefault(target.kind, []).append(target)
    log.close()
    counts: dict[str, dict[str, int]] = {}
    trouble: list[str] = []
    checked = done = 0
    for _ in range(min(_STARTS_PER_JOB, arguments["flips"])):
        done += 1
        _fresh_copy(pristine, copy)
        kind = rng.choice(sorted(kinds))
        target = rng.choice(kinds[kind])
        bit = rng.randrange(target.first * 8, target.last * 8)
        count = counts.setdefault(kind, {"flips": 0, "served": 0, "missed": 0, "refused": 0, "rebuilt": 0})
        count["flips"] += 1
        flip(copy / target.name, bit)
        if target.without_catalogue:
            for path in copy.glob("catalog*"):
                path.unlink()
        where = f"{kind}, bit {bit} of {target.name}"
        try:
            log, recovery = _open(copy)
        except StoreDamaged as error:
            count["refused"] += 1
            if kind != "identity":
                trouble.append(f"{where}: the start was refused: {error}")
            continue
        seen, more = sightings(log, recovery)
        log.close()
        checked += len(seen)
        trouble += [f"{where}: {line}" for line in more]
        count["rebuilt"] += int(recovery.rebuilt)
        right = sum(sight is Sight.RIGHT for sight in seen.values())
        count["served"] += right
        count["missed"] += len(ledger.owed) - right
        policies = {
            i: recovery.policies.get(records.namespace_digest(i), "") for i in range(records.NAMESPACES)
        }
        found = ledger.violations(seen, policies)
        if kind not in _NOTHING_LOST:
            # The flip may have met the record itself, or the page that describes it and its neighbours.
            found = [line for line in found if not line.startswith("acknowledged and not")]
        trouble += [f"{where}: {line}" for line in found]
    return {"flips": done, "checked": checked, "kinds": counts, "trouble": trouble}


def record_regions(store: Path, places: dict[int, Place]) -> dict[int, tuple[str, int, int]]:
    """(file, first, last) of each record: from the end of the one before it in its segment to its own end."""
    names = segment_names(store)
    regions = {}
    ends: dict[int, int] = {}
    for number, place in sorted(places.items(), key=lambda pair: (pair[1].segment_id, pair[1].offset)):
        first, last = ends.get(place.segment_id, 0), place.offset + place.length
        ends[place.segment_id] = last
        if last > first:
            regions[number] = (names[place.segment_id], first, last)
    return regions


def segment_names(store: Path) -> dict[int, str]:
    return {int(path.stem.removeprefix("segment-"), 16): path.name for path in store.glob("segment-*.log")}


def _targets(store: Path, recovery: Recovery) -> list[Target]:
    """Where a flip can fall, by kind. What lies behind the last record of a segment is its footer, or unused."""
    targets = [
        Target("catalogue", path.name, 0, path.stat().st_size)
        for path in store.glob("catalog*")
        if path.stat().st_size
    ]
    targets.append(Target("identity", "identity", 0, (store / "identity").stat().st_size))
    places = {
        number: found.place
        for found in recovery.records
        if (number := records.number_of(found.key)) is not None
    }
    regions = record_regions(store, places)
    ends: dict[str, int] = {}
    for name, first, last in regions.values():
        ends[name] = max(ends.get(name, 0), last)
        targets.append(Target("record", name, max(first, _PAGE), last))
        targets.append(Target("record, catalogue lost", name, max(first, _PAGE), last, True))
    for name, end in ends.items():
        size = (store / name).stat().st_size
        targets.append(Target("segment header", name, 0, _PAGE))
        targets.append(Target("segment header, catalogue lost", name, 0, _PAGE, True))
        tail = _written_end(store / name, size)
        if end < tail:
            targets.append(Target("footer", name, end, tail))
            targets.append(Target("footer, catalogue lost", name, end, tail, True))
    return [target for target in targets if target.first < target.last]


def _written_end(path: Path, size: int) -> int:
    """Where the last byte that is not zero ends."""
    return min(size, len(path.read_bytes().rstrip(b"\0")))


def flip(path: Path, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ 1 << bit % 8
        file.seek(bit // 8)
        file.write(bytes([byte]))


def _open(directory: Path) -> tuple[RecordLog, Recovery]:
    return open_log(directory, budget_bytes=BUDGET_BYTES, segment_bytes=SEGMENT_BYTES, clock=SystemClock())


def _fresh_copy(pristine: Path, copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(pristine, copy)
