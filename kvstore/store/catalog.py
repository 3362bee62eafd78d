"""The catalogue: a small durable map beside the log that makes a start fast. All of it can be rebuilt from the log.

Rows (numbers little-endian, except the big-endian segment id in keys, which keeps them in order)
    "I"             16 store uuid, 4 catalogue version
    "S" segment id   8 salt, 8 file bytes, 1 state: 1 sealed, 2 dead, 3 found at a start without a
                     whole footer at its end
    "F" segment id   the segment's footer, as in its file
    "U" segment id   8 salt, then for each record with a known use: 4 payload offset, 4 hour since the epoch
    "P" namespace    8 sequence, then the policy in UTF-8
    "N" namespace, key
                     a namespace's description: 8 sequence, 32 parent, 8 position, 4 crc32, 8 xxh3, 1 flags as in
                     footers, then the payload
Every value is kept behind a crc32c over its key and itself: the map checks none of its pages, and single flipped bits
in it otherwise pass as answers.
"""

from __future__ import annotations

import errno
import os
import struct
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import DeviceError, FormatTooNew
from kvstore.store.base import Place
from kvstore.store.catalog_child import ReadRows, read_in_child
from kvstore.store.columns import FLAG_BOUNDED, FLAG_XXH3
from kvstore.store.device import translated
from kvstore.store.format import crc32c
from kvstore.types import KEY_BYTES, BlockKey, Checks, Lineage, NamespaceDigest

CATALOG_VERSION = 1
SEALED = 1
DEAD = 2
UNSEALED = 3
"""As SEALED, but its file does not end with its footer: only the row has one."""

IDENTITY_KEY = b"I"
OF_NAMESPACES = (b"N", b"P")
"""How the keys of rows begin that are good whatever the segments are."""
_SEGMENT = struct.Struct("<QQB")
_SALT = struct.Struct("<Q")
_DESCRIPTION = struct.Struct("<Q32sQIQB")
_SEQUENCE = struct.Struct("<Q")
_CRC = struct.Struct("<I")


class SegmentRow(NamedTuple):
    salt: int
    file_bytes: int
    state: int


class Description(NamedTuple):
    """A NAMESPACE record, payload and all. `place`: where the log has it; None where only the catalogue does."""

    namespace: NamespaceDigest
    key: BlockKey
    sequence: int
    parent: BlockKey
    position: int
    lineage: Lineage
    checks: Checks
    payload: bytes
    place: Place | None


class Loaded(NamedTuple):
    """Rows whose checksums hold. Not intact: there was no catalogue, or it was damaged and is empty now, and of an old one
    there are rows of namespaces and the identity at most."""

    rows: dict[bytes, bytes]
    intact: bool


class Catalog(Protocol):
    """A durable map. One thread at a time calls it; not always the same one."""

    def load(self) -> Loaded:
        """All rows. A damaged catalogue is removed and begun again. Raises DeviceError when the device or its
        permissions fail the attempt; then nothing was removed."""

    def write(self, changes: Mapping[bytes, bytes | None], *, bytes_max: int) -> bool:
        """Set or (None) remove rows in one durable transaction. False, and nothing changed, when the catalogue
        cannot be written or would outgrow `bytes_max` on the disk. That costs a slower start, never a record."""

    def close(self) -> None: ...


def key_of(letter: bytes, segment_id: int) -> bytes:
    return letter + segment_id.to_bytes(8, "big")


def identity_row(uuid: bytes) -> bytes:
    return uuid + struct.pack("<I", CATALOG_VERSION)


def refuse_newer(rows: Mapping[bytes, bytes], *, uuid: bytes, where: str) -> None:
    """Raise FormatTooNew for this store's catalogue of a later version: to begin it again from the log would lose last uses, and
    whatever that version keeps there besides."""
    row = rows.get(IDENTITY_KEY, b"")
    if len(row) < 20 or row[:16] != uuid:
        return
    (version,) = struct.unpack_from("<I", row, 16)
    if version > CATALOG_VERSION:
        raise FormatTooNew(
            f"the store in {where} has a newer catalogue than this program reads; nothing was touched: start it with the release "
            "that wrote it, or a later one",
            field="catalog_version",
            value=version,
            allowed=f"at most {CATALOG_VERSION}",
        )


def segment_row(row: SegmentRow) -> bytes:
    return _SEGMENT.pack(*row)


def decode_segment_row(data: bytes) -> SegmentRow | None:
    return SegmentRow(*_SEGMENT.unpack(data)) if len(data) == _SEGMENT.size else None


def uses_row(salt: int, uses: Iterable[tuple[int, int]]) -> bytes:
    return _SALT.pack(salt) + array("I", [number for pair in uses for number in pair]).tobytes()


def decode_uses_row(data: bytes, *, salt: int) -> NDArray[np.uint32]:
    """Rows of (payload offset, hour): shape (n, 2); none when the row belongs to another segment of this id."""
    if len(data) < 8 or (len(data) - 8) % 8 or _SALT.unpack_from(data)[0] != salt:
        return np.zeros((0, 2), np.uint32)
    return np.frombuffer(data, "<u4", offset=_SALT.size).reshape(-1, 2)


def policy_row(sequence: int, policy: str) -> bytes:
    return _SEQUENCE.pack(sequence) + policy.encode()


def decode_policy_row(data: bytes) -> tuple[int, str]:
    return _SEQUENCE.unpack_from(data)[0], data[8:].decode()


