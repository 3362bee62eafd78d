"""What recovery tells, as columns: a record costs about 120 bytes here, and several hundred as an object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvstore.store.base import Found, Place, RecordKind
from kvstore.types import KEY_BYTES, BlockKey, Checks, Lineage, NamespaceDigest

Words = NDArray[np.uint64]
"""Keys of 32 bytes as four little-endian words each: shape (n, 4)."""

NOWHERE = Place(0, 0, 0)
"""Of a record that lies in no segment."""

_ROWS_AT_ONCE = 4096
_KINDS = {int(kind): kind for kind in RecordKind}


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One row per record, all of the same length. `space` is an index into the records' `namespaces`; `last_use` is in
    wall seconds. Read only."""

    kind: NDArray[np.uint8]
    space: NDArray[np.uint32]
    key: Words
    parent: Words
    position: NDArray[np.uint64]
    bounded: NDArray[np.bool_]
    crc32: NDArray[np.uint32]
    xxh3_64: NDArray[np.uint64]
    has_xxh3: NDArray[np.bool_]
    segment: NDArray[np.uint64]
    offset: NDArray[np.uint64]
    length: NDArray[np.uint64]
    sequence: NDArray[np.uint64]
    last_use: NDArray[np.float64]

    @classmethod
    def room(cls, count: int) -> Columns:
        """Columns to be filled."""
        return cls(
            kind=np.empty(count, np.uint8),
            space=np.empty(count, np.uint32),
            key=np.empty((count, 4), np.uint64),
            parent=np.empty((count, 4), np.uint64),
            position=np.empty(count, np.uint64),
            bounded=np.empty(count, np.bool_),
            crc32=np.empty(count, np.uint32),
            xxh3_64=np.empty(count, np.uint64),
            has_xxh3=np.empty(count, np.bool_),
            segment=np.empty(count, np.uint64),
            offset=np.empty(count, np.uint64),
            length=np.empty(count, np.uint64),
            sequence=np.empty(count, np.uint64),
            last_use=np.empty(count, np.float64),
        )

    def sort(self, order: NDArray[np.intp]) -> None:
        """Put the rows into this order, one column at a time."""
        for field in fields(self):
            column = getattr(self, field.name)
            column[...] = column[order]


class Records(Sequence[Found]):
    """Durable records in sequence order: a sequence of `Found`, and the columns behind it for who has many.

    `payloads`: the payloads that are carried, by row.
    """

    def __init__(
        self, namespaces: Sequence[NamespaceDigest], columns: Columns, payloads: dict[int, bytes]
    ) -> None:
        self.namespaces = namespaces
        self.columns = columns
        self.payloads = payloads

    @classmethod
    def of(cls, found: Iterable[Found]) -> Records:
        """These records, in the order given."""
        rows = list(found)
        numbers: dict[NamespaceDigest, int] = {}
        columns = Columns.room(len(rows))
        for row, each in enumerate(rows):
            columns.kind[row] = each.kind
            columns.space[row] = numbers.setdefault(each.namespace, len(numbers))
            columns.key[row] = _words(each.key)
            columns.parent[row] = _words(each.parent)
            columns.position[row] = each.position
            columns.bounded[row] = each.lineage is Lineage.BOUNDED
            columns.crc32[row] = each.checks.crc32
            columns.xxh3_64[row] = each.checks.xxh3_64
            columns.has_xxh3[row] = each.checks.has_xxh3
            columns.segment[row] = each.place.segment_id
            columns.offset[row] = each.place.offset
            columns.length[row] = each.place.length
            columns.sequence[row] = each.sequence
            columns.last_use[row] = each.last_use
        payloads = {row: each.payload for row, each in enumerate(rows) if each.payload}
        return cls(list(numbers), columns, payloads)

    def __len__(self) -> int:
        return len(self.columns.kind)

    @overload
    def __getitem__(self, index: int) -> Found: ...

    @overload
    def __getitem__(self, index: slice) -> list[Found]: ...

    def __getitem__(self, index: int | slice) -> Found | list[Found]:
        rows = np.arange(len(self))
        if isinstance(index, slice):
            return list(self._found(rows[index]))
        return next(self._found(rows[[index]]))

    def __iter__(self) -> Iterator[Found]:
        return self._found(np.arange(len(self)))

    def rows_of(self, *kinds: RecordKind) -> NDArray[np.intp]:
        """The rows of records of these kinds, ascending."""
        return np.flatnonzero(np.isin(self.columns.kind, [int(kind) for kind in kinds]))

    def of_kind(self, *kinds: RecordKind) -> list[Found]:
        return list(self._found(self.rows_of(*kinds)))

    def place(self, row: int) -> Place:
        at = self.columns
        return Place(int(at.segment[row]), int(at.offset[row]), int(at.length[row]))

    def move(self, row: int, place: Place) -> None:
        at = self.columns
        at.segment[row], at.offset[row], at.length[row] = place

    def newest_use(self) -> float:
        """Wall seconds of the latest last use; 0 when there is nothing."""
        return float(self.columns.last_use.max(initial=0.0))

    def _found(self, rows: NDArray[np.intp]) -> Iterator[Found]:
        # Some thousand at once: columns are many times faster to take apart than to be asked row by row.
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            yield from self._some(rows[first : first + _ROWS_AT_ONCE])

    def _some(self, rows: NDArray[np.intp]) -> Iterator[Found]:
        at = self.columns
        columns = (
            rows.tolist(),
            at.kind[rows].tolist(),
            at.space[rows].tolist(),
            _bytes(at.key[rows]),
            _bytes(at.parent[rows]),
            at.position[rows].tolist(),
            at.bounded[rows].tolist(),
            map(Checks, at.crc32[rows].tolist(), at.xxh3_64[rows].tolist(), at.has_xxh3[rows].tolist()),
            map(Place, at.segment[rows].tolist(), at.offset[rows].tolist(), at.length[rows].tolist()),
            at.sequence[rows].tolist(),
            at.last_use[rows].tolist(),
        )
        for row, kind, space, key, parent, position, bounded, checks, place, sequence, last_use in zip(
            *columns, strict=True
        ):
            yield Found(
                _KINDS[kind],
                self.namespaces[space],
                BlockKey(key),
                BlockKey(parent),
                position,
                Lineage.BOUNDED if bounded else Lineage.EXACT,
                checks,
                place,
                sequence,
                last_use,
                self.payloads.get(row, b""),
            )


def _bytes(words: Words) -> list[bytes]:
    keys: list[bytes] = np.ascontiguousarray(words).view(f"V{KEY_BYTES}").ravel().tolist()
    return keys


def _words(key: bytes) -> Words:
    return np.frombuffer(key, "<u8", count=4)
