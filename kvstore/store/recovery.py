"""Opening a directory: what it holds is found, merged and told; nothing is erased on doubt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.clock import Clock
from kvstore.store.base import Place, RecordKind, Recovery
from kvstore.store.buffers import BufferPool
from kvstore.store.catalog import (
    IDENTITY_KEY,
    OF_NAMESPACES,
    SEALED,
    UNSEALED,
    Catalog,
    Description,
    SegmentRow,
    decode_description_row,
    decode_policy_row,
    decode_segment_row,
    decode_uses_row,
    description_key,
    description_row,
    identity_row,
    key_of,
    policy_row,
    refuse_newer,
    segment_row,
    uses_row,
)
from kvstore.store.columns import FLAG_BOUNDED, FLAG_XXH3
from kvstore.store.device import Device
from kvstore.store.erasing import NOTE_NAME, blank_forgotten, read_note
from kvstore.store.format import PAGE, POLICY_KIND, align, store_tag
from kvstore.store.identity import IDENTITY_NAME, Randomness, create_identity, read_identity
from kvstore.store.lanes import LANES, Lanes
from kvstore.store.loading import LoadedSegment, Progress, load_segment
from kvstore.store.merge import Part, merge
from kvstore.store.reader import OpenFiles, Reader
from kvstore.store.records import NOWHERE, Columns, Records
from kvstore.store.segment import (
    CACHED_KINDS,
    PIECE_BYTES,
    TEMPORARY_SUFFIX,
    Segment,
    State,
    segment_id_of,
    segment_name,
    spare_id_of,
)
from kvstore.store.space import DiskBudget
from kvstore.store.spares import adopt_spares
from kvstore.store.state import OpenedStore
from kvstore.store.table import SegmentTable
from kvstore.types import BlockKey, Checks, Lineage, NamespaceDigest

_ROWS_PER_WRITE_BYTES = 8 << 20
_HOUR = 3600
_ROW_OF_SEGMENT = (b"S", b"F", b"U")
_HANDED_OUT = np.isin(np.arange(256), [*CACHED_KINDS, int(RecordKind.NAMESPACE)])
"""By kind: what the caller is told of. Clears and policies are the log's own."""


def open_store(
    device: Device,
    catalog: Catalog,
    *,
    budget_bytes: int,
    segment_bytes: int,
    clock: Clock,
    randomness: Randomness,
    lanes: Lanes,
    progress: Progress,
) -> tuple[OpenedStore, Recovery]:
    """Lock the directory and find everything durable in it. Raises the errors of `open_log`; then nothing is held."""
    read_identity(device)
    device.lock()
    try:
        # Once more under the lock: another process may have begun, or ended, in between.
        found_uuid = read_identity(device)
        uuid = found_uuid if found_uuid is not None else create_identity(device, randomness)
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
            Reader(table, files, store_tag(uuid), lanes),
            DiskBudget(table, budget_bytes, segment_bytes, device=device),
            lanes,
            BufferPool(PIECE_BYTES, keep=LANES),
        )
        store.erasing = read_note(device)
        recovery = _recover(store, progress, fresh=found_uuid is None)
        adopt_spares(store)
        return store, recovery
    except BaseException:
        catalog.close()
        device.close()
        raise


def _remove_unfinished(device: Device) -> None:
    for name in device.names():
        if name.endswith(TEMPORARY_SUFFIX) and (
            name in (IDENTITY_NAME + TEMPORARY_SUFFIX, NOTE_NAME + TEMPORARY_SUFFIX)
            or segment_id_of(name.removesuffix(TEMPORARY_SUFFIX)) is not None
        ):
            device.unlink(name)


