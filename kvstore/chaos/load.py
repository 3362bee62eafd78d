"""The mixed load: appends, reads, discards, cleans and reclaims through the public interface, and says what it got."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.chaos import records
from kvstore.chaos.calls import die_in_call, lose_syncs
from kvstore.chaos.journal import Journal, Word, policy_text
from kvstore.clock import SystemClock
from kvstore.errors import NoSpace
from kvstore.store import open_log
from kvstore.store.base import Place, RecordKind, RecordLog, Recovery

MIB = 1 << 20
SEGMENT_BYTES = MIB
_BATCH_MAX = 12
_READS_MAX = 16
_ROOM_TRIES_MAX = 64


@dataclass(slots=True)
class _Epoch:
    """Even between changes of places, odd during one: a reader that saw the same even number before and after its read
    knows that every place it asked for was good all the while."""

    number: int = 0


class MixedLoad:
    """One caller of a RecordLog: it keeps places, changes things from one thread, and reads from any."""

    def __init__(
        self, log: RecordLog, recovery: Recovery, journal: Journal, rng: random.Random, first: int
    ) -> None:
        self._log = log
        self._journal = journal
        self._rng = rng
        self._next = first
        self._policies = 0
        self._epoch = _Epoch()
        self._places: dict[int, Place] = {}
        for found in recovery.records:
            number = records.number_of(found.key)
            if number is None:
                journal.say(Word.WRONG, text=f"recovery told about a key that nobody made: {found.key.hex()}")
            else:
                self._places[number] = found.place
        journal.say(Word.FOUND, self._places)

    @property
    def next_number(self) -> int:
        return self._next

    def step(self) -> None:
        """One random operation."""
        work, weight = zip(*self._menu(), strict=True)
        self._rng.choices(work, weight)[0]()

    def _menu(self) -> list[tuple[Any, int]]:
        return [
            (self.append, 50),
            (self.read, 30),
            (self.discard_some, 12),
            (self.reclaim, 6),
            (self.clean, 6),
            (self.note_uses, 4),
            (self.put_policy, 3),
            (self.clear, 1),
        ]

    def append(self) -> None:
        if self._next < records.NAMESPACES:
            batch = [records.record_of(n) for n in range(self._next, records.NAMESPACES)]
        else:
            count = self._rng.randint(1, _BATCH_MAX)
            batch = [records.record_of(n) for n in range(self._next, self._next + count)]
        first, last = self._next, self._next + len(batch)
        need = sum(max(len(record.payload), 3072) for record in batch)
        self._journal.say(Word.TRY, (first, last))
        self._next = last
        for _ in range(_ROOM_TRIES_MAX):
            try:
                if self._log.room_bytes() >= need:
                    places = self._log.append(batch)
                    break
            except NoSpace:
                pass  # the promise about room is for payloads of 3,072 bytes on average
            self._make_room()
        else:
            self._journal.say(
                Word.WRONG, text=f"no room for {need} bytes though {len(self._places)} records are left"
            )
            return
        self._journal.say(Word.DONE, (first, last))
        self._places.update(zip(range(first, last), places, strict=True))

    def _make_room(self) -> None:
        oldest = sorted(n for n in self._places if not records.is_namespace(n))
        self._discard(oldest[: max(8, len(oldest) // 8)])
        if not self._log.reclaim():
            self.clean()

    def read(self) -> None:
        """Every place that was good before and after must give its bytes; no place may ever give others."""
        before = self._epoch.number
        try:
            chosen = self._rng.sample(list(self._places.items()), min(len(self._places), _READS_MAX))
        except RuntimeError:
            return  # the other thread changed the places meanwhile
        answers = self._log.read([records.wanted(n, place) for n, place in chosen])
        steady = before % 2 == 0 and self._epoch.number == before
        for (number, place), answer in zip(chosen, answers, strict=True):
            if answer is None:
                if steady:
                    self._journal.say(
                        Word.WRONG, text=f"record {number} at {place} was a miss while it lived"
                    )
            elif answer != records.payload_of(number):
                self._journal.say(Word.WRONG, text=f"record {number} at {place} was read with wrong bytes")

    def discard_some(self) -> None:
        droppable = [n for n in self._places if not records.is_namespace(n)]
        self._discard(self._rng.sample(droppable, min(len(droppable), self._rng.randint(1, 24))))

    def _discard(self, numbers: list[int]) -> None:
        if not numbers:
            return
        self._journal.say(Word.DROP, numbers)
        self._epoch.number += 1
        self._log.discard([self._places.pop(n) for n in numbers])
        self._epoch.number += 1

    def reclaim(self) -> None:
        self._log.reclaim()

    def clean(self) -> None:
        cheapest = self._log.cheapest_segment()
        if cheapest is None:
            return
        self._epoch.number += 1
        try:
            moved = self._log.clean(cheapest[0])
            lost = []
            for number, place in list(self._places.items()):
                if place in moved:
                    self._places[number] = moved[place]
                elif place.segment_id == cheapest[0]:
                    lost.append(number)
                    del self._places[number]
            if lost:
                self._journal.say(Word.WRONG, text=f"cleaning segment {cheapest[0]} lost records {lost[:8]}")
        except NoSpace:
            pass  # the next discard makes what is copied smaller
        finally:
            self._epoch.number += 1

    def note_uses(self) -> None:
        chosen = self._rng.sample(list(self._places.values()), min(len(self._places), 32))
        now = SystemClock().wall()
        self._log.note_uses([(place, now + self._rng.uniform(-7200, 0)) for place in chosen])

    def put_policy(self) -> None:
        namespace, self._policies = self._rng.randrange(records.NAMESPACES), self._policies + 1
        number = self._rng.randrange(1000)
        self._journal.say(Word.POLICY, (namespace, number))
        try:
            self._log.put_policy(records.namespace_digest(namespace), policy_text(number))
        except NoSpace:
            self._make_room()
            return
        self._journal.say(Word.POLICY_DONE, (namespace, number))

    def clear(self) -> None:
        namespace, states = self._rng.randrange(records.NAMESPACES), self._rng.random() < 0.5
        scope = (namespace, self._next, int(states))
        covered = [
            n
            for n in self._places
            if not records.is_namespace(n)
            and records.namespace_of(n) == namespace
            and (not states or records.kind_of(n) is not RecordKind.BLOCK)
        ]
        self._journal.say(Word.CLEAR, scope)
        self._epoch.number += 1
        try:
            self._log.append([records.clear_of(namespace, states_only=states)])
        except NoSpace:
            return
        finally:
            for number in covered:
                self._places.pop(number, None)
            self._epoch.number += 1
        self._journal.say(Word.CLEARED, scope)


def write_until_killed(arguments: dict[str, Any], opened: Any) -> int:
    """A job: open the store and work on it, for `steps` steps (0: without end), reading from a second thread too.

    arguments: directory, journal, seed, first (number), budget; die_in_call and share as in `calls`; block_log; no_sync
    for syncs that do nothing once the store is open.
    """
    rng = random.Random(arguments["seed"])
    block_log = arguments.get("block_log")
    number: int = arguments["first"]
    with Journal(Path(arguments["journal"]), block_log=Path(block_log) if block_log else None) as journal:
        if arguments.get("die_in_call") and arguments.get("die_opening"):
            die_in_call(arguments["die_in_call"], share=arguments["share"])
        left = arguments.get("steps") or -1
        begun = False
        while left:
            log, recovery = open_log(
                arguments["directory"],
                budget_bytes=arguments["budget"],
                segment_bytes=SEGMENT_BYTES,
                clock=SystemClock(),
            )
            load = MixedLoad(log, recovery, journal, rng, number)
            if not begun:
                opened()
                begun = True
                if arguments.get("no_sync"):
                    lose_syncs()
                if arguments.get("die_in_call") and not arguments.get("die_opening"):
                    die_in_call(arguments["die_in_call"], share=arguments["share"])
            # A store is closed in order and opened again now and then.
            steps = min(rng.randint(100, 1000), left) if left > 0 else rng.randint(100, 1000)
            _work(load, journal, steps, threaded=arguments.get("threaded", True))
            left -= steps if left > 0 else 0
            number = load.next_number
            if left or not arguments.get("leave_open"):
                log.close()
    return number


def _work(load: MixedLoad, journal: Journal, steps: int, *, threaded: bool) -> None:
    """The second thread shares the load's places and has no draws of its own: which places it reads is chance."""
    done = threading.Event()
    failed: list[BaseException] = []

    def read() -> None:
        try:
            while not done.wait(0.001):
                load.read()
        except BaseException as error:
            failed.append(error)
            raise

    reader = threading.Thread(target=read, daemon=True)
    if threaded:
        reader.start()
    try:
        for _ in range(steps):
            load.step()
    finally:
        done.set()
        if threaded:
            reader.join()
    if failed:
        journal.say(Word.WRONG, text=f"a read beside other work failed: {failed[0]!r}")
