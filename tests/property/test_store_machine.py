"""A log on a simulated device against a model of what was acknowledged, attempted, cleared and let go.

Any order of appends, reads, removals, cleaning, kills, power cuts, starts, full and read-only disks, wrong clocks and
lying disks. A record that was acknowledged and not let go is there with its bytes, unless a fault bent its own bytes:
then it is a miss. Set KVSTORE_MACHINE_EXAMPLES for more runs; a failure prints how to repeat it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.clock import ManualClock
from kvstore.errors import DeviceError, KvstoreError, NoSpace
from kvstore.store.base import Place, Record, RecordKind, RecordLog, Wanted
from kvstore.store.catalog import LmdbCatalog
from kvstore.store.format import payload_gap
from kvstore.testing.sim_device import PowerCut, SimCatalog, SimDevice
from kvstore.testing.store_suite import MIB, make_record
from tests.support.long import examples
from tests.support.sim_store import (
    BUDGET,
    COVERED,
    NAMESPACES,
    Identity,
    Scenario,
    identity_of,
    is_bent,
    open_sim,
    segments_of,
    within,
    works_again,
)

EXAMPLES = int(os.environ.get("KVSTORE_MACHINE_EXAMPLES", examples(25)))
HOUR = 3600.0
KEEP = 72 * HOUR
"""So long a caller wants its records kept since their last use."""

sizes = st.lists(st.sampled_from([0, 100, 3328, 3328, 12_000, 30_000, 70_000]), min_size=1, max_size=6)


class StoreMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 2**32 - 1), short_writes=st.booleans())
    def begin(self, seed: int, short_writes: bool) -> None:
        self.device = SimDevice(seed, short_writes=short_writes)
        self.device.watch = within(BUDGET)
        self.catalog = SimCatalog(self.device)
        self.clock = ManualClock()
        self.steps = Scenario(seed)
        self.where: dict[Identity, Place] = {}
        """Where each record that is owed was when it was last told."""
        self.used: dict[Identity, float] = {}
        self.clears_hold = True
        self.log: RecordLog | None = None
        self.note = f"seed {seed}, short writes {short_writes}"
        self._start()

    # ---- how every call is made -------------------------------------------------------------------------------------

    def _do(self, step: Callable[[RecordLog], None]) -> bool:
        """False when the device failed it, or power went: then the log is another one."""
        assert self.log is not None
        try:
            step(self.log)
        except (DeviceError, NoSpace):
            return False
        except PowerCut:
            self.device.crash()
            self._start()
            return False
        finally:
            self._follow()
        return True

    def _start(self) -> None:
        """Open what is there; errors of the moment erase nothing, so that the next attempt finds it."""
        self.log = None
        self.device.heal()
        self.device.read_only, self.device.taken, self.device.capacity = False, 0, None
        excused = {identity for identity, place in self.where.items() if is_bent(self.device, place)}
        log, recovery = open_sim(self.device, self.catalog, clock=self.clock)
        self.log = log
        whole = self.steps.owed.check(
            log, recovery, self.note, excused=excused.__contains__, clears_hold=self.clears_hold
        )
        for identity in [each for each in self.steps.owed.must if each not in whole]:
            del self.steps.owed.must[identity]
        for identity, (_, record) in whole.items():
            # Durable, so owed from here on, were it let go before or never acknowledged.
            self.steps.owed.must[identity] = record
        self.steps.adopt(log, whole, recovery)
        self._follow()

    def _follow(self) -> None:
        self.where = {identity_of(record): place for place, record in self.steps.places.items()}
        for identity in self.where:
            self.used.setdefault(identity, self.clock.wall())

    def _bend(self, fault: Callable[[], None]) -> None:
        """Damage at rest. What lies in no record that a caller knows may be a clear: those may be undone by it."""
        before = {name: set(self.device.bent(name)) for name in self.device.names()}
        fault()
        known: dict[str, set[int]] = {}
        for place in self.steps.places:
            begin, end = place.offset - payload_gap(place.length), place.offset + place.length
            known.setdefault(f"segment-{place.segment_id:016x}.log", set()).update(
                range(-(-begin // 512), end // 512)
            )
        for name in self.device.names():
            new = set(self.device.bent(name)) - before.get(name, set())
            if new - known.get(name, set()):
                self.clears_hold = False

    def _let_go(self, places: Iterable[Place]) -> None:
        assert self.log is not None
        for place in list(places):
            self.steps.forget(self.log, place)
        self._follow()

    def _check(self, places: Iterable[Place], begin: int = 0, end: int | None = None) -> None:
        """Read records, or parts of them; what is missing must have been bent."""

        def read(log: RecordLog) -> None:
            items = [(place, self.steps.places[place]) for place in places]
            wanted = [
                Wanted(
                    place, record.key, record.kind, min(begin, place.length), _cut(end, begin, place.length)
                )
                for place, record in items
            ]
            for (place, record), part, data in zip(items, wanted, log.read(wanted), strict=True):
                if data is None:
                    assert is_bent(self.device, place), f"{self.note}: a whole record is a miss"
                    self._let_go([place])
                else:
                    assert data == record.payload[part.begin : part.end], f"{self.note}: wrong bytes"

        self._do(read)

    # ---- what a caller does -----------------------------------------------------------------------------------------

    @rule(lengths=sizes)
    def append(self, lengths: list[int]) -> None:
        self._do(lambda log: self.steps.append_sizes(log, lengths))

    @rule(lengths=sizes)
    def append_more(self, lengths: list[int]) -> None:
        self._do(lambda log: self.steps.append_sizes(log, [*lengths, 70_000, 30_000]))

    @rule()
    def fill(self) -> None:
        """Until there is no more room; then every call says so, and what is there stays readable."""
        for _ in range(40):
            if not self._do(lambda log: self.steps.append_sizes(log, [100_000, 100_000])):
                break
        self._check(list(self.steps.places)[:10])

    @rule(kind=st.sampled_from(list(COVERED)), namespace=st.sampled_from(NAMESPACES))
    def clear(self, kind: RecordKind, namespace: str) -> None:
        self._do(lambda log: self.steps.append_records(log, [_clear(kind, namespace)]))

    @rule()
    def policy(self) -> None:
        self._do(self.steps.policy)

    @rule()
    def use(self) -> None:
        def note(log: RecordLog) -> None:
            now = self.clock.wall()
            chosen = self.steps.random.sample(list(self.steps.places), len(self.steps.places) // 2)
            log.note_uses((place, now) for place in chosen)
            self.used.update((identity_of(self.steps.places[place]), now) for place in chosen)

        self._do(note)

    @rule(begin=st.integers(0, 90_000), length=st.none() | st.integers(0, 50_000))
    def read(self, begin: int, length: int | None) -> None:
        some = self.steps.random.sample(list(self.steps.places), len(self.steps.places) // 3)
        self._check(some)
        self._check(
            [place for place in some if place in self.steps.places],
            begin,
            None if length is None else begin + length,
        )

    @rule()
    def discard(self) -> None:
        self._let_go(self.steps.random.sample(list(self.steps.places), len(self.steps.places) // 2))

    @rule()
    def expire(self) -> None:
        now = self.clock.wall()
        old = [
            place
            for place, record in self.steps.places.items()
            if now - self.used.get(identity_of(record), now) > KEEP
        ]
        self._let_go(old)
        self._do(self.steps.reclaim)

    @rule()
    def evict(self) -> None:
        """The segment that was written first."""
        if self.steps.places:
            first = min(place.segment_id for place in self.steps.places)
            self._let_go([place for place in self.steps.places if place.segment_id == first])
            self._do(self.steps.reclaim)

    @rule()
    def clean(self) -> None:
        def clean(log: RecordLog) -> None:
            cheapest = log.cheapest_segment()
            if cheapest is None:
                return
            segment_id = cheapest[0]
            bent = {
                place: is_bent(self.device, place)
                for place in self.steps.places
                if place.segment_id == segment_id
            }
            moved = log.clean(segment_id)
            for place in bent.keys() - moved.keys():
                assert bent[place], f"{self.note}: cleaning lost a whole record"
                self._let_go([place])
            self.steps.places = {moved.get(at, at): each for at, each in self.steps.places.items()}

        self._do(clean)

    @rule()
    def reclaim(self) -> None:
        self._do(self.steps.reclaim)

    # ---- what happens to the process and the machine ----------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        assert self.log is not None
        try:
            self.log.close()
        except PowerCut:
            self.device.crash()
        else:
            self.device.kill()
        self._start()

    @rule(without_catalog=st.booleans())
    def kill(self, without_catalog: bool) -> None:
        self.device.kill()
        self._lose_catalog(without_catalog)
        self._start()

    @rule(without_catalog=st.booleans())
    def crash(self, without_catalog: bool) -> None:
        self.device.crash()
        self._lose_catalog(without_catalog)
        self._start()

    @rule(calls=st.integers(1, 40))
    def crash_in_the_start(self, calls: int) -> None:
        self.device.crash()
        self.device.cut_at(self.device.calls + calls)
        try:
            open_sim(self.device, self.catalog, clock=self.clock)[0].close()
        except PowerCut:
            self.device.crash()
        except (DeviceError, NoSpace):
            # Of a disk that is full or read-only for now.
            self.device.kill()
        else:
            self.device.kill()
        self._start()

    @rule(calls=st.integers(1, 12))
    def cut_soon(self, calls: int) -> None:
        self.device.cut_at(self.device.calls + calls)

    @rule(calls=st.integers(1, 8), error=st.sampled_from([DeviceError, NoSpace]))
    def fail_soon(self, calls: int, error: type[KvstoreError]) -> None:
        self.device.fail_at(self.device.calls + calls, error("injected"))

    @rule(fails=st.integers(1, 30))
    def fail_in_the_start(self, fails: int) -> None:
        self.device.kill()
        self.device.fail_at(self.device.calls + fails, DeviceError("injected EIO"))
        try:
            log, _ = open_sim(self.device, self.catalog, clock=self.clock)
        except (DeviceError, NoSpace):
            self.device.kill()
        else:
            log.close()
            self.device.kill()
        self._start()

    @rule(read_only=st.booleans())
    def refuse_writes(self, read_only: bool) -> None:
        self.device.read_only = read_only

    @rule(room=st.none() | st.integers(0, 2 * MIB))
    def others_fill_the_disk(self, room: int | None) -> None:
        self.device.capacity = None if room is None else self.device.total_allocated() + room

    @rule(hours=st.sampled_from([0.5, 1.0, 24.0, 73.0]))
    def time_passes(self, hours: float) -> None:
        self.clock.advance(hours * HOUR)

    @rule(hours=st.sampled_from([-48.0, -2.0, 2.0, 48.0]))
    def clock_is_set(self, hours: float) -> None:
        self.clock.jump_wall(hours * HOUR)

    # ---- what a lying disk does -------------------------------------------------------------------------------------

    @precondition(lambda self: self.steps.places)
    @rule(at=st.floats(0, 1, exclude_max=True), in_record=st.booleans())
    def flip(self, at: float, in_record: bool) -> None:
        if in_record:
            place = self.steps.random.choice(list(self.steps.places))
            name, begin, length = (
                f"segment-{place.segment_id:016x}.log",
                place.offset - 256,
                place.length + 256,
            )
        else:
            name = self.steps.random.choice(segments_of(self.device))
            begin, length = 0, self.device.allocated(name)
        self._bend(lambda: self.device.flip(name, 8 * begin + int(at * 8 * length)))

    @rule()
    def turn_back(self) -> None:
        self._bend(lambda: self.device.turn_back() and None)

    @rule(lengths=sizes)
    def misdirect(self, lengths: list[int]) -> None:
        def lie() -> None:
            self.device.misdirect(1)
            self._do(lambda log: self.steps.append_sizes(log, lengths))
            self.device.misdirect(0)

        self._bend(lie)

    @rule(stale=st.booleans())
    def bend_one_read(self, stale: bool) -> None:
        """On its way only: the second look finds the right bytes."""
        self.device.misread(0)
        self.device.read_stale(0)
        if stale:
            self.device.read_stale(1)
        else:
            self.device.misread(1)
        self._check(self.steps.random.sample(list(self.steps.places), len(self.steps.places) // 3))
        self.device.misread(0)
        self.device.read_stale(0)

    # ---- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def books_add_up(self) -> None:
        if self.log is not None:
            self.log.check_integrity()
            space = self.log.space()
            assert space.allocated + space.other <= space.budget == BUDGET, space

    def teardown(self) -> None:
        """Whatever happened: once it is over, the log starts, serves what it owes, and takes writes."""
        if getattr(self, "log", None) is None:
            return
        self.device.kill()
        self._start()
        assert self.log is not None
        self._check(list(self.steps.places))
        works_again(self.log, self.steps)
        self._check(list(self.steps.places))
        self.log.close()

    def _lose_catalog(self, lose: bool) -> None:
        if lose:
            self.catalog = SimCatalog(self.device)
            if LmdbCatalog.DATA_NAME in self.device.names():
                self.device.remove(LmdbCatalog.DATA_NAME)


def _cut(end: int | None, begin: int, length: int) -> int | None:
    return None if end is None else max(min(begin, length), min(end, length))


def _clear(kind: RecordKind, namespace: str) -> Record:
    return make_record("clear", b"", kind=kind, namespace=namespace)


machine_settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = machine_settings