def description_row(each: Description) -> bytes:
    flags = FLAG_XXH3 * each.checks.has_xxh3 | FLAG_BOUNDED * (each.lineage is Lineage.BOUNDED)
    checks = each.checks
    head = _DESCRIPTION.pack(each.sequence, each.parent, each.position, checks.crc32, checks.xxh3_64, flags)
    return head + each.payload


def description_key(each: Description) -> bytes:
    return b"N" + each.namespace + each.key


def decode_description_row(key: bytes, data: bytes) -> Description:
    sequence, parent, position, crc32, xxh3_64, flags = _DESCRIPTION.unpack_from(data)
    return Description(
        NamespaceDigest(key[1 : 1 + KEY_BYTES]),
        BlockKey(key[1 + KEY_BYTES :]),
        sequence,
        BlockKey(parent),
        position,
        Lineage.BOUNDED if flags & FLAG_BOUNDED else Lineage.EXACT,
        Checks(crc32, xxh3_64, bool(flags & FLAG_XXH3)),
        data[_DESCRIPTION.size :],
        None,
    )


def seal_value(key: bytes, value: bytes) -> bytes:
    return _CRC.pack(crc32c(key + value)) + value


def open_value(key: bytes, data: bytes) -> bytes | None:
    value = data[4:]
    return value if len(data) >= 4 and _CRC.unpack_from(data)[0] == crc32c(key + value) else None


class RamCatalog:
    """A catalogue that lives as long as this object: for simulations. What was written survives `close`."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self._begun = False

    def load(self) -> Loaded:
        loaded: dict[bytes, bytes] = {}
        intact = self._begun
        self._begun = True
        for key, data in self.rows.items():
            value = open_value(key, data)
            if value is None:
                self.rows = {}
                return Loaded({}, intact=False)
            loaded[key] = value
        return Loaded(loaded, intact=intact)

    def write(self, changes: Mapping[bytes, bytes | None], *, bytes_max: int) -> bool:
        after = dict(self.rows)
        for key, value in changes.items():
            if value is None:
                after.pop(key, None)
            else:
                after[key] = seal_value(key, value)
        if sum(len(key) + len(data) for key, data in after.items()) > bytes_max:
            return False
        self.rows = after
        return True

    def close(self) -> None:
        """Nothing to give back."""


class LmdbCatalog:
    """A catalogue in one LMDB file. The store's directory lock is its lock."""

    DATA_NAME = "catalog.mdb"
    ASIDE_NAME = "catalog.mdb.aside"
    """What it is called while a rebuild is under way."""
    _MAP_BYTES_MIN = 1 << 20

    def __init__(self, directory: Path, *, read_rows: ReadRows = read_in_child) -> None:
        """read_rows: reads the file of an earlier life. It is mapped for writing only when all of it was found whole."""
        self._data = directory / self.DATA_NAME
        self._aside = directory / self.ASIDE_NAME
        self._read_rows = read_rows
        self._env: Any = None

    def load(self) -> Loaded:
        self._end_rebuild()
        return self._load()

    def _load(self) -> Loaded:
        with translated("examine", str(self._data)):
            existed = self._data.exists()
        rows = self._read_rows(self._data) if existed else None
        if rows is not None:
            self._open_environment(is_whole=True)
        if self._env is None:
            rows = None
            with translated("remove", str(self._data)):
                self._data.unlink(missing_ok=True)
            self._open_environment()
        return Loaded(rows or {}, intact=rows is not None)

    def _end_rebuild(self) -> None:
        """One that did not come to its end is undone: the old catalogue knows last uses that the log does not."""
        with translated("put back", str(self._aside)):
            if self._aside.exists():
                self._aside.replace(self._data)

    def write(self, changes: Mapping[bytes, bytes | None], *, bytes_max: int) -> bool:
        if self._env is None:
            return False
        try:
            # The map's size is the file's limit. It may not go below what the file has already.
            size = max(bytes_max, self._data.stat().st_size) // 4096 * 4096
            if size != self._env.info()["map_size"]:
                self._env.set_mapsize(size)
            with self._env.begin(write=True) as transaction:
                for key, value in changes.items():
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, seal_value(key, value))
        except (lmdb.Error, OSError):
            return False
        return True

    def close(self) -> None:
        if self._env is not None:
            environment, self._env = self._env, None
            environment.close()

    def _open_environment(self, *, is_whole: bool = False) -> None:
        """is_whole: it was read a moment ago, so that an error of the system is one of the moment."""
        try:
            self._env = lmdb.open(
                str(self._data),
                subdir=False,
                lock=False,
                mode=0o600,
                map_size=self._map_bytes(),
                lib_version=0,
                sync=True,
                metasync=True,
                writemap=False,
                readahead=False,
                max_spare_txns=0,
            )
        except lmdb.Error as error:
            code = getattr(error, "code", None)
            is_of_system = isinstance(code, int) and code > 0
            if (is_whole and is_of_system) or code in (
                errno.EACCES,
                errno.EIO,
                errno.ENOMEM,
                errno.EPERM,
                errno.EMFILE,
                errno.ENFILE,
            ):
                raise DeviceError(
                    f"cannot open the catalogue {self._data}: {os.strerror(code or 0)}"
                ) from error
            # Full disks and files that are no catalogue: the store works without.
            self._env = None

    def _map_bytes(self) -> int:
        size = self._data.stat().st_size if self._data.exists() else 0
        return max(self._MAP_BYTES_MIN, size)
