"""Checksums of payloads. CRC-32 is in every standard library; the faster ones are used where they are installed."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

from kvstore.types import BytesLike, Checks


def _optional(name: str) -> ModuleType | None:
    """The module, or None where it is not installed. A client must run with grpcio and protobuf alone, so what only
    makes it faster is never named in an import statement."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


_isal = _optional("isal.isal_zlib")
_xxhash = _optional("xxhash")

crc32: Callable[[BytesLike], int] = zlib.crc32 if _isal is None else _isal.crc32
xxh3_64: Callable[[BytesLike], int] | None = None if _xxhash is None else _xxhash.xxh3_64_intdigest


class Checked(Protocol):
    """The checksum fields that an item's header carries."""

    @property
    def crc32(self) -> int: ...
    @property
    def xxh3_64(self) -> int: ...
    @property
    def has_xxh3(self) -> bool: ...


def make_checks(payload: BytesLike) -> Checks:
    if xxh3_64 is None:
        return Checks(crc32(payload))
    return Checks(crc32(payload), xxh3_64(payload), True)


def matches(payload: BytesLike, header: Checked) -> bool:
    """Whether `payload` has the checksum in `header`: XXH3 where both sides have it, CRC-32 otherwise."""
    if header.has_xxh3 and xxh3_64 is not None:
        return xxh3_64(payload) == header.xxh3_64
    return crc32(payload) == header.crc32
