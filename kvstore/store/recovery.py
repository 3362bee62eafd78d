"""Opening a directory: what it holds is found, merged and told; nothing is erased on doubt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.clock import Clock
from kvstore.store.base import Found, Place, RecordKind, Recovery
from kvstore.store.catalog import (
    IDENTITY_KEY,
    SEALED,
    Catalog,
    SegmentRow,
    decode_policy_row,
    decode_uses_row,
    identity_row,
    key_of,
    policy_row,
    segment_row,
)
from kvstore.store.device import Device
from kvstore.store.format import PAGE, POLICY_KIND, Entry, align, encode_footer, store_tag
from kvstore.store.identity import IDENTITY_NAME, Randomness, create_identity, read_identity
from kvstore.store.loading import LoadedSegment, load_segment
from kvstore.store.reader import OpenFiles, Reader
from kvstore.store.segment import COVERED_KINDS, TEMPORARY_SUFFIX, Segment, State, segment_id_of, segment_name
from kvstore.store.space import DiskBudget
from kvstore.store.state import OpenedStore
from kvstore.store.table import SegmentTable
from kvstore.types import BlockKey, NamespaceDigest

_ROWS_PER_WRITE_BYTES = 8 << 20
_HOUR = 3600
_KINDS = {int(kind): kind for kind in RecordKind}


@dataclass(slots=True)
class _Newest:
    """The newest copy of something: copies made by cleaning have the same sequence, and the later place wins."""

    sequence: int
    place: Place
    entry: Entry
    namespace: NamespaceDigest
    used_hour: int

    def older_than(self, sequence: int, place: Place) -> bool:
        return (self.sequence, self.place.segment_id, self.place.offset) < (
            sequence,
            place.segment_id,
            place.offset,
        )


def open_store(
    device: Device,
    catalog: Catalog,
    *,
    budget_bytes: int,
    segment_bytes: int,
    clock: Clock,
    randomness: Randomness,
) -> tuple[OpenedStore, Recovery]:
    """Lock the directory and find everything durable in it. Raises the errors of `open_log`; then nothing is held."""
    read_identity(device)
    device.lock()
    try:
        # Once more under the lock: another process may have begun, or ended, in between.
        found_uuid = read_identity(device)
        uuid = found_uuid if found_uuid is not None else create_identity(device, randomness)
        for name in device.names():
            if name.endswith(TEMPORARY_SUFFIX) and (
                name == IDENTITY_NAME + TEMPORARY_SUFFIX
                or segment_id_of(name.removesuffix(TEMPORARY_SUFFIX)) is not None
            ):
                device.unlink(name)
        table = SegmentTable()
        files = OpenFiles(device)
        store = OpenedStore(
            device,
            catalog,
            clock,
            randomness,
            uuid,
            table,
            files,
            Reader(table, files, store_tag(uuid)),
            DiskBudget(device, table, budget_bytes, segment_bytes),
        )
        return store, _recover(store, fresh=found_uuid is None)
    except BaseException:
        catalog.close()
        device.close()
        raise


def _recover(store: OpenedStore, *, fresh: bool) -> Recovery:
    rows, intact = store.catalog.load()
    if intact and not fresh and rows.get(IDENTITY_KEY) != identity_row(store.uuid):
        # Of another store, or of another version: its rows say nothing about these segments.
        intact = False
    stale: dict[bytes, bytes | None] = {}
    if not intact:
        stale = dict.fromkeys(rows)
        rows = {}
    loaded = _load_all(store, rows)
    newest, clears = _merge(store, loaded, rows)
    records, policies, unreadable = _tell(store, newest, rows)
    store.clears.update(clears)
    ids = {segment.identity.segment_id for segment in loaded}
    _write_rows(store, loaded, {**stale, **_rows_without_file(rows, ids)})
    return Recovery(
        records=records,
        policies=policies,
        fresh=fresh,
        rebuilt=not fresh and not intact,
        torn_bytes=sum(segment.torn_bytes for segment in loaded),
        damaged_records=sum(segment.damaged_records for segment in loaded) + unreadable,
    )


def _load_all(store: OpenedStore, rows: dict[bytes, bytes]) -> list[LoadedSegment]:
    """Every segment of ours, lowest id first; those that are dead or were never used are removed."""
    loaded = []
    removed = False
    names = store.device.names()
    ids = sorted(number for number in map(segment_id_of, names) if number is not None)
    known_ids = [int.from_bytes(key[1:], "big") for key in rows if key[:1] in (b"S", b"F", b"U")]
    store.next_segment_id = max([0, *ids, *known_ids]) + 1
    for segment_id in ids:
        segment = load_segment(store.device, segment_id, uuid=store.uuid, rows=rows)
        if segment is None:
            continue
        store.next_sequence = max(store.next_sequence, segment.first_sequence)
        if segment.dead or segment.unused:
            store.device.unlink(segment_name(segment_id))
            removed = True
            continue
        loaded.append(segment)
    if removed:
        store.device.sync_names()
    return loaded


def _merge(
    store: OpenedStore, loaded: list[LoadedSegment], rows: dict[bytes, bytes]
) -> tuple[list[_Newest], dict[tuple[NamespaceDigest, int], tuple[int, Place]]]:
    """Fill the table; the newest copy of each thing lives, and everything else in a segment is dead."""
    clears: dict[tuple[NamespaceDigest, int], tuple[int, Place]] = {}
    newest: dict[tuple[int, int, bytes], _Newest] = {}
    for found in loaded:
        segment = Segment(found.identity, allocated=align(found.file_bytes, PAGE), state=State.OPEN)
        store.table.segments[segment.segment_id] = segment
        uses = decode_uses_row(rows.get(key_of(b"U", segment.segment_id), b""), salt=found.identity.salt)
        namespaces = found.footer.namespaces
        numbers = [store.table.number_of(namespace) for namespace in namespaces]
        for index, entry in enumerate(found.footer.entries):
            namespace, number = namespaces[entry.namespace], numbers[entry.namespace]
            place = segment.add(
                offset=entry.offset,
                length=entry.length,
                kind=entry.kind,
                namespace=number,
                sequence=entry.sequence,
            )
            used_hour = uses.get(entry.offset, 0)
            if used_hour:
                segment.note_use(index, used_hour)
            store.next_sequence = max(store.next_sequence, entry.sequence + 1)
            if entry.kind in COVERED_KINDS:
                # As with the rest, the newest clear of a namespace covers what older ones of its kind did.
                identity = (number, entry.kind, b"")
            else:
                identity = (number, entry.kind, entry.key)
            other = newest.get(identity)
            if other is None:
                newest[identity] = _Newest(entry.sequence, place, entry, namespace, used_hour)
            elif other.older_than(entry.sequence, place):
                store.table.kill(other.place)
                newest[identity] = _Newest(entry.sequence, place, entry, namespace, used_hour)
            else:
                segment.kill(index)
        if found.footer.records_end > segment.end:
            segment.advance(found.footer.records_end, segment.live + segment.dead)
        segment.close(segment.allocated)
    for item in newest.values():
        if item.entry.kind in COVERED_KINDS:
            clears[item.namespace, item.entry.kind] = (item.sequence, item.place)
    covered_before: dict[tuple[NamespaceDigest, int], int] = {}
    for (namespace, clear), (sequence, _) in clears.items():
        for kind in COVERED_KINDS[clear]:
            known = covered_before.get((namespace, kind), 0)
            covered_before[namespace, kind] = max(known, sequence)
    kept = []
    for item in newest.values():
        if item.sequence < covered_before.get((item.namespace, item.entry.kind), 0):
            store.table.kill(item.place)
        elif item.entry.kind not in COVERED_KINDS:
            kept.append(item)
    kept.sort(key=lambda item: item.sequence)
    return kept, clears


def _tell(
    store: OpenedStore, newest: list[_Newest], rows: dict[bytes, bytes]
) -> tuple[list[Found], dict[NamespaceDigest, str], int]:
    """Records for the caller, policies, and how many payloads that had to be read could not be."""
    now = store.clock.wall()
    for key, data in rows.items():
        if key[:1] == b"P":
            sequence, policy = decode_policy_row(data)
            store.policies[NamespaceDigest(key[1:])] = (sequence, policy, None)
    carried = [item for item in newest if item.entry.kind in (RecordKind.NAMESPACE, POLICY_KIND)]
    payloads = dict(
        zip(
            (item.place for item in carried),
            store.reader.records([item.place for item in carried]),
            strict=True,
        )
    )
    records = []
    unreadable = 0
    for item in newest:
        payload = b""
        if item.place in payloads:
            read = payloads[item.place]
            if read is None:
                unreadable += 1
                store.table.kill(item.place)
                continue
            payload = read[1]
        if item.entry.kind == POLICY_KIND:
            if item.sequence >= store.policies.get(item.namespace, (0,))[0]:
                store.policies[item.namespace] = (item.sequence, payload.decode(), item.place)
            else:
                store.table.kill(item.place)
            continue
        records.append(_found(item, payload, now))
    return records, {namespace: policy for namespace, (_, policy, _) in store.policies.items()}, unreadable


def _found(item: _Newest, payload: bytes, now: float) -> Found:
    entry = item.entry
    # A use is kept by the hour, rounded up: a record may stay an hour too long and never goes an hour too soon.
    used = min(float(item.used_hour * _HOUR), now)
    return Found(
        kind=_KINDS[entry.kind],
        namespace=item.namespace,
        key=BlockKey(entry.key),
        parent=BlockKey(entry.parent),
        position=entry.position,
        lineage=entry.lineage,
        checks=entry.checks,
        place=item.place,
        sequence=item.sequence,
        last_use=max(entry.created_ms / 1000, used),
        payload=payload,
    )


def _rows_without_file(rows: dict[bytes, bytes], ids: set[int]) -> dict[bytes, bytes | None]:
    return {
        key: None
        for key in rows
        if key[:1] in (b"S", b"F", b"U") and int.from_bytes(key[1:], "big") not in ids
    }


def _write_rows(store: OpenedStore, loaded: list[LoadedSegment], first: dict[bytes, bytes | None]) -> None:
    """Bring the catalogue up to what was found, some megabytes at a time."""
    changes: dict[bytes, bytes | None] = {**first, IDENTITY_KEY: identity_row(store.uuid)}
    for namespace, (sequence, policy, _) in store.policies.items():
        changes[b"P" + namespace] = policy_row(sequence, policy)
    for group in _grouped(loaded, changes):
        if not store.write_rows(group):
            return


def _grouped(
    loaded: list[LoadedSegment], changes: dict[bytes, bytes | None]
) -> Iterator[dict[bytes, bytes | None]]:
    for segment in loaded:
        if segment.known or not segment.footer.entries:
            continue
        segment_id, salt = segment.identity.segment_id, segment.identity.salt
        changes[key_of(b"S", segment_id)] = segment_row(SegmentRow(salt, segment.file_bytes, SEALED))
        changes[key_of(b"F", segment_id)] = encode_footer(
            segment.identity,
            offset=align(segment.footer.records_end, PAGE),
            records_end=segment.footer.records_end,
            namespaces=segment.footer.namespaces,
            entries=segment.footer.entries,
        )
        if sum(len(value or b"") for value in changes.values()) > _ROWS_PER_WRITE_BYTES:
            yield changes
            changes = {}
    yield changes
