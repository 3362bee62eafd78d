"""Opens a store after a blow and tells all that it holds, in a child process: a job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.chaos import records
from kvstore.chaos.journal import Journal, Word
from kvstore.chaos.ledger import Ledger, Sight
from kvstore.chaos.load import SEGMENT_BYTES
from kvstore.chaos.nursery import Ended, Nursery
from kvstore.clock import SystemClock
from kvstore.store import open_log
from kvstore.store.base import RecordLog, Recovery

_READ_AT_ONCE = 64


@dataclass(slots=True)
class Inspection:
    """What one opening found. `trouble`: what may not be whatever the ledger says, one line each."""

    seen: dict[int, Sight] = field(default_factory=dict)
    policies: dict[int, str] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    rebuilt: bool = False
    damaged_records: int = 0
    torn_bytes: int = 0
    open_seconds: float = 0.0

    def violations(self, ledger: Ledger) -> list[str]:
        return [*self.trouble, *ledger.violations(self.seen, self.policies)]


def inspect(
    nursery: Nursery,
    directory: Path,
    *,
    budget: int,
    close: bool = True,
    journal: Path | None = None,
    block_log: Path | None = None,
) -> Inspection:
    """Open the store in a child, read everything that it tells about, and leave in order or without a word.

    journal, block_log: say there what the opening found, as the load does.
    """
    ended = nursery.run(
        look,
        {
            "directory": str(directory),
            "budget": budget,
            "close": close,
            "journal": str(journal) if journal else "",
            "block_log": str(block_log) if block_log else "",
        },
    )
    return inspection_of(ended)


def inspection_of(ended: Ended) -> Inspection:
    if ended.trouble or ended.result is None:
        return Inspection(trouble=[f"the store could not be opened and read: {ended.trouble or 'no answer'}"])
    found = dict(ended.result)
    return Inspection(
        seen={int(number): Sight(sight) for number, sight in found.pop("seen").items()},
        policies={int(namespace): text for namespace, text in found.pop("policies").items()},
        **found,
    )


def look(arguments: dict[str, Any], opened: Any) -> dict[str, Any]:
    """The job behind `inspect`."""
    directory = Path(arguments["directory"])
    begun = time.monotonic()
    log, recovery = open_log(
        directory, budget_bytes=arguments["budget"], segment_bytes=SEGMENT_BYTES, clock=SystemClock()
    )
    seconds = time.monotonic() - begun
    seen, trouble = sightings(log, recovery)
    if arguments["journal"]:
        block_log = Path(arguments["block_log"]) if arguments["block_log"] else None
        with Journal(Path(arguments["journal"]), block_log=block_log) as journal:
            journal.say(Word.FOUND, [n for n, sight in seen.items() if sight is Sight.RIGHT])
    opened()
    left = sorted(path.name for path in directory.iterdir() if path.name.endswith((".tmp", ".opening")))
    if left:
        trouble.append(f"temporary files remain after a start: {', '.join(left)}")
    try:
        log.check_integrity()
    except AssertionError as error:
        trouble.append(f"the books are wrong: {error}")
    if arguments["close"]:
        log.close()
    return {
        "seen": {number: str(sight) for number, sight in seen.items()},
        "policies": _policies(recovery.policies),
        "trouble": trouble,
        "rebuilt": recovery.rebuilt,
        "damaged_records": recovery.damaged_records,
        "torn_bytes": recovery.torn_bytes,
        "open_seconds": seconds,
    }


def sightings(log: RecordLog, recovery: Recovery) -> tuple[dict[int, Sight], list[str]]:
    """How each record that recovery told about reads back, and what cannot be said by number."""
    seen: dict[int, Sight] = {}
    trouble = []
    known = []
    for found in recovery.records:
        number = records.number_of(found.key)
        if number is None:
            trouble.append(f"recovery told about a key that nobody made: {found.key.hex()}")
        elif number in seen:
            trouble.append(f"recovery told about record {number} twice")
        else:
            seen[number] = Sight.RIGHT if records.same_description(found, number) else Sight.WRONG
            known.append((number, found))
    for first in range(0, len(known), _READ_AT_ONCE):
        group = known[first : first + _READ_AT_ONCE]
        answers = log.read([records.wanted(number, found.place) for number, found in group])
        for (number, _), answer in zip(group, answers, strict=True):
            if answer is None:
                seen[number] = Sight.MISS
            elif answer != records.payload_of(number):
                seen[number] = Sight.WRONG
    return seen, trouble


def _policies(policies: Mapping[Any, str]) -> dict[int, str]:
    numbers = {records.namespace_digest(i): i for i in range(records.NAMESPACES)}
    return {numbers[digest]: text for digest, text in policies.items() if digest in numbers}
