"""The block tier's interface: a log of self-describing records, and what is told about them.

A store knows records, places and space; it does not know chains, leases or policies. All calls block and are made
from an executor's threads: one thread at a time appends, cleans and reclaims; any number read at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.types import BlockKey, BytesLike, Checks, Lineage, NamespaceDigest

if TYPE_CHECKING:
    from kvstore.store.format import PayloadSums
    from kvstore.store.records import Records


class RecordKind(IntEnum):
    """Values are part of the disk format. BLOCK, STATE and ROWS equal the ItemKind values; 5 is the log's own."""

    BLOCK = 1
    STATE = 2
    NAMESPACE = 3
    CLEAR = 4
    ROWS = 6
    CLEAR_STATES = 7


class Place(NamedTuple):
    """Where a record's payload begins and how long it is. `segment_id` is never used again for another segment."""

    segment_id: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Record:
    """One thing to write.

    NAMESPACE: `key` is the namespace digest and the payload its description. CLEAR: every BLOCK, STATE and ROWS of
    `namespace` written before it, in its own batch too, is gone for good; the NAMESPACE record and the policy stay.
    CLEAR_STATES: the same for every STATE and ROWS; the BLOCKs stay too.
    `position` is the token count at the item's end. `slices`: where the payload may be cut and still be verified in
    parts, as ends in ascending order; kept for payloads of 64 KiB or more, thinned out above 61. `slot`: the memory of
    which `payload` is a part, where it has the shape of a record. `sums`: of this payload with these slices, where they were
    worked out before.
    """

    kind: RecordKind
    namespace: NamespaceDigest
    key: BlockKey
    parent: BlockKey
    position: int
    lineage: Lineage
    payload: BytesLike
    checks: Checks
    slices: Sequence[int] = ()
    slot: Slot | None = None
    sums: PayloadSums | None = None


class Slot(Protocol):
    """See kvstore.store.buffers.Slot."""

    @property
    def payload(self) -> memoryview: ...

    def finish(self, head: bytes) -> memoryview: ...


class Wanted(NamedTuple):
    """A payload to read, or bytes [begin, end) of it; `end` None: to its end.

    `room`: where a whole payload of 64 KiB or more is to lie: page-aligned memory of `record_span(length)` bytes, which its
    record is read into as it is, so that the payload begins at `payload_gap(length)`. What the room holds is undefined until
    the payload is handed out, and where it is not. For parts and smaller payloads it is left alone.
    """

    place: Place
    key: BlockKey
    kind: RecordKind
    begin: int = 0
    end: int | None = None
    room: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A durable record that recovery found; the payload stays on the device (NAMESPACE payloads are carried)."""

    kind: RecordKind
    namespace: NamespaceDigest
    key: BlockKey
    parent: BlockKey
    position: int
    lineage: Lineage
    checks: Checks
    place: Place
    sequence: int
    last_use: float
    """Wall seconds of the last known use; at least the time of writing."""
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening found. `records` are BLOCK, STATE, ROWS and NAMESPACE in sequence order, without those that a later
    CLEAR or CLEAR_STATES covers and without older copies of the same (namespace, key, kind). `fresh`: the directory was empty.
    `rebuilt`: the catalogue was lost or damaged, and everything came from the log.

    `damaged_records`: were acknowledged and are not found whole. `damaged_segments`: have a header or a footer that is
    damaged or cut off, which need not cost a record. `missing_segments`: the catalogue calls them sealed and their files are
    gone, with all that they held. A removal that the catalogue could not note looks the same; and what is missing along
    with the catalogue nobody can tell. `rescued_descriptions`: of namespaces; the newest is not found whole in the log, and
    is written anew from the catalogue."""

    records: Records
    policies: Mapping[NamespaceDigest, str]
    fresh: bool
    rebuilt: bool
    torn_bytes: int
    damaged_records: int
    damaged_segments: int = 0
    missing_segments: int = 0
    rescued_descriptions: int = 0


class Cheapest(NamedTuple):
    """The sealed segment whose cleaning costs least for what it gives back. `live` and `allocated` in bytes."""

    segment_id: int
    live: int
    allocated: int

    @property
    def live_share(self) -> float:
        return self.live / self.allocated


class Damage(NamedTuple):
    """`what` was found wrong, in words. `key` is empty where neither record nor footer can say it."""

    place: Place
    key: bytes
    what: str


