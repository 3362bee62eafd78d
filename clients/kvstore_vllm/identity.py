"""What an engine's rows depend on, as the identity of the namespace that keeps them. Pure."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.opaque import OpaqueKey
from kvstore.profile.keyed import KeyedProfile

GROUP_BYTES = 4
MODEL_NAME_MAX = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of layers that share block ids."""

    tokens_per_block: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRows:
    """What an engine says of the rows of its host pool. Block hashes name none of this.

    engine: which one, with the version up to which the bytes of a row mean the same. model, dtype: of the caches. layout: how
    bytes lie in a block. row_bytes: of one row, which holds `blocks_per_row` blocks of every worker. parallel: sizes that say
    whose bytes a row is made of, by name; empty where that makes no difference.
    """

    engine: str
    model: str
    dtype: str
    layout: str
    row_bytes: int
    blocks_per_row: int
    tokens_per_hash: int
    groups: tuple[Group, ...]
    parallel: tuple[tuple[str, int], ...]


def identity_of(rows: EngineRows, *, revision: str, salt: str) -> NamespaceIdentity:
    """`revision`: of the weights, where the model's name does not name them; `salt`: of the tenant. Both in the operator's
    words."""
    groups = [[group.tokens_per_block, list(group.layers)] for group in rows.groups]
    shape = json.dumps([rows.model, rows.blocks_per_row, rows.tokens_per_hash, groups], separators=(",", ":"))
    digest = hashlib.sha256(shape.encode()).hexdigest()
    profile = KeyedProfile(
        name=_printable(rows.model)[:MODEL_NAME_MAX] or "unnamed",
        payload_bytes=rows.row_bytes,
        dtype=_printable(rows.dtype),
        layout=f"{_printable(rows.engine)} {_printable(rows.layout)} {digest}",
        part=" ".join(f"{_printable(name)}={size}" for name, size in rows.parallel),
    )
    return NamespaceIdentity(profile=profile, weights_revision=revision, numerics="", tenant_salt=salt)


def name_of(identity: NamespaceIdentity) -> str:
    """A label that no other namespace has."""
    return f"{identity.profile.name} {identity.digest().hex()[:16]}"


def opaque_key(key: bytes) -> OpaqueKey:
    """Of an offload key: a block's hash, then its group's number, big-endian."""
    return OpaqueKey(key[:-GROUP_BYTES], int.from_bytes(key[-GROUP_BYTES:], "big"))


def _printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)
