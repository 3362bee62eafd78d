"""What a log owes, and seeded runs of all that a log does, for tests on the simulated device.

What is owed: a record that append acknowledged is found and right until it is discarded or cleared; a record whose
append failed may be found, right; what was cleared is never found again; nothing else exists. A record whose own bytes
a fault bent may be missed instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from kvstore.clock import ManualClock
from kvstore.errors import DeviceError, KvstoreError, NoSpace
from kvstore.store import open_log
from kvstore.store.base import Place, Record, RecordKind, RecordLog, Recovery, Wanted
from kvstore.store.catalog import Catalog
from kvstore.store.format import payload_gap
from kvstore.store.segment import segment_name
from kvstore.testing.sim_device import SimDevice
from kvstore.testing.store_suite import MIB, make_record

BUDGET = 5 * MIB
NAMESPACES = ("one", "two")
ITEMS = (RecordKind.BLOCK, RecordKind.STATE, RecordKind.ROWS)
COVERED = {RecordKind.CLEAR: ITEMS, RecordKind.CLEAR_STATES: (RecordKind.STATE, RecordKind.ROWS)}
SLICE = 20_000
_BYTES = random.Random(0).randbytes(1 << 20)

Identity = tuple[bytes, bytes, RecordKind]


def identity_of(record: Record) -> Identity:
    return (record.namespace, record.key, record.kind)


def open_sim(
    device: SimDevice, catalog: Catalog, *, budget: int = BUDGET, clock: ManualClock | None = None
) -> tuple[RecordLog, Recovery]:
    return open_log(
        "simulated",
        budget_bytes=budget,
        segment_bytes=MIB,
        clock=clock or ManualClock(),
        device=device,
        catalog=catalog,
        randomness=device.random.randbytes,
    )


def within(budget: int) -> Callable[[SimDevice], None]:
    """For a device to watch: no change may leave more than the budget on it."""

    def check(device: SimDevice) -> None:
        assert device.total_allocated() <= budget, (device.total_allocated(), budget)

    return check


def segments_of(device: SimDevice) -> list[str]:
    return [name for name in device.names() if name.startswith("segment-")]


def is_bent(device: SimDevice, place: Place) -> bool:
    """Whether a fault changed the bytes of the record at a place, its header included."""
    begin = place.offset - payload_gap(place.length)
    return bool(device.bent(segment_name(place.segment_id), begin, place.offset + place.length))


@dataclass
class Owed:
    """What the log has promised. It never asks the log."""

    must: dict[Identity, Record] = field(default_factory=dict)
    may: dict[Identity, list[Record]] = field(default_factory=dict)
    never: set[bytes] = field(default_factory=set)
    """Payloads that were cleared."""
    policies: dict[bytes, set[str]] = field(default_factory=dict)

    def attempted(self, records: Iterable[Record]) -> None:
        for record in records:
            self.may.setdefault(identity_of(record), []).append(record)
            if record.kind in COVERED:
                for key in [key for key in self.must if self._covered(key, record)]:
                    self.may.setdefault(key, []).append(self.must.pop(key))

    def acknowledged(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.kind in COVERED:
                for covered in [key for key in self.may if self._covered(key, record)]:
                    self.never.update(bytes(old.payload) for old in self.may.pop(covered))
                for covered in [key for key in self.must if self._covered(key, record)]:
                    self.never.add(bytes(self.must.pop(covered).payload))
            else:
                self.must[identity_of(record)] = record
                self.may.setdefault(identity_of(record), []).append(record)

    def discarded(self, record: Record) -> None:
        self.must.pop(identity_of(record), None)

    def check(
        self,
        log: RecordLog,
        recovery: Recovery,
        note: str,
        *,
        excused: Callable[[Identity], bool] = lambda identity: False,
        clears_hold: bool = True,
    ) -> dict[Identity, tuple[Place, Record]]:
        """Raise AssertionError unless all that is owed was found, right, and nothing else. What was found, right."""
        found = list(recovery.records)
        answers = log.read([Wanted(item.place, item.key, item.kind) for item in found])
        got = {
            (item.namespace, item.key, item.kind): (item.place, None if data is None else bytes(data))
            for item, data in zip(found, answers, strict=True)
        }
        assert len(got) == len(found), f"{note}: a key was found twice"
        for identity in self.must:
            if not excused(identity):
                assert identity in got, f"{note}: an acknowledged record is lost"
                assert got[identity][1] is not None, f"{note}: an acknowledged record cannot be read"
        whole: dict[Identity, tuple[Place, Record]] = {}
        for identity, (place, data) in got.items():
            if data is None:
                continue
            right = [record for record in self.may.get(identity, []) if record.payload == data]
            cleared = identity[2] is not RecordKind.NAMESPACE and data in self.never
            assert not cleared or not clears_hold, f"{note}: cleared bytes came back"
            assert right or cleared, f"{note}: bytes that nobody wrote there"
            if right:
                whole[identity] = (place, right[-1])
        for namespace, policy in recovery.policies.items():
            assert policy in self.policies.get(namespace, set()), f"{note}: a policy that nobody set"
        return whole

    @staticmethod
    def _covered(identity: Identity, clear: Record) -> bool:
        return identity[0] == clear.namespace and identity[2] in COVERED[clear.kind]


class Scenario:
    """A seeded run of everything that a log does. Each step notes what was attempted before and owed after."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.owed = Owed()
        self.places: dict[Place, Record] = {}
        self.number = 0
        self.failed: list[KvstoreError] = []

    def run(self, log: RecordLog, steps: int) -> None:
        kinds: list[Callable[[RecordLog], None]] = [
            self.append,
            self.append,
            self.append,
            self.append,
            self.append,
            self.discard,
            self.reclaim,
            self.clean,
            self.policy,
            self.uses,
            self.read,
            self.read_parts,
            self.clear,
        ]
        for _ in range(steps):
            self.attempt(self.random.choice(kinds), log)

    def attempt(self, step: Callable[[RecordLog], None], log: RecordLog) -> None:
        try:
            step(log)
        except (DeviceError, NoSpace) as error:
            self.failed.append(error)

    def make(self, size: int, *, kind: RecordKind = RecordKind.BLOCK, namespace: str = "one") -> Record:
        """A record under a key that comes again, with bytes that no other record has."""
        self.number += 1
        at = self.random.randrange(len(_BYTES) - size)
        payload = self.number.to_bytes(4, "big") + _BYTES[at : at + size]
        record = make_record(f"key {self.number % 60}", payload, kind=kind, namespace=namespace)
        return replace(record, slices=range(SLICE, len(payload), SLICE))

    def append(self, log: RecordLog) -> None:
        self.append_sizes(
            log,
            [
                self.random.choice([0, 100, 3328, 3328, 30_000, 70_000])
                for _ in range(self.random.randint(1, 6))
            ],
        )

    def append_sizes(self, log: RecordLog, sizes: Iterable[int]) -> None:
        records = [
            self.make(
                size,
                kind=self.random.choice([RecordKind.BLOCK, *ITEMS]),
                namespace=self.random.choice(NAMESPACES),
            )
            for size in sizes
        ]
        self.append_records(log, list({identity_of(record): record for record in records}.values()))

    def clear(self, log: RecordLog) -> None:
        if self.random.random() < 0.4:
            namespace, kind = self.random.choice(NAMESPACES), self.random.choice(list(COVERED))
            self.append_records(log, [make_record("clear", b"", kind=kind, namespace=namespace)])

    def append_records(self, log: RecordLog, records: list[Record]) -> None:
        self.owed.attempted(records)
        places = log.append(records)
        self.owed.acknowledged(records)
        for place, record in zip(places, records, strict=True):
            if record.kind not in COVERED:
                self.places[place] = record
            else:
                self.places = {
                    at: old
                    for at, old in self.places.items()
                    if old.namespace != record.namespace or old.kind not in COVERED[record.kind]
                }

    def discard(self, log: RecordLog) -> None:
        for place in self.random.sample(list(self.places), len(self.places) // 2):
            self.forget(log, place)

    def forget(self, log: RecordLog, place: Place) -> None:
        record = self.places.pop(place)
        if self.owed.must.get(identity_of(record)) is record:
            self.owed.discarded(record)
        log.discard([place])

    def reclaim(self, log: RecordLog) -> None:
        log.reclaim()

    def clean(self, log: RecordLog) -> None:
        cheapest = log.cheapest_segment()
        if cheapest is not None:
            moved = log.clean(cheapest[0])
            self.places = {moved.get(place, place): record for place, record in self.places.items()}

    def policy(self, log: RecordLog) -> None:
        record = make_record("", b"", namespace=self.random.choice(NAMESPACES))
        policy = f"periodic:{self.random.randint(1, 4)}"
        self.owed.policies.setdefault(record.namespace, set()).add(policy)
        log.put_policy(record.namespace, policy)

    def uses(self, log: RecordLog) -> None:
        log.note_uses((place, 1_800_000_000.0) for place in self.places)

    def read(self, log: RecordLog) -> None:
        some = self.random.sample(list(self.places.items()), len(self.places) // 3)
        self.check_places(log, some, "while running")

    def read_parts(self, log: RecordLog) -> None:
        parts = []
        for place, record in self.random.sample(list(self.places.items()), len(self.places) // 4):
            begin = self.random.randint(0, place.length)
            end = self.random.choice([None, self.random.randint(begin, place.length)])
            parts.append((Wanted(place, record.key, record.kind, begin, end), record))
        answers = log.read([wanted for wanted, _ in parts])
        for (wanted, record), data in zip(parts, answers, strict=True):
            assert data == record.payload[wanted.begin : wanted.end], "not the part that was asked for"

    @staticmethod
    def check_places(log: RecordLog, items: Iterable[tuple[Place, Record]], note: str) -> None:
        pairs = list(items)
        answers = log.read([Wanted(place, record.key, record.kind) for place, record in pairs])
        for (_, record), data in zip(pairs, answers, strict=True):
            assert data == record.payload, f"{note}: not the bytes that were acknowledged"

    def adopt(self, log: RecordLog, whole: dict[Identity, tuple[Place, Record]], recovery: Recovery) -> None:
        """After a start: go on with what is owed, and let go of the rest that was found."""
        must = self.owed.must
        self.places = {place: record for key, (place, record) in whole.items() if must.get(key) is not None}
        for record in self.places.values():
            must[identity_of(record)] = record
            self.owed.may[identity_of(record)].append(record)
        log.discard(found.place for found in recovery.records if found.place not in self.places)


def works_again(log: RecordLog, scenario: Scenario) -> None:
    """Once a fault is over, writing goes on; a full log first lets go of what it holds."""
    scenario.failed.clear()
    for _ in range(12):
        try:
            scenario.append_sizes(log, [3328, 70_000, 100])
            break
        except NoSpace:
            scenario.discard(log)
            log.reclaim()
            scenario.clean(log)
    else:
        raise AssertionError(f"no append succeeds although the fault is over: {log.space()}")
    log.check_integrity()