class Verified(NamedTuple):
    """What one step of `RecordLog.verify` read: records, payload bytes, what of it is damaged, and the number at which
    the next step begins; None: the segment is done."""

    records: int
    bytes: int
    damages: list[Damage]
    next: int | None


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes, as accounted. live + dead + padded + reserved == allocated for segments; `other` is everything else
    below the directory (catalogue, ballast, identity). allocated + other <= budget at every moment. `spare`, a part of
    reserved: in files that wait for their next segment."""

    budget: int
    live: int
    dead: int
    padded: int
    reserved: int
    allocated: int
    other: int
    segments: int
    spare: int = 0


class RecordLog(Protocol):
    """A durable log of records within a disk budget.

    No call runs in a thread in which signal handlers raise: that may be between any two steps, and a lock would stay held.
    """

    def append(self, records: Sequence[Record]) -> list[Place]:
        """Write all records and make them durable; on return each is found again after a crash. The caller must not
        change the payloads meanwhile.

        Raises InvalidArgument for records that no log holds, NoSpace (before anything is written) when `room_bytes` is
        less than they need, and DeviceError when a write or sync fails (NoSpace when the device was full after all);
        then none of them counts as written, and the next append goes to a fresh segment.
        """

    def read(self, wanted: Sequence[Wanted], room: memoryview | None = None) -> list[BytesLike | None]:
        """Payloads, or parts of them, in the order asked, each checked against its header, key, kind, place and
        checksums before it is handed out. A part is read and checked with the slices around it.

        They lie in the rooms that they brought along (`Wanted.room`), all others in `room`, page-aligned memory of at least
        `room_for(wanted)` bytes, and are good for as long as the caller leaves it alone; without it, and parts that are not
        cut at ends of slices, in memory of their own. None for a record that is damaged, of another key, or whose segment is
        gone: the caller forgets it (a counted miss). Damage is looked at twice, and then never read again. Raises
        DeviceError when the device fails the read.
        """

    def room_for(self, wanted: Sequence[Wanted]) -> int:
        """Bytes of room that `read` may need, whole pages; none for what has a room of its own."""

    def room_bytes(self) -> int:
        """Payload bytes that one append may surely hold now, if its payloads have 3,072 bytes on average or more."""

    def largest_append_bytes(self) -> int:
        """Payload bytes that an append may hold at all: more is refused with InvalidArgument."""

    def discard(self, places: Iterable[Place]) -> None:
        """These records are not needed any more; their bytes count as dead. In RAM only: after a crash they may be
        found again, which is harmless, since their bytes are right. Idempotent; unknown places are ignored."""

    def reclaim(self) -> int:
        """Give back every sealed segment in which nothing lives and that no reader holds. Bytes given back."""

    def cheapest_segment(self) -> Cheapest | None:
        """The sealed segment with the fewest live bytes for its size, or None: copies
        lie in segments no larger than they are, and cleaning those wins nothing. One in which nothing lives is not
        named: `reclaim` takes it as soon as no reader holds it."""

    def clean(self, segment_id: int) -> dict[Place, Place]:
        """Copy the live records of a sealed segment forward, durably, then let the segment go. Old place to new
        place; a record found damaged or discarded on the way maps to nothing. Raises NoSpace when the copy does not fit,
        and InvalidArgument for a segment that is not sealed or is gone."""

    @property
    def erasing(self) -> bytes:
        """What `begin_erasing` was told and `end_erasing` has not ended, before the last start too; empty for nothing."""

    def begin_erasing(self, note: bytes) -> None:
        """Durably remember `note`, and from now on overwrite each file that is given up before it is let go or used again. What
        an earlier life left behind the open segment's last record is overwritten on return; spare files are, some at a time, by
        `to_erase`, and nobody uses them before. Raises DeviceError, NoSpace."""

    def expect_clears(self, namespaces: Collection[NamespaceDigest]) -> None:
        """What the next CLEAR of each of these covers is to be erased. What is written later is not."""

    def to_erase(self) -> list[int]:
        """The segments whose files may hold any of that still: to be cleaned, but for those that are on their way out already, which
        asking again lets go. Empty: nothing is left."""

    def blank_gap(self, segment_id: int) -> bool:
        """Overwrite what an earlier life left in a sealed segment's file. False where it cannot be told from what is needed: then the
        segment is to be cleaned. Raises DeviceError, NoSpace."""

    def end_erasing(self) -> None:
        """All of it is done."""

    def segment_ids(self) -> list[int]:
        """The segments in which something lives, oldest first."""

    def verify(self, segment_id: int, *, begin: int, bytes_max: int) -> Verified:
        """Read live records of a segment, from the one with number `begin` on and about `bytes_max` payload bytes, and
        check header, checksums and table of slices of each; in the step that begins at 0 the segment's header and
        footer, too. A damaged record is dead from then on. Nothing is found in a segment that is gone. Runs beside
        everything else. Raises DeviceError when the device fails the read."""

    def put_policy(self, namespace: NamespaceDigest, policy: str) -> None:
        """Durably remember a namespace's window-state policy."""

    def note_uses(self, uses: Iterable[tuple[Place, float]]) -> None:
        """Persist last uses (wall seconds), by the hour, a row per segment. May be lost in a crash."""

    def space(self) -> Space: ...

    def counters(self) -> Mapping[str, int]:
        """Monotonic counts by name: appended_records, appended_bytes, syncs, read_records, read_again_records,
        damaged_records, quarantined_records, missing_segments (when it was opened), device_errors, reclaimed_segments,
        recycled_segments, cleaned_bytes, written_bytes (all that went to the device: headers, padding, footers, copies, zeros
        and the catalogue), catalog_errors, overwritten_bytes (with zeros, while something was erased)."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless the law of `Space` holds and agrees with the file system within 1 %."""

    @property
    def buffered_because(self) -> str:
        """Why segments pass through the page cache; empty where they do not."""

    def close(self) -> None:
        """Seal or sync what is open and release the directory. Idempotent."""
