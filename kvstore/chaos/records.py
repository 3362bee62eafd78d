"""Records whose every byte follows from a number, so that whoever reads one knows what is right."""

from __future__ import annotations

import functools
import hashlib
import random
import zlib

import xxhash

from kvstore.store.base import Found, Place, Record, RecordKind, Wanted
from kvstore.types import BlockKey, Checks, Lineage, NamespaceDigest

NAMESPACES = 3
"""Records below this number describe the namespace of that number; the rest are blocks, states and rows."""

_NAMES = [NamespaceDigest(hashlib.sha256(b"chaos namespace %d" % i).digest()) for i in range(NAMESPACES)]
_NOISE_BYTES = 1 << 20
_NOISE = random.Random("kvstore chaos").randbytes(_NOISE_BYTES)
_PAYLOAD_BYTES_MAX = 96 << 10
# Most records are small, and some are of sizes at which pages and sectors begin.
_SLICE_BYTES = 16_384
_SIZES = (512, 3072, 3328, 3360, 3361, 4096, 8192)


def namespace_of(number: int) -> int:
    return number % NAMESPACES


def namespace_digest(namespace: int) -> NamespaceDigest:
    return _NAMES[namespace]


def is_namespace(number: int) -> bool:
    return number < NAMESPACES


def key_of(number: int) -> BlockKey:
    """Carries its number, so that a key found on a disk names the bytes that belong to it."""
    if is_namespace(number):
        return BlockKey(_NAMES[number])
    return BlockKey(number.to_bytes(8, "big") + hashlib.sha256(b"chaos %d" % number).digest()[:24])


def number_of(key: bytes) -> int | None:
    """The number whose key this is; None for a key that nobody here made."""
    if key in _NAMES:
        return _NAMES.index(NamespaceDigest(key))
    number = int.from_bytes(key[:8], "big")
    return number if key_of(number) == key else None


def kind_of(number: int) -> RecordKind:
    if is_namespace(number):
        return RecordKind.NAMESPACE
    draw = _draw(number, "kind")
    return RecordKind.STATE if draw < 0.15 else RecordKind.ROWS if draw < 0.3 else RecordKind.BLOCK


def size_of(number: int) -> int:
    """Payload bytes: 3 to 8 thousand mostly, nothing at all now and then, up to 96 KiB."""
    draw = _draw(number, "size")
    if is_namespace(number) or draw < 0.01:
        return 40 if is_namespace(number) else 0
    if draw < 0.4:
        return _SIZES[int(_draw(number, "which") * len(_SIZES))]
    if draw < 0.85:
        return 1 + int(_draw(number, "small") * 12_000)
    return 1 + int(_draw(number, "large") * _PAYLOAD_BYTES_MAX)


def payload_of(number: int) -> bytes:
    size = size_of(number)
    at = int(_draw(number, "noise") * (_NOISE_BYTES - _PAYLOAD_BYTES_MAX))
    return (key_of(number) + _NOISE[at : at + size])[:size]


def record_of(number: int) -> Record:
    payload = payload_of(number)
    namespace = namespace_digest(namespace_of(number))
    return Record(
        kind=kind_of(number),
        namespace=namespace,
        key=key_of(number),
        parent=BlockKey(namespace) if number < 2 * NAMESPACES else key_of(number - NAMESPACES),
        position=0 if is_namespace(number) else number,
        lineage=Lineage.BOUNDED if _draw(number, "lineage") < 0.1 else Lineage.EXACT,
        payload=payload,
        checks=Checks(zlib.crc32(payload), xxhash.xxh3_64_intdigest(payload), True),
        slices=range(_SLICE_BYTES, len(payload), _SLICE_BYTES),
    )


def wanted(number: int, place: Place) -> Wanted:
    return Wanted(place, key_of(number), kind_of(number))


def clear_of(namespace: int, *, states_only: bool) -> Record:
    digest = namespace_digest(namespace)
    return Record(
        kind=RecordKind.CLEAR_STATES if states_only else RecordKind.CLEAR,
        namespace=digest,
        key=BlockKey(digest),
        parent=BlockKey(digest),
        position=0,
        lineage=Lineage.EXACT,
        payload=b"",
        checks=Checks(0),
    )


def same_description(found: Found, number: int) -> bool:
    """Whether all that recovery tells about a record is what was written with it."""
    right = record_of(number)
    return (
        found.kind,
        found.namespace,
        found.key,
        found.parent,
        found.position,
        found.lineage,
        found.checks,
    ) == (
        right.kind,
        right.namespace,
        right.key,
        right.parent,
        right.position,
        right.lineage,
        right.checks,
    )


@functools.lru_cache(maxsize=1 << 14)
def _draw(number: int, what: str) -> float:
    """Uniform in [0, 1), always the same."""
    return xxhash.xxh3_64_intdigest(f"{what} {number}".encode()) / 2**64
