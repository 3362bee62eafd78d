"""Erasing on a simulated device: whichever of its calls fails, or is the last before a crash, asking again ends with no byte of what
was to go in any file, and all of what was to stay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress

import pytest

from kvstore.errors import DeviceError, InvalidArgument, KvstoreError, NoSpace
from kvstore.store.base import Place, Record, RecordKind, RecordLog, Wanted
from kvstore.store.erasing import NOTE_NAME
from kvstore.testing.sim_device import PowerCut, SimCatalog, SimDevice
from kvstore.testing.store_suite import MIB, make_record
from tests.support.long import one_in
from tests.support.sim_store import open_sim

BUDGET = 12 * MIB
SEED = 5
GOES, STAYS = "one", "two"
NOTE = b'{"tenant": "one"}'
SIZES = (3328, 70_000, 120_000, 60_000)
ROUNDS_MAX = 30
EVERY = one_in(20)
"""Of its calls: all of them pass, and take minutes."""


class Ground:
    """A log with several segments and spares, in which records of both namespaces lie side by side, and some that have gone."""

    def __init__(self) -> None:
        self.device = SimDevice(SEED)
        self.catalog = SimCatalog(self.device)
        self.chance = random.Random(SEED + 1)
        self.marks: list[bytes] = []
        self.kept: dict[bytes, Record] = {}
        self.log, _ = open_sim(self.device, self.catalog, budget=BUDGET)
        old = self.append(GOES, 12)
        self.log.discard(old)
        self.log.reclaim()
        for _ in range(6):
            self.append(GOES, 4)
            self.append(STAYS, 4)

    def append(self, namespace: str, count: int) -> list[Place]:
        records = [
            make_record(
                f"{namespace}-{len(self.marks) + len(self.kept)}-{number}",
                self.chance.randbytes(size),
                namespace=namespace,
            )
            for number, size in enumerate(SIZES[:count] * (count // len(SIZES) or 1))
        ]
        for record in records:
            payload = bytes(memoryview(record.payload))
            if namespace == GOES:
                self.marks += [payload[:16], payload[len(payload) // 2 :][:16], payload[-16:]]
            else:
                self.kept[record.key] = record
        return self.log.append(records)

    def erase(self) -> None:
        """As the service does it."""
        log = self.log
        log.begin_erasing(NOTE)
        clear = make_record("clear", b"", kind=RecordKind.CLEAR, namespace=GOES)
        log.expect_clears([clear.namespace])
        log.append([clear])
        for segment_id in log.segment_ids():
            if not log.blank_gap(segment_id):
                log.clean(segment_id)
        for _ in range(ROUNDS_MAX):
            left = log.to_erase()
            if not left:
                log.end_erasing()
                return
            for segment_id in left:
                # One may be on its way out, of which a step failed.
                with suppress(InvalidArgument):
                    log.clean(segment_id)
        raise AssertionError("it does not end")

    def again(self) -> None:
        """A start after a crash."""
        self.log, _ = open_sim(self.device, self.catalog, budget=BUDGET)

    def left(self) -> list[bytes]:
        """What is in the device's files still."""
        data = b"\n".join(bytes(self.device.contents(name)) for name in self.device.names())
        return [mark for mark in self.marks if mark in data]

    def check(self, note: str) -> None:
        assert self.left() == [], note
        assert not self.log.erasing, note
        assert NOTE_NAME not in self.device.names(), note
        self.log.close()
        log, recovery = open_sim(self.device, self.catalog, budget=BUDGET)
        self.log = log
        found = [each for each in recovery.records if each.kind is RecordKind.BLOCK]
        assert {each.key for each in found} == self.kept.keys(), note
        payloads = read(log, [Wanted(each.place, each.key, each.kind) for each in found])
        wanted = [bytes(memoryview(self.kept[each.key].payload)) for each in found]
        assert payloads == wanted, note
        log.check_integrity()
        log.close()


def read(log: RecordLog, wanted: Sequence[Wanted]) -> list[bytes | None]:
    return [None if each is None else bytes(each) for each in log.read(wanted)]


def calls_of_an_erase() -> tuple[int, int]:
    """The numbers of its first call to the device, and of the one after its last."""
    ground = Ground()
    begin = ground.device.calls
    ground.erase()
    return begin + 1, ground.device.calls + 1


def test_nothing_of_it_is_left_and_all_else_is() -> None:
    ground = Ground()
    assert len(ground.left()) > len(ground.marks) // 2
    ground.erase()
    assert ground.log.counters()["overwritten_bytes"] > 0
    ground.check("whole")


@pytest.mark.parametrize("end", ["kill", "power cut"])
def test_whichever_call_is_the_last_the_next_start_knows_and_can_end_it(end: str) -> None:
    first, last = calls_of_an_erase()
    for call in range(first, last, EVERY):
        note = f"{end} at call {call} of {first} to {last}"
        ground = Ground()
        ground.device.cut_at(call)
        with pytest.raises(PowerCut):
            ground.erase()
        if end == "kill":
            ground.device.kill()
        else:
            ground.device.crash()
        ground.again()
        # Before the note is there nothing has been done; after it has gone, all has.
        if ground.log.erasing:
            assert ground.log.erasing == NOTE, note
            ground.erase()
        elif ground.left():
            ground.erase()
        ground.check(note)


@pytest.mark.parametrize("error", [DeviceError, NoSpace])
def test_whichever_call_fails_asking_again_ends_it(error: type[KvstoreError]) -> None:
    first, last = calls_of_an_erase()
    met = 0
    for call in range(first, last, EVERY):
        note = f"{error.code} at call {call} of {first} to {last}"
        ground = Ground()
        ground.device.fail_at(call, error("injected"))
        try:
            ground.erase()
        except (DeviceError, NoSpace):
            met += 1
        ground.device.heal()
        ground.erase()
        ground.check(note)
    assert met