def _recover(store: OpenedStore, progress: Progress, *, fresh: bool) -> Recovery:
    progress("catalogue", 0, 1)
    rows, intact = store.catalog.load()
    # Before anything is changed.
    refuse_newer(rows, uuid=store.uuid, where=store.device.where)
    _remove_unfinished(store.device)
    progress("catalogue", 1, 1)
    is_ours = rows.get(IDENTITY_KEY) == identity_row(store.uuid)
    if intact and not fresh and not is_ours:
        # Of another store, or of another version: its rows say nothing about these segments.
        intact = False
    stale: dict[bytes, bytes | None] = {}
    if not intact:
        stale = dict.fromkeys(rows)
        rows = {key: row for key, row in rows.items() if is_ours and key[:1] in OF_NAMESPACES}
    # Last uses are in the catalogue alone. Where it is lost, everything counts as used now: nothing goes before its time.
    hour = 0 if intact or fresh else math.ceil(store.clock.wall() / _HOUR)
    loaded = _load_all(store, rows, progress)
    without_file = _rows_without_file(rows, {segment.identity.segment_id for segment in loaded})
    stale.update(without_file)
    missing_segments = sum(_is_sealed_row(key, rows[key]) for key in without_file)
    store.table.count("missing_segments", missing_segments)
    damaged_segments = sum(segment.damaged for segment in loaded)
    torn_bytes = sum(segment.torn_bytes for segment in loaded)
    damaged_records = sum(segment.damaged_records for segment in loaded)
    books = _fill_table(store, loaded, rows, hour)
    damaged_records += _load_policies(store, books, rows)
    lost, rescued = _load_descriptions(store, books, rows)
    damaged_records += lost
    store.table.count("damaged_records", damaged_records)
    stale.update(_description_rows(store, rows if intact else {}))
    _write_rows(store, loaded, stale, hour)
    # From here on the footers are held by the books alone, which let go of one after the other.
    loaded.clear()
    rows.clear()
    records = _told(store, books)
    return Recovery(
        records=records,
        policies={namespace: policy for namespace, (_, policy, _) in store.policies.items()},
        fresh=fresh,
        rebuilt=not fresh and not intact,
        torn_bytes=torn_bytes,
        damaged_records=damaged_records,
        rescued_descriptions=rescued,
        damaged_segments=damaged_segments,
        missing_segments=missing_segments,
    )


def _load_all(store: OpenedStore, rows: dict[bytes, bytes], progress: Progress) -> list[LoadedSegment]:
    """Every segment of ours, lowest id first; those that are dead or were never used are removed."""
    loaded = []
    removed = False
    names = store.device.names()
    ids = sorted(number for number in map(segment_id_of, names) if number is not None)
    # A spare keeps the id that it had: two files must never want one name.
    spare_ids = [number for number in map(spare_id_of, names) if number is not None]
    known_ids = [int.from_bytes(key[1:], "big") for key in rows if key[:1] in _ROW_OF_SEGMENT]
    store.next_segment_id = max([0, *ids, *spare_ids, *known_ids]) + 1
    for done, segment_id in enumerate(ids):
        progress("segments", done, len(ids))
        segment = load_segment(
            store.device, segment_id, uuid=store.uuid, rows=rows, lanes=store.lanes, progress=progress
        )
        if segment is None:
            continue
        store.next_sequence = max(store.next_sequence, segment.first_sequence)
        if segment.dead or segment.unused:
            blank_forgotten(store, segment_name(segment_id))
            store.device.unlink(segment_name(segment_id))
            removed = True
            continue
        loaded.append(segment)
    if removed:
        store.device.sync_names()
    progress("segments", len(ids), len(ids))
    return loaded


class _Books(NamedTuple):
    """Of each segment, in the same order: its entries, which of them live, and the hour of their last use."""

    parts: list[Part]
    alive: list[NDArray[np.bool_]]
    hours: list[NDArray[np.uint32]]

    def place(self, part: int, row: int) -> Place:
        entry = self.parts[part].entries[row]
        return Place(self.parts[part].segment_id, int(entry["offset"]), int(entry["length"]))


def _fill_table(
    store: OpenedStore, loaded: list[LoadedSegment], rows: dict[bytes, bytes], hour: int
) -> _Books:
    """Enter every segment in the table; the newest copy of each thing lives, and everything else is dead. hour: of the last
    use of what no row tells of."""
    parts, numbers = [], []
    for found in loaded:
        entries = found.footer.entries
        numbers.append(np.array([store.table.number_of(name) for name in found.footer.namespaces], np.uint32))
        parts.append(Part(found.identity.segment_id, entries, numbers[-1][entries["namespace"]]))
        store.next_sequence = max(store.next_sequence, int(entries["sequence"].max(initial=0)) + 1)
    alive, clears = merge(parts)
    books = _Books(parts, alive, [_hours(found, rows, hour) for found in loaded])
    for found, own, mask, hours in zip(loaded, numbers, books.alive, books.hours, strict=True):
        segment = Segment(found.identity, allocated=align(found.file_bytes, PAGE), state=State.OPEN)
        segment.fill(found.footer.entries, own, hours, mask)
        if found.footer.records_end > segment.end:
            segment.advance(found.footer.records_end, segment.live + segment.dead)
        segment.close(segment.allocated)
        segment.has_footer = found.has_footer
        store.table.segments[segment.segment_id] = segment
    names = store.table.namespaces()
    for clear in clears:
        store.clears[names[clear.space], clear.kind] = (clear.sequence, books.place(clear.part, clear.row))
    return books


