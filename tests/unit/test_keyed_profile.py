from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import pytest

from kvstore.core import describe, parse_description
from kvstore.errors import InvalidArgument, ProfileError
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.opaque import OPAQUE_BYTES_MAX, OpaqueKey, store_key
from kvstore.profile.base import Profile
from kvstore.profile.keyed import KeyedProfile, profile_of
from kvstore.profile.registry import get_profile
from kvstore.types import NamespaceDigest

ROWS = KeyedProfile(name="some/model", payload_bytes=4096, dtype="bfloat16", layout="L2", part="1/2")


def identity(profile: Profile = ROWS, **changed: str) -> NamespaceIdentity:
    return NamespaceIdentity(profile, **{"weights_revision": "w1", "numerics": "", **changed})


def test_a_profile_of_either_kind_is_read_from_its_geometry() -> None:
    for profile in (ROWS, KeyedProfile(name="é", payload_bytes=1), get_profile("tiny")):
        assert profile_of(profile.name, profile.geometry()) == profile
    assert (ROWS.is_keyed, get_profile("tiny").is_keyed) == (True, False)


@pytest.mark.parametrize(
    "changed",
    [
        replace(ROWS, payload_bytes=8192),
        replace(ROWS, dtype="float32"),
        replace(ROWS, layout="L3"),
        replace(ROWS, part="2/2"),
        replace(ROWS, name="other/model"),
    ],
    ids=["payload", "dtype", "layout", "part", "model"],
)
def test_what_bytes_are_made_of_decides_who_shares_them(changed: KeyedProfile) -> None:
    assert identity(changed).digest() != identity().digest()


@pytest.mark.parametrize("field", ["weights_revision", "numerics", "adapter", "tenant_salt"])
def test_and_so_do_revision_adapter_and_salt(field: str) -> None:
    assert identity(**{field: "other"}).digest() != identity().digest()


@pytest.mark.parametrize(
    "geometry",
    [
        b'{"keyed":{}}',
        b'{"keyed":3}',
        b'{"keyed":{"payload_bytes":0,"dtype":"","layout":"","part":""}}',
        b'{"keyed":{"payload_bytes":"4","dtype":"","layout":"","part":""}}',
        b'{"keyed":{"payload_bytes":4096}}',
        b'{"keyed":{"payload_bytes":4096,"dtype":"","layout":"","part":"","block_tokens":2}}',
        b'{"keyed": {"payload_bytes":4096,"dtype":"","layout":"","part":""}}',
        b'{"keyed":{"payload_bytes":4096',
        b'{"keyed":{"payload_bytes":4096,"dtype":"' + b"x" * 70_000 + b'","layout":"","part":""}}',
    ],
)
def test_other_geometries_are_refused(geometry: bytes) -> None:
    with pytest.raises(ProfileError):
        profile_of("m", geometry)


@pytest.mark.parametrize(
    ("field", "value"), [("payload_bytes", True), ("dtype", "a\nb"), ("part", "x" * 513)]
)
def test_a_keyed_profile_that_makes_no_sense_is_not_made(field: str, value: object) -> None:
    with pytest.raises(ProfileError, match=field):
        replace(ROWS, **{field: value})


def test_a_description_brings_a_keyed_namespace_back() -> None:
    written = describe(identity(), "rows", "zero")
    assert parse_description(written) == (identity(), "rows", "zero")


def test_a_store_key_is_the_documented_digest() -> None:
    root = NamespaceDigest(bytes(range(32)))
    parts = (root, b"opaque", struct.pack("<I", 7))
    text = b"kvstore.keyed.v1" + b"".join(struct.pack("<I", len(part)) + part for part in parts)
    assert store_key(root, OpaqueKey(b"opaque", 7)) == hashlib.sha256(text).digest()


def test_no_two_names_of_a_payload_have_one_store_key() -> None:
    roots = [NamespaceDigest(bytes([each]) * 32) for each in (0, 1)]
    names = [OpaqueKey(b"a"), OpaqueKey(b"a", 1), OpaqueKey(b"aa"), OpaqueKey(b"a\0\0\0\1")]
    assert len({store_key(root, name) for root in roots for name in names}) == 8


@pytest.mark.parametrize(
    "name",
    [OpaqueKey(b""), OpaqueKey(bytes(OPAQUE_BYTES_MAX + 1)), OpaqueKey(b"a", -1), OpaqueKey(b"a", 2**32)],
)
def test_what_is_no_opaque_key_is_refused(name: OpaqueKey) -> None:
    with pytest.raises(InvalidArgument):
        store_key(NamespaceDigest(bytes(32)), name)
