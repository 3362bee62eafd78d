"""Power cuts: a load's writes to a block device are logged, and the store is opened on what a cut may have left.

Each log comes from one load on a fresh file system. Cuts fall anywhere in it, the beginning of the file system and the
opening of the store included, and some fall into a recovery from an earlier cut. A seed repeats the load and the
choice of cuts; when a kernel writes what is up to it, so that a log differs a little from run to run.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.chaos.base import Check, Outcome, Progress, undisturbed
from kvstore.chaos.blocklog import Disk, Loss, Op, flushes, parse_log
from kvstore.chaos.inspect import Inspection, inspect
from kvstore.chaos.journal import Event, Word, read_journal
from kvstore.chaos.ledger import Ledger
from kvstore.chaos.load import MIB, write_until_killed
from kvstore.chaos.mounts import FileSystem, NotMounted, make_file_system, mounted, served
from kvstore.chaos.nursery import Nursery
from kvstore.chaos.tools import need_block_devices

BUDGET_BYTES = 7 * MIB
_IMAGE_BYTES = 48 * MIB
_STATES_PER_LOG = 80
_STEPS = (100, 500)
_LOSSES = ((Loss.TORN, 45), (Loss.WHOLE, 20), (Loss.ONE, 10), (Loss.NONE, 15), (Loss.ALL, 10))
_RECOVERIES_PER_LOG = 0.08
"""Share of a log's states from which the recovery is logged and cut again."""
_CUTS_PER_RECOVERY = 4
_PLANS_MAX = 3
"""How often states that a file system did not mount are replaced by others."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Power goes behind the entry of index `at`; `again` times more while the store recovers from it."""

    at: int
    loss: Loss
    again: int = 0


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all states of an attack share."""

    nursery: Nursery
    scratch: Path
    outcome: Outcome

    @property
    def image(self) -> Path:
        return self.scratch / "image"

    @property
    def target(self) -> Path:
        return self.scratch / "mount"

    @property
    def store(self) -> Path:
        return self.target / "store"


def power_cuts(
    states: int,
    *,
    seed: int,
    scratch: Path,
    progress: Progress,
    check: Check = undisturbed,
    no_sync: bool = False,
) -> Outcome:
    """`states` states after power cuts, over ext4 and xfs in turn. no_sync: the load's syncs do nothing, so that
    violations must be found."""
    need_block_devices()
    outcome = Outcome("powercut", seed, "states")
    begun = time.monotonic()
    shares = states_per_log(states)
    with Nursery(check) as nursery:
        bench = _Bench(nursery, scratch, outcome)
        for index, share in enumerate(shares):
            kind = list(FileSystem)[index % 2]
            _one_log(bench, kind, share, index, no_sync=no_sync, progress=progress, total=states)
    outcome.figures["logs"] = len(shares)
    outcome.seconds = time.monotonic() - begun
    return outcome


def states_per_log(states: int) -> list[int]:
    """How many states each log gives: all alike, within one, and as many logs of one file system as of the other."""
    logs = max(2, 2 * math.ceil(states / _STATES_PER_LOG / 2))
    shares = [states // logs + (index < states % logs) for index in range(logs)]
    return [share for share in shares if share]


def plan_cuts(ops: Sequence[Op], count: int, rng: random.Random) -> list[Cut]:
    """`count` states in all, in the log's order; those behind a cut in a recovery are among them."""
    ends = flushes(ops)
    cuts = []
    left = count
    while left:
        loss = rng.choices([loss for loss, _ in _LOSSES], [weight for _, weight in _LOSSES])[0]
        at = rng.choice(ends) if loss is Loss.NONE and ends else rng.randrange(len(ops))
        again = min(_CUTS_PER_RECOVERY, left - 1) if rng.random() < _RECOVERIES_PER_LOG else 0
        cuts.append(Cut(at, loss, again))
        left -= 1 + again
    return sorted(cuts, key=lambda cut: cut.at)


def ledger_at(events: Sequence[Event], position: int, *, before: Sequence[Event] = ()) -> Ledger:
    """What is owed after a cut at this length of the block log: what was said up to then, and all of `before`."""
    ledger = Ledger()
    ledger.apply(before)
    ledger.apply(event for event in events if event.position <= position and event.word is not Word.WRONG)
    return ledger