def _hours(found: LoadedSegment, rows: dict[bytes, bytes], hour: int) -> NDArray[np.uint32]:
    """The hour of the last known use of each entry, and `hour` where none is known; 0: not since it was written."""
    offsets = found.footer.entries["offset"]
    hours = np.full(len(offsets), hour, np.uint32)
    salt = found.identity.salt
    uses = decode_uses_row(rows.get(key_of(b"U", found.identity.segment_id), b""), salt=salt)
    if len(uses) and len(offsets):
        at = np.minimum(np.searchsorted(offsets, uses[:, 0]), len(offsets) - 1)
        known = offsets[at] == uses[:, 0]
        hours[at[known]] = uses[known, 1]
    return hours


def _load_policies(store: OpenedStore, books: _Books, rows: dict[bytes, bytes]) -> int:
    """Policies, from the catalogue and from the log; how many of the log's could not be read."""
    for key, data in rows.items():
        if key[:1] == b"P":
            sequence, policy = decode_policy_row(data)
            store.policies[NamespaceDigest(key[1:])] = (sequence, policy, None)
            store.next_sequence = max(store.next_sequence, sequence + 1)
    names = store.table.namespaces()
    unreadable = 0
    for part, row, place, payload in _payloads(store, books, POLICY_KIND):
        namespace = names[books.parts[part].spaces[row]]
        sequence = int(books.parts[part].entries["sequence"][row])
        if payload is None:
            unreadable += 1
        elif sequence >= store.policies.get(namespace, (0,))[0]:
            store.policies[namespace] = (sequence, payload.decode(), place)
            continue
        store.table.kill(place)
    return unreadable


def _payloads(store: OpenedStore, books: _Books, kind: int) -> Iterator[tuple[int, int, Place, bytes | None]]:
    """Part, row, place and payload of all that lives and is of this kind; None for what cannot be read."""
    rows = [
        (number, row)
        for number, (part, alive) in enumerate(zip(books.parts, books.alive, strict=True))
        for row in np.flatnonzero(alive & (part.entries["kind"] == kind)).tolist()
    ]
    places = [books.place(part, row) for part, row in rows]
    for (part, row), place, read in zip(rows, places, store.reader.records(places), strict=True):
        yield part, row, place, None if read is None else bytes(read.payload)


def _load_descriptions(store: OpenedStore, books: _Books, rows: dict[bytes, bytes]) -> tuple[int, int]:
    """Descriptions of namespaces, from the log, and from the catalogue where the log's newest cannot be read; how many are
    lost, and how many the catalogue alone has. Without its description a namespace is lost with all that it holds."""
    for key, data in rows.items():
        if key[:1] == b"N":
            each = decode_description_row(key, data)
            store.descriptions[each.namespace, each.key] = each
            # It is written anew with its own sequence, and what comes after it is newer.
            store.next_sequence = max(store.next_sequence, each.sequence + 1)
    names = store.table.namespaces()
    lost = 0
    for part, row, place, payload in list(_payloads(store, books, int(RecordKind.NAMESPACE))):
        entry = books.parts[part].entries[row]
        namespace, key = names[books.parts[part].spaces[row]], BlockKey(entry["key"].tobytes())
        known = store.descriptions.get((namespace, key))
        if payload is not None and (known is None or int(entry["sequence"]) >= known.sequence):
            store.descriptions[namespace, key] = _description(namespace, entry, payload, place)
            continue
        lost += known is None
        books.alive[part][row] = False
        store.table.kill(place)
    return lost, sum(each.place is None for each in store.descriptions.values())


def _description(namespace: NamespaceDigest, entry: np.void, payload: bytes, place: Place) -> Description:
    flags = int(entry["flags"])
    return Description(
        namespace,
        BlockKey(entry["key"].tobytes()),
        int(entry["sequence"]),
        BlockKey(entry["parent"].tobytes()),
        int(entry["position"]),
        Lineage.BOUNDED if flags & FLAG_BOUNDED else Lineage.EXACT,
        Checks(int(entry["crc32"]), int(entry["xxh3_64"]), flags & FLAG_XXH3 != 0),
        payload,
        place,
    )


def _description_rows(store: OpenedStore, rows: dict[bytes, bytes]) -> dict[bytes, bytes | None]:
    """What the catalogue does not say of them yet."""
    wanted = {description_key(each): description_row(each) for each in store.descriptions.values()}
    return {key: row for key, row in wanted.items() if rows.get(key) != row}


