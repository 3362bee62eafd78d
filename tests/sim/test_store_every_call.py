"""Whichever call of a long script fails: nothing acknowledged is lost, nothing wrong is served, and writing goes on.

The script appends, reads, clears, cleans, reclaims, recycles, closes and opens again. Its n-th call to the device
fails, for every n; some steps later the fault is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kvstore.errors import DeviceError, KvstoreError, NoSpace
from kvstore.store.base import RecordKind, RecordLog
from kvstore.store.catalog import LmdbCatalog
from kvstore.testing.sim_device import SimCatalog, SimDevice
from kvstore.testing.store_suite import MIB, make_record
from tests.support.long import long
from tests.support.sim_store import Scenario, open_sim, within, works_again

SEED = 11
BUDGET = 7 * MIB
OPERATIONS = 200
STEPS_AFTER = 8
"""So many operations run on after the one that failed."""


class Script:
    """The same operations every time, on a device of its own."""

    def __init__(self) -> None:
        self.device = SimDevice(SEED)
        self.device.watch = within(BUDGET)
        self.catalog = SimCatalog(self.device)
        self.scenario = Scenario(SEED)
        self.counts: dict[str, int] = {}
        self._log: RecordLog | None = None
        small, mixed, large = [100, 3328, 0], [3328, 70_000, 30_000], [120_000, 60_000]
        append = [partial(self.sizes, sizes) for sizes in (small, mixed, large)]
        step = self.scenario
        cycle: list[Callable[[RecordLog], None]] = [
            append[0],
            append[1],
            append[2],
            step.read,
            append[2],
            step.policy,
            append[1],
            step.read_parts,
            append[2],
            step.uses,
            step.discard,
            append[0],
            append[2],
            self.clear_states,
            step.discard,
            step.reclaim,
            append[2],
            step.clean,
            step.discard,
            step.reclaim,
        ]
        self.steps = [cycle[number % len(cycle)] for number in range(OPERATIONS)]
        self.steps[97], self.steps[61], self.steps[137] = self.again, self.clear, self.again

    def sizes(self, sizes: list[int], log: RecordLog) -> None:
        self.scenario.append_sizes(log, sizes)

    def clear(self, log: RecordLog) -> None:
        self.scenario.append_records(log, [make_record("clear", b"", kind=RecordKind.CLEAR, namespace="one")])

    def clear_states(self, log: RecordLog) -> None:
        clear = make_record("clear", b"", kind=RecordKind.CLEAR_STATES, namespace="two")
        self.scenario.append_records(log, [clear])

    def again(self, log: RecordLog) -> None:
        """Close, start again, and go on with what was found."""
        self.close()
        self.open("started again")

    def log(self) -> RecordLog:
        if self._log is None:
            self.open("start after a fault")
        assert self._log is not None
        return self._log

    def open(self, note: str) -> None:
        log, recovery = open_sim(self.device, self.catalog, budget=BUDGET)
        self._log = log
        whole = self.scenario.owed.check(log, recovery, note)
        self.scenario.adopt(log, whole, recovery)

    def close(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.close()
            for name, count in log.counters().items():
                self.counts[name] = self.counts.get(name, 0) + count

    def run(self) -> None:
        """Until the end, or until STEPS_AFTER operations after the first that met a fault."""
        end = OPERATIONS
        for number, step in enumerate(self.steps):
            if number >= end:
                return
            try:
                step(self.log())
            except (DeviceError, NoSpace) as error:
                self.scenario.failed.append(error)
                end = min(end, number + STEPS_AFTER)


def script_that_ran_whole() -> Script:
    script = Script()
    script.run()
    script.close()
    return script


def test_the_script_covers_what_a_log_does() -> None:
    script = script_that_ran_whole()
    assert script.scenario.failed == []
    for name in ("reclaimed_segments", "recycled_segments", "cleaned_bytes", "read_records"):
        assert script.counts[name] > 0, name
    assert script.counts["device_errors"] == script.counts["damaged_records"] == 0
    assert script.device.calls > 400


# One call in seven here, each time others; what they do is many times the same.
SEVENTHS = [
    *(("EIO", 0), ("ENOSPC", 1), ("short write", 2)),
    *(long("EIO", part) for part in range(1, 7)),
    *(long("ENOSPC", part) for part in (0, *range(2, 7))),
    *(long("short write", part) for part in (0, 1, *range(3, 7))),
]


@pytest.mark.parametrize(("fault", "part"), SEVENTHS)
def test_whichever_call_fails_nothing_is_lost_and_writing_goes_on(fault: str, part: int) -> None:
    device = script_that_ran_whole().device
    calls = device.calls
    errors: dict[str, type[KvstoreError]] = {"EIO": DeviceError, "ENOSPC": NoSpace}
    met = 0
    which = {"EIO": range(1, calls + 1), "ENOSPC": device.changing, "short write": device.writes}
    chosen = [call for call in which[fault] if call % 7 == part]
    for call in chosen:
        note = f"seed {SEED}, {fault} at call {call} of {calls}"
        script = Script()
        device = script.device
        if fault in errors:
            device.fail_at(call, errors[fault](f"injected {fault}"))
        else:
            device.shorten_at(call)
        script.run()
        failed = bool(script.scenario.failed)
        device.heal()
        works_again(script.log(), script.scenario)
        script.scenario.check_places(script.log(), script.scenario.places.items(), note)
        script.close()
        met += failed or script.counts["device_errors"] + script.counts["catalog_errors"] > 0
        assert fault in errors or not failed, f"{note}: a short write is no error"
        if call % 3 == 0:
            device.crash()
        else:
            device.kill()
        if call // 2 % 2:
            # Without what makes a start fast.
            script.catalog = SimCatalog(device)
            device.unlink(LmdbCatalog.DATA_NAME)
        script.open(note)
        script.close()
    assert met > len(chosen) // 3 or fault not in errors
