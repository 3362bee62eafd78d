"""Ctrl-C at any moment of a transfer: nothing hangs, and no memory is used again while the kernel still writes to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import random, signal, sys
from kvstore.clock import SystemClock
from kvstore.store import Wanted, open_log
from kvstore.testing.store_suite import make_records

log, _ = open_log(sys.argv[1], budget_bytes=64 << 20, segment_bytes=16 << 20, clock=SystemClock())
records = make_records(0, 300, size=20_000)
places = log.append(records)
wanted = [Wanted(place, record.key, record.kind) for place, record in zip(places, records)][::2]
payloads = [record.payload for record in records][::2]
chance = random.Random(int(sys.argv[2]))
interrupted = 0
for _ in range(150):
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.01 * chance.random())
    try:
        while True:
            log.read(wanted)
    except KeyboardInterrupt:
        interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
assert log.read(wanted) == payloads
log.check_integrity()
log.close()
print(interrupted)
"""


def test_interrupted_reads_neither_hang_nor_bend_later_ones(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), "7"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 150
