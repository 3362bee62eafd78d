"""Copying what lives in a segment forward, so that the segment can go."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import KvstoreError, NoSpace
from kvstore.store.appender import Appender
from kvstore.store.base import Place
from kvstore.store.catalog import key_of, uses_row
from kvstore.store.choice import copy_groups
from kvstore.store.format import POLICY_KIND
from kvstore.store.reader import Checked
from kvstore.store.segment import COVERED_KINDS, Segment, bytes_for
from kvstore.store.state import OpenedStore
from kvstore.store.writer import Pending
from kvstore.types import BlockKey, Checks, Lineage

_OWN_KINDS = frozenset({*COVERED_KINDS, POLICY_KIND})
"""The log keeps their place itself; callers are not told where they went."""


class Cleaner:
    """Cleans one segment at a time, in the appending thread's turn."""

    def __init__(self, store: OpenedStore, appender: Appender) -> None:
        self._store = store
        self._table = store.table
        self._appender = appender

    def clean(self, source: Segment) -> dict[Place, Place]:
        """Copy the live records of `source` forward, durably; afterwards nothing lives in it.

        Old place to new place, without the records found damaged and those discarded meanwhile. Raises NoSpace
        before anything is written when the copies do not fit; after any error the source is as it was, and what was
        copied is dead.
        """
        with self._table.lock:
            indexes = source.live_indexes()
            lengths = [source.place(index).length for index in indexes]
        self._refuse_without_room(lengths)
        copies: dict[int, Place] = {}
        damaged: list[int] = []
        try:
            begin = 0
            for group in copy_groups(indexes, lengths):
                begin += len(group)
                self._copy(source, group, lengths[begin:], copies, damaged)
        except KvstoreError:
            with self._table.lock:
                for index, place in copies.items():
                    # The log's own records have moved for good; their old copies are dead already.
                    if source.kind(index) not in _OWN_KINDS:
                        self._table.kill(place)
            raise
        self._renew_clears(source, damaged)
        with self._table.lock:
            moved = self._take_over(source, copies)
            for index in damaged:
                source.kill(index)
        rows: dict[bytes, bytes | None] = {}
        for segment_id in sorted({place.segment_id for place in copies.values()}):
            rows.update(uses_rows(self._store, segment_id))
        if rows:
            self._store.write_rows(rows)
        return moved

    def _renew_clears(self, source: Segment, damaged: Sequence[int]) -> None:
        """A clear whose bytes are damaged is written anew: all that it says is known, and without it what it covers would be
        found again."""
        places = {source.place(index) for index in damaged if source.kind(index) in COVERED_KINDS}
        renewed = [
            Pending(
                kind=kind,
                namespace=namespace,
                key=BlockKey(namespace),
                parent=BlockKey(namespace),
                position=0,
                lineage=Lineage.EXACT,
                checks=Checks(0),
                payload=b"",
                length=0,
                sequence=sequence,
                created_ms=self._store.now_ms(),
            )
            for (namespace, kind), (sequence, place) in self._store.clears.items()
            if place in places
        ]
        if renewed:
            self._appender.append(renewed, cleaning=True)

    def _refuse_without_room(self, lengths: Sequence[int]) -> None:
        self._store.disk.refresh()
        need = bytes_for(lengths, namespaces=1)
        if need > self._appender.free_bytes(cleaning=True):
            raise NoSpace(f"copying {need} bytes forward does not fit into the disk budget; reclaim first")

    def _copy(
        self,
        source: Segment,
        group: list[int],
        following: list[int],
        copies: dict[int, Place],
        damaged: list[int],
    ) -> None:
        records = self._store.reader.records([source.place(index) for index in group])
        whole = [(index, record) for index, record in zip(group, records, strict=True) if record is not None]
        damaged.extend(index for index, record in zip(group, records, strict=True) if record is None)
        items = [_pending(record) for _, record in whole]
        begin = 0
        while begin < len(items):
            # What no longer fits the open segment goes to the next one.
            count = self._appender.fitting(items[begin:]) or len(items) - begin
            part = items[begin : begin + count]
            rest = [item.length for item in items[begin + count :]] + following
            places = self._appender.append(part, cleaning=True, following=rest)
            copies.update(zip((index for index, _ in whole[begin : begin + count]), places, strict=True))
            self._table.count("cleaned_bytes", sum(item.length for item in part))
            begin += count

    def _take_over(self, source: Segment, copies: dict[int, Place]) -> dict[Place, Place]:
        moved: dict[Place, Place] = {}
        described = {each.place: key for key, each in self._store.descriptions.items()}
        for index, place in copies.items():
            if source.kind(index) in _OWN_KINDS:
                source.kill(index)
                continue
            if not source.is_live(index):
                self._table.kill(place)
                continue
            target = self._table.segments[place.segment_id]
            number = target.find(place)
            assert number is not None
            target.note_use(number, source.used(index))
            source.kill(index)
            moved[source.place(index)] = place
            if (key := described.get(source.place(index))) is not None:
                self._store.descriptions[key] = self._store.descriptions[key]._replace(place=place)
        return moved


def uses_rows(store: OpenedStore, segment_id: int) -> dict[bytes, bytes | None]:
    """The catalogue's row about the uses of a segment's records; nothing when none is known."""
    with store.table.lock:
        segment = store.table.segments[segment_id]
        pairs = list(segment.uses())
    return {key_of(b"U", segment_id): uses_row(segment.identity.salt, pairs)} if pairs else {}


def _pending(record: Checked) -> Pending:
    """The same record once more: a copy keeps its sequence, so that a clear still covers it."""
    head = record.header
    return Pending(
        head.kind,
        head.namespace,
        head.key,
        head.parent,
        head.position,
        head.lineage,
        head.checks,
        record.payload,
        head.length,
        head.sequence,
        head.created_ms,
        record.slice_ends(),
    )
