"""kill -9 of a process that works on a store, at random moments and inside of its system calls."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

from kvstore.chaos.base import Check, Outcome, Progress, undisturbed
from kvstore.chaos.inspect import inspect
from kvstore.chaos.journal import read_journal
from kvstore.chaos.ledger import Ledger
from kvstore.chaos.load import MIB, write_until_killed
from kvstore.chaos.nursery import Nursery

BUDGET_BYTES = 12 * MIB
_ROUNDS_PER_STORE = 40
"""On average: a store fills and cleans within the first few rounds, and grows old in the rest."""


def kill_rounds(
    rounds: int, *, seed: int, scratch: Path, progress: Progress, check: Check = undisturbed
) -> Outcome:
    """`rounds` kills of a load over stores below `scratch`; after each the store is opened and held to its promises."""
    rng = random.Random(seed)
    outcome = Outcome("kill", seed, "kills")
    begun = time.monotonic()
    store, ledger = scratch / "store", Ledger()
    stores = 1
    with Nursery(check) as nursery:
        for number in range(rounds):
            if number and rng.random() < 1 / _ROUNDS_PER_STORE:
                outcome.acknowledged += ledger.acknowledged
                shutil.rmtree(store)
                ledger = Ledger()
                stores += 1
            _one_kill(nursery, rng, store, ledger=ledger, outcome=outcome, number=number)
            progress(f"kill {number + 1:,} of {rounds:,}, {len(outcome.violations)} violations")
    outcome.acknowledged += ledger.acknowledged
    outcome.figures["stores"] = stores
    outcome.seconds = time.monotonic() - begun
    return outcome


def _one_kill(
    nursery: Nursery, rng: random.Random, store: Path, *, ledger: Ledger, outcome: Outcome, number: int
) -> None:
    journal = store.with_name("journal")
    journal.unlink(missing_ok=True)
    arguments: dict[str, Any] = {
        "directory": str(store),
        "journal": str(journal),
        "seed": rng.getrandbits(32),
        "first": ledger.next_number,
        "budget": BUDGET_BYTES,
    }
    way = rng.choices(("moment", "call", "opening moment", "opening call"), (40, 40, 10, 10))[0]
    opening = way.startswith("opening")
    if way.endswith("call"):
        arguments |= {
            "die_in_call": rng.randint(1, 12) if opening else rng.randint(1, 120),
            "share": rng.choice((0.0, 0.25, 0.5, 0.75, 1.0)),
            "die_opening": opening,
        }
    # A process that was to die in a call which it never makes is killed too, later.
    after = 0.3 if way.endswith("call") else rng.uniform(0.0, 0.03 if opening else 0.12)
    ended = nursery.run(
        write_until_killed, arguments, kill_after=after, since_opened=not opening, dies_by_itself=True
    )
    ledger.apply(read_journal(journal))
    where = f"kill {number} ({way})"
    if ended.trouble:
        outcome.blame(where, [f"the load {ended.trouble}"])
    if rng.random() < 0.05:
        for catalogue in store.glob("catalog*"):
            catalogue.unlink()
    found = inspect(nursery, store, budget=BUDGET_BYTES, close=rng.random() < 0.5)
    outcome.blame(where, found.violations(ledger))
    ledger.settle(found.seen)
    outcome.rounds += 1
    outcome.checked += len(found.seen)
    outcome.count(f"killed at {way}")
    outcome.count("damaged_records", found.damaged_records)
    outcome.count("torn_bytes", found.torn_bytes)
    outcome.count("rebuilt", int(found.rebuilt))
    slowest = outcome.figures.get("slowest_open_seconds", 0.0)
    outcome.figures["slowest_open_seconds"] = round(max(slowest, found.open_seconds), 3)