def _told(store: OpenedStore, books: _Books) -> Records:
    """What the caller is told of."""
    masks = [
        alive & _HANDED_OUT[part.entries["kind"]]
        for part, alive in zip(books.parts, books.alive, strict=True)
    ]
    rescued = [each for each in store.descriptions.values() if each.place is None]
    columns = Columns.room(sum(int(np.count_nonzero(mask)) for mask in masks) + len(rescued))
    now = store.clock.wall()
    begin = 0
    # A use is kept by the hour, rounded up: a record may stay an hour too long and never goes an hour too soon.
    for mask, hours in zip(masks, books.hours, strict=True):
        begin = _tell(columns, begin, books.parts.pop(0), mask, np.minimum(hours[mask] * float(_HOUR), now))
    for each in rescued:
        _tell_rescued(store, columns, begin, each, now)
        begin += 1
    if np.any(columns.sequence[1:] < columns.sequence[:-1]):
        columns.sort(np.argsort(columns.sequence, kind="stable"))
    records = Records(store.table.namespaces(), columns, {})
    for row in records.rows_of(RecordKind.NAMESPACE).tolist():
        found = records[row]
        records.payloads[row] = store.descriptions[found.namespace, found.key].payload
    return records


def _tell_rescued(store: OpenedStore, columns: Columns, row: int, each: Description, now: float) -> None:
    """A description that the catalogue alone has: it lies nowhere until it is written anew."""
    columns.kind[row] = int(RecordKind.NAMESPACE)
    columns.space[row] = store.table.number_of(each.namespace)
    columns.key[row] = np.frombuffer(each.key, "<u8")
    columns.parent[row] = np.frombuffer(each.parent, "<u8")
    columns.position[row] = each.position
    columns.bounded[row] = each.lineage is Lineage.BOUNDED
    columns.crc32[row], columns.xxh3_64[row], columns.has_xxh3[row] = (
        each.checks.crc32,
        each.checks.xxh3_64,
        each.checks.has_xxh3,
    )
    columns.segment[row], columns.offset[row], columns.length[row] = NOWHERE
    columns.sequence[row] = each.sequence
    columns.last_use[row] = now


def _tell(
    columns: Columns, begin: int, part: Part, mask: NDArray[np.bool_], used: NDArray[np.float64]
) -> int:
    """Fill the columns from `begin` with what is masked of a segment; where the next one begins. used: last uses of
    what is masked, wall seconds."""
    entries = part.entries if mask.all() else part.entries[mask]
    end = begin + len(entries)
    at = slice(begin, end)
    for name in ("kind", "key", "parent", "position", "crc32", "xxh3_64", "offset", "length", "sequence"):
        getattr(columns, name)[at] = entries[name]
    columns.space[at] = part.spaces[mask]
    columns.segment[at] = part.segment_id
    columns.bounded[at] = entries["flags"] & FLAG_BOUNDED != 0
    columns.has_xxh3[at] = entries["flags"] & FLAG_XXH3 != 0
    columns.last_use[at] = np.maximum(entries["created_ms"] / 1000, used)
    return end


def _rows_without_file(rows: dict[bytes, bytes], ids: set[int]) -> dict[bytes, bytes | None]:
    return {
        key: None for key in rows if key[:1] in _ROW_OF_SEGMENT and int.from_bytes(key[1:], "big") not in ids
    }


def _is_sealed_row(key: bytes, data: bytes) -> bool:
    """Whether it tells of a segment that was never given up: such a file does not go."""
    row = decode_segment_row(data) if key[:1] == b"S" else None
    return row is not None and row.state in (SEALED, UNSEALED)


def _write_rows(
    store: OpenedStore, loaded: list[LoadedSegment], first: dict[bytes, bytes | None], hour: int
) -> None:
    """Bring the catalogue up to what was found, some megabytes at a time. hour: of last uses that it has lost."""
    changes: dict[bytes, bytes | None] = {**first, IDENTITY_KEY: identity_row(store.uuid)}
    for namespace, (sequence, policy, _) in store.policies.items():
        changes[b"P" + namespace] = policy_row(sequence, policy)
    for group in _grouped(loaded, changes, hour):
        if not store.write_rows(group):
            return


def _grouped(
    loaded: list[LoadedSegment], changes: dict[bytes, bytes | None], hour: int
) -> Iterator[dict[bytes, bytes | None]]:
    for segment in loaded:
        if segment.known or not len(segment.footer.entries):
            continue
        segment_id, salt = segment.identity.segment_id, segment.identity.salt
        state = SEALED if segment.has_footer else UNSEALED
        changes[key_of(b"S", segment_id)] = segment_row(SegmentRow(salt, segment.file_bytes, state))
        changes[key_of(b"F", segment_id)] = segment.footer.data
        if hour:
            offsets = segment.footer.entries["offset"].tolist()
            changes[key_of(b"U", segment_id)] = uses_row(salt, zip(offsets, repeat(hour)))
        if sum(len(value or b"") for value in changes.values()) > _ROWS_PER_WRITE_BYTES:
            yield changes
            changes = {}
    yield changes