def _one_log(
    bench: _Bench, kind: FileSystem, states: int, index: int, *, no_sync: bool, progress: Progress, total: int
) -> None:
    outcome = bench.outcome
    rng = random.Random(f"{outcome.seed} {index}")
    make_file_system(kind, bench.image, size=_IMAGE_BYTES)
    first = bench.image.read_bytes()
    log, journal = bench.scratch / "block-log", bench.scratch / "journal"
    for old in (log, journal):
        old.unlink(missing_ok=True)
    with served(bench.image, bench.scratch, log=log) as device, mounted(device, bench.target):
        ended = bench.nursery.run(
            write_until_killed,
            {
                "directory": str(bench.store),
                "journal": str(journal),
                "block_log": str(log),
                "seed": rng.getrandbits(32),
                "first": 0,
                "budget": BUDGET_BYTES,
                "steps": rng.randint(*_STEPS),
                "threaded": False,
                "leave_open": rng.random() < 0.5,
                "no_sync": no_sync,
            },
        )
    events = read_journal(journal)
    if ended.trouble:
        outcome.blame(f"log {index} on {kind}", [f"the load {ended.trouble}"])
    outcome.blame(f"log {index} on {kind}", [event.text for event in events if event.word is Word.WRONG])
    ops = parse_log(log.read_bytes())
    outcome.acknowledged += ledger_at(events, ops[-1].end).acknowledged
    outcome.count("logged_writes", len(ops))
    disk = Disk(first, ops)
    until = outcome.rounds + states
    for _ in range(_PLANS_MAX):
        for cut in plan_cuts(ops, until - outcome.rounds, rng):
            _one_cut(bench, disk, ops, cut, events=events, where=f"log {index} on {kind}", rng=rng, kind=kind)
            progress(f"state {outcome.rounds:,} of {total:,}, {len(outcome.violations)} violations")
    if outcome.rounds < until:
        outcome.blame(
            f"log {index} on {kind}", [f"{until - outcome.rounds} of {states} states could not be mounted"]
        )


def _one_cut(
    bench: _Bench,
    disk: Disk,
    ops: Sequence[Op],
    cut: Cut,
    *,
    events: Sequence[Event],
    where: str,
    rng: random.Random,
    kind: FileSystem,
) -> None:
    _write_image(bench.image, disk.after_cut(cut.at, cut.loss, rng))
    before = [event for event in events if event.position <= ops[cut.at].end and event.word is not Word.WRONG]
    where = f"{where}, {cut.loss} cut behind entry {cut.at} of {len(ops)}"
    try:
        if cut.again:
            _cut_recovery(bench, before, cut, where=where, rng=rng, kind=kind)
        else:
            _check(bench, ledger_at(before, ops[cut.at].end), where, kind)
    except NotMounted:
        # It says something about the file system, and nothing about the store: other states take its place.
        bench.outcome.count(f"not mounted by {kind}")
    bench.outcome.count(f"{cut.loss} cuts")


def _cut_recovery(
    bench: _Bench, before: Sequence[Event], cut: Cut, *, where: str, rng: random.Random, kind: FileSystem
) -> None:
    """Recover from the image with its writes logged, and cut power again inside of that."""
    log, journal = bench.scratch / "recovery-log", bench.scratch / "recovery-journal"
    for old in (log, journal):
        old.unlink(missing_ok=True)
    first = bench.image.read_bytes()
    with served(bench.image, bench.scratch, log=log) as device, mounted(device, bench.target):
        mounted_at = log.stat().st_size
        found = inspect(
            bench.nursery,
            bench.store,
            budget=BUDGET_BYTES,
            close=rng.random() < 0.5,
            journal=journal,
            block_log=log,
        )
    ledger = Ledger()
    ledger.apply(before)
    _judge(bench, found, ledger, where, kind)
    ops = parse_log(log.read_bytes())
    events = read_journal(journal)
    disk = Disk(first, ops)
    for again in sorted(rng.randrange(len(ops)) for _ in range(cut.again if ops else 0)):
        loss = rng.choice((Loss.TORN, Loss.WHOLE, Loss.NONE))
        if loss is Loss.TORN and ops[again].end <= mounted_at:
            # xfs does not survive torn blocks of its own recovery; the store has not begun with its own.
            loss = Loss.WHOLE
        _write_image(bench.image, disk.after_cut(again, loss, rng))
        ledger = ledger_at(events, ops[again].end, before=before)
        _check(
            bench, ledger, f"{where}, then {loss} behind entry {again} of {len(ops)} of the recovery", kind
        )
        bench.outcome.count("cuts in a recovery")


def _check(bench: _Bench, ledger: Ledger, where: str, kind: FileSystem) -> None:
    with mounted(bench.image, bench.target):
        found = inspect(bench.nursery, bench.store, budget=BUDGET_BYTES, close=False)
    _judge(bench, found, ledger, where, kind)


def _judge(bench: _Bench, found: Inspection, ledger: Ledger, where: str, kind: FileSystem) -> None:
    outcome = bench.outcome
    outcome.blame(where, found.violations(ledger))
    outcome.rounds += 1
    outcome.checked += len(found.seen)
    outcome.count(f"states on {kind}")
    outcome.count("owed", len(ledger.owed))
    outcome.count("torn_bytes", found.torn_bytes)
    outcome.count("damaged_records", found.damaged_records)
    outcome.count("rebuilt", int(found.rebuilt))
    slowest = outcome.figures.get("slowest_open_seconds", 0.0)
    outcome.figures["slowest_open_seconds"] = round(max(slowest, found.open_seconds), 3)


def _write_image(path: Path, contents: bytearray) -> None:
    """In place: pages of the file that are there already cost nothing."""
    with path.open("r+b") as file:
        file.write(contents)
