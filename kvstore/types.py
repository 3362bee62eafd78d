"""Names and frozen values that every layer shares. Nothing here has behaviour beyond its own fields."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes: SHA-256 over (parent key, token ids, extra fields). Compared whole; never shortened."""

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""32 bytes: what decides whether two runs may share bytes. Also the parent of a namespace's first blocks."""

BootId = NewType("BootId", bytes)
"""16 random bytes, new at every start of a service."""

KEY_BYTES = 32

BytesLike = bytes | bytearray | memoryview


class ItemKind(IntEnum):
    """What a stored item is. The values are part of the wire and of the disk format.

    ROWS: the window rows of every token of a block, in all layers, with or without the overlap at its end.
    """

    # Here and below: what enumerations bring for it is a function in Python, and these are hashed several times for each
    # item that is written, and for each lookup.
    __hash__ = int.__hash__

    BLOCK = 1
    STATE = 2
    ROWS = 6


class Tier(IntEnum):
    """Where a state lives. A block lives on SSD."""

    POOL = 1
    SSD = 2


class Durability(IntEnum):
    """When a commit is answered. DURABLE: its items are on the disk, with all their ancestors, and visible. ACCEPTED: they are
    visible, and are being written; a crash before that is over loses them. Values are part of the wire."""

    DURABLE = 1
    ACCEPTED = 2


class Lineage(IntEnum):
    """How the bytes came about: the worst of everything that they were computed from."""

    __hash__ = int.__hash__

    EXACT = 1
    BOUNDED = 2


class Exactness(StrEnum):
    __hash__ = str.__hash__

    EXACT = "EXACT"
    BOUNDED = "BOUNDED"


class StateSource(StrEnum):
    """Where a resume gets its window state from."""

    __hash__ = str.__hash__

    POOL = "POOL"
    CHECKPOINT = "CHECKPOINT"
    ROWS = "ROWS"
    REPLAY = "REPLAY"
    NONE = "NONE"


class ItemId(NamedTuple):
    """A block, or the state at the end of the block that `key` names."""

    key: BlockKey
    kind: ItemKind


class Checks(NamedTuple):
    """Checksums of one payload, made by its writer and carried unchanged to its reader.

    crc32: CRC-32/ISO-HDLC, which every client's standard library has. xxh3_64: XXH3, 64 bits, seed 0;
    0 with `has_xxh3` False when the writer had no xxhash.
    """

    crc32: int
    xxh3_64: int = 0
    has_xxh3: bool = False
