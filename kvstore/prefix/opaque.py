"""Store keys for keys that others made: of any length, and for one of several groups of a model's caches.

key = SHA-256(domain tag, then length as little-endian u32 and bytes of: namespace digest, opaque key, group as little-endian u32)
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from kvstore.errors import InvalidArgument
from kvstore.types import BlockKey, NamespaceDigest

OPAQUE_DOMAIN = b"kvstore.keyed.v1"

OPAQUE_BYTES_MAX = 4096
GROUP_MAX = 2**32 - 1


class OpaqueKey(NamedTuple):
    """What a payload is kept under: a key that its writer made, and for which group of caches."""

    key: bytes
    group: int = 0


def store_key(namespace: NamespaceDigest, opaque: OpaqueKey) -> BlockKey:
    """32 bytes, different for every namespace, key and group. InvalidArgument for what is no key."""
    key, group = opaque
    if not isinstance(key, bytes) or not 1 <= len(key) <= OPAQUE_BYTES_MAX:
        raise InvalidArgument(
            "not an opaque key", field="key", value=repr(key)[:40], allowed=f"1 to {OPAQUE_BYTES_MAX} bytes"
        )
    if not isinstance(group, int) or not 0 <= group <= GROUP_MAX:
        raise InvalidArgument(
            "not a group", field="group", value=group, allowed=f"a whole number from 0 to {GROUP_MAX}"
        )
    hasher = hashlib.sha256(OPAQUE_DOMAIN)
    for part in (namespace, key, struct.pack("<I", group)):
        hasher.update(struct.pack("<I", len(part)))
        hasher.update(part)
    return BlockKey(hasher.digest())
