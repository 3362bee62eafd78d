"""A real process that appends is killed at random moments: what it said was written is there."""

from __future__ import annotations

import random
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.store import Wanted, open_log
from kvstore.testing.store_suite import MIB, make_records

ROUNDS = 10
BUDGET = 24 * MIB

CHILD = """
import sys
from kvstore.clock import SystemClock
from kvstore.store import Wanted, open_log
from kvstore.testing.store_suite import MIB, make_records

directory, first, budget = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
log, recovery = open_log(directory, budget_bytes=budget, segment_bytes=MIB, clock=SystemClock())
print("open", flush=True)
batches = [make_records(first + number, 8) for number in range(0, 160, 8)]
ordered = sorted(recovery.records, key=lambda found: found.sequence)
number = first
while True:
    for base in batches:
        while log.room_bytes() < 8 * 3328:
            oldest, ordered = ordered[:200], ordered[200:]
            for found in oldest:
                print("gone", found.key.hex(), flush=True)
            log.discard(found.place for found in oldest)
            if not log.reclaim() and (cheapest := log.cheapest_segment()) is not None:
                moved = log.clean(cheapest[0])
                ordered = [
                    found if found.place not in moved else type(found)(
                        found.kind, found.namespace, found.key, found.parent, found.position, found.lineage,
                        found.checks, moved[found.place], found.sequence, found.last_use, found.payload)
                    for found in ordered
                ]
        log.append(base)
        for record in base:
            print("done", record.key.hex(), flush=True)
    first += 160
    batches = [make_records(first + number, 8) for number in range(0, 160, 8)]
"""


def run_child(directory: Path, first: int, chance: random.Random) -> list[list[str]]:
    """Start a child, kill it between 0 and 100 ms after it opened the store, and not before some lines; the whole lines that it
    printed."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory), str(first), str(BUDGET)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    printed = b""
    try:
        # Some are killed while they open.
        opening = chance.random() < 0.2
        deadline = time.monotonic() + (chance.uniform(0.1, 0.5) if opening else 30)
        until, least = deadline, 0
        while (now := time.monotonic()) < until or (printed.count(b"\n") < least and now < deadline):
            ready, _, _ = select.select([child.stdout], [], [], max(until - now, 0.01))
            if not ready:
                continue
            piece = child.stdout.read1(1 << 16)
            if not piece:
                break
            if not printed and not opening:
                # A busy machine may do nothing in that time.
                until, least = time.monotonic() + chance.uniform(0, 0.1), chance.randrange(64)
            printed += piece
    finally:
        child.kill()
        rest, complaint = child.communicate(timeout=30)
    assert complaint == b"", complaint.decode()
    return [line.split() for line in (printed + rest).decode().split("\n")[:-1]]


@pytest.mark.slow
def test_what_a_killed_process_acknowledged_is_found_again(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    directory = tmp_path / "store"
    owed: set[str] = set()
    first = 0
    acknowledged = 0
    for round_number in range(ROUNDS):
        for line in run_child(directory, first, chance):
            if line[0] == "done":
                owed.add(line[1])
                acknowledged += 1
            elif line[0] == "gone":
                owed.discard(line[1])
        if round_number % 5 == 4 and (directory / "catalog.mdb").exists():
            (directory / "catalog.mdb").unlink()
        log, recovery = open_log(directory, budget_bytes=BUDGET, segment_bytes=MIB, clock=SystemClock())
        answers = log.read([Wanted(found.place, found.key, found.kind) for found in recovery.records])
        got = {found.key.hex(): data for found, data in zip(recovery.records, answers, strict=True)}
        assert owed <= got.keys(), f"seed {seed}, round {round_number}: lost {len(owed - got.keys())}"
        positions = {found.key.hex(): found.position // 128 - 1 for found in recovery.records}
        for key in chance.sample(sorted(owed), min(len(owed), 300)):
            expected = make_records(positions[key], 1)[0]
            assert (expected.key.hex(), expected.payload) == (key, got[key]), (
                f"seed {seed}, round {round_number}"
            )
        assert None not in got.values(), f"seed {seed}, round {round_number}"
        found_wrong = (recovery.damaged_records, recovery.damaged_segments, recovery.missing_segments)
        assert found_wrong == (0, 0, 0), f"seed {seed}, round {round_number}"
        log.check_integrity()
        log.close()
        first = max(positions.values(), default=0) + 1
    assert acknowledged > 20 * ROUNDS, f"seed {seed}: only {acknowledged} records were acknowledged"
    assert not list(directory.glob("*.tmp"))
