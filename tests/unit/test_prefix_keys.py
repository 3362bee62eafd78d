from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from array import array
from dataclasses import replace
from itertools import pairwise

import pytest

from kvstore.errors import InvalidArgument
from kvstore.prefix import KeyChain, NamespaceIdentity, block_keys
from kvstore.profile.formats import RowFormat
from kvstore.profile.registry import PROFILES, get_profile

ROOT = bytes(range(32))
TINY = get_profile("tiny")

# Run in fresh interpreters: what it prints must not depend on the process.
SCRIPT = """
import json
from array import array
from kvstore.prefix import NamespaceIdentity, block_keys
from kvstore.profile.registry import get_profile
fields = dict(profile=get_profile("tiny"), weights_revision="w", numerics="cpu/f32")
absent = NamespaceIdentity(**fields)
none = NamespaceIdentity(**fields, adapter=None, tenant_salt=None)
empty = NamespaceIdentity(**fields, adapter="", tenant_salt="")
tokens = list(range(1, 601))
out = {}
for name, identity in (("absent", absent), ("none", none), ("empty", empty)):
    for kind, run in (("ints", tokens), ("u32", array("I", tokens)), ("i32", array("i", tokens))):
        out[f"{name}/{kind}"] = [key.hex() for key in block_keys(identity.digest(), run, block_tokens=256)]
    out[f"{name}/elements"] = [
        key.hex() for key in block_keys(identity.digest(), (e for e in array("I", tokens)), block_tokens=256)
    ]
print(json.dumps(out))
"""


def identity(**changed: object) -> NamespaceIdentity:
    fields = {"profile": TINY, "weights_revision": "w", "numerics": "n", **changed}
    return NamespaceIdentity(**fields)  # type: ignore[arg-type]


def test_keys_are_the_same_in_every_interpreter_for_ints_and_array_elements() -> None:
    seen = []
    for seed in (None, "0", "7"):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        seen.append(json.loads(done.stdout))
    assert seen[0] == seen[1] == seen[2]
    variants = list(seen[0].values())
    assert len(variants) == 12
    assert len(variants[0]) == 2, "600 tokens hold two blocks of 256"
    assert all(keys == variants[0] for keys in variants), "absent, None and empty are one and the same"


def test_keys_are_the_documented_chain() -> None:
    tokens = [7, 2**32 - 1, 0, 65_536, 3, 4, 5]
    first = hashlib.sha256(
        b"kvstore.block.v1" + ROOT + struct.pack("<4I", *tokens[:4])[:12] + struct.pack("<I", 0)
    ).digest()
    second = hashlib.sha256(
        b"kvstore.block.v1" + first + struct.pack("<3I", *tokens[3:6]) + struct.pack("<I", 0)
    ).digest()
    assert block_keys(ROOT, tokens, block_tokens=3) == [first, second]


@pytest.mark.parametrize("cuts", [[0, 1, 2, 3, 4, 5], [4], [0, 8, 8, 9], list(range(21))])
def test_a_chain_built_piece_by_piece_equals_one_built_at_once(cuts: list[int]) -> None:
    tokens = list(range(100, 121))
    extras = {3: b"image", 12: b"sound", 19: b"open"}
    chain = KeyChain(ROOT, block_tokens=4)
    made = []
    edges = [0, *cuts, len(tokens)]
    for start, end in pairwise(edges):
        made += chain.extend(tokens[start:end], extras={p: v for p, v in extras.items() if start <= p < end})
    assert made == chain.keys == block_keys(ROOT, tokens, block_tokens=4, extras=extras)
    assert chain.token_count == 21


def test_only_whole_blocks_have_keys() -> None:
    assert [len(block_keys(ROOT, range(n), block_tokens=4)) for n in (0, 1, 3, 4, 5, 8)] == [0, 0, 0, 1, 1, 2]


def test_changing_one_token_changes_its_block_and_all_after_it() -> None:
    tokens = list(range(16))
    before = block_keys(ROOT, tokens, block_tokens=4)
    tokens[6] += 1
    after = block_keys(ROOT, tokens, block_tokens=4)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False, False]


def test_an_extra_changes_its_block_and_all_after_it_and_nothing_before() -> None:
    plain = block_keys(ROOT, range(16), block_tokens=4)
    for extras, first_changed in (({6: b"a"}, 1), ({0: b"a"}, 0), ({15: b"a"}, 3)):
        keys = block_keys(ROOT, range(16), block_tokens=4, extras=extras)
        assert [a == b for a, b in zip(plain, keys, strict=True)] == [True] * first_changed + [False] * (
            4 - first_changed
        )


def test_extras_are_not_confused_with_each_other() -> None:
    variants = (
        {1: b"ab"},
        {2: b"ab"},
        {1: b"a", 2: b"b"},
        {1: b"a"},
        {1: b"b", 2: b"a"},
        {1: b"ab", 2: b"\0"},
        {},
    )
    keys = {block_keys(ROOT, range(4), block_tokens=4, extras=extras)[0] for extras in variants}
    assert len(keys) == len(variants)


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, None, "7"])
@pytest.mark.parametrize("form", [list, tuple, iter])
def test_a_token_that_is_not_a_u32_is_refused_with_index_and_value(bad: object, form: type) -> None:
    with pytest.raises(InvalidArgument) as caught:
        block_keys(ROOT, form([1, 2, bad, 3]), block_tokens=2)
    assert caught.value.field == "tokens[2]"
    assert caught.value.value == repr(bad)
    assert "4294967295" in caught.value.allowed


def test_a_refused_piece_leaves_the_chain_as_it_was() -> None:
    chain = KeyChain(ROOT, block_tokens=2)
    chain.extend([1, 2, 3])
    with pytest.raises(InvalidArgument):
        chain.extend([4, -1])
    with pytest.raises(InvalidArgument):
        chain.extend([4], extras={2: b"behind"})
    chain.extend([4])
    assert chain.keys == block_keys(ROOT, [1, 2, 3, 4], block_tokens=2)


@pytest.mark.parametrize("tokens", [b"\0\0\0\0", "text", bytearray(8)])
def test_bytes_and_text_are_not_tokens(tokens: object) -> None:
    with pytest.raises(InvalidArgument, match="tokens"):
        block_keys(ROOT, tokens, block_tokens=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("root", [b"", bytes(31), bytes(33), "r" * 32, bytearray(32)])
def test_a_root_is_32_bytes(root: object) -> None:
    with pytest.raises(InvalidArgument, match="root"):
        KeyChain(root, block_tokens=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("extras", [{4: b"x"}, {-1: b"x"}, {0: b""}, {0: "x"}])
def test_extras_belong_to_tokens_and_have_content(extras: dict[int, bytes]) -> None:
    with pytest.raises(InvalidArgument, match="extra"):
        block_keys(ROOT, range(4), block_tokens=2, extras=extras)


def test_every_identity_field_changes_the_digest() -> None:
    base = identity()
    changed = [
        identity(weights_revision="w2"),
        identity(numerics="n2"),
        identity(adapter="a"),
        identity(tenant_salt="a"),
        identity(profile=replace(TINY, name="tiny2")),
        identity(profile=replace(TINY, block_tokens=64)),
        identity(profile=replace(TINY, row_format=RowFormat.FP8_ALL)),
        identity(profile=replace(TINY, window_tokens=17)),
        identity(profile=replace(TINY, layers=TINY.layers[:-1])),
        identity(profile=replace(TINY, bounded_is_trained=True)),
    ]
    digests = {each.digest() for each in (base, *changed)}
    assert len(digests) == 1 + len(changed)


def test_fields_do_not_run_into_each_other() -> None:
    pairs = [
        (identity(adapter="X"), identity(tenant_salt="X")),
        (identity(adapter="ab", tenant_salt="c"), identity(adapter="a", tenant_salt="bc")),
        (identity(weights_revision="w", numerics="nn"), identity(weights_revision="wn", numerics="n")),
        (identity(adapter="é"), identity(adapter="e\u0301")),
    ]
    for left, right in pairs:
        assert left.digest() != right.digest()


def test_absent_none_and_empty_are_one_identity() -> None:
    assert identity() == identity(adapter=None) == identity(adapter="", tenant_salt=None)
    assert identity().digest() == identity(tenant_salt=None).digest()


def test_profiles_with_one_geometry_and_two_names_are_two_namespaces() -> None:
    assert PROFILES["deepseek-v4-flash"].geometry() == PROFILES["flash-slim"].geometry()
    assert len({identity(profile=profile).digest() for profile in PROFILES.values()}) == len(PROFILES)


@pytest.mark.parametrize("value", ["\ud800", "x" * 4097, 7, b"x"])
def test_identity_text_is_checked(value: object) -> None:
    with pytest.raises(InvalidArgument, match="adapter"):
        identity(adapter=value)


def test_an_array_of_tokens_is_read_and_not_changed() -> None:
    tokens = array("I", range(8))
    block_keys(ROOT, tokens, block_tokens=4)
    chain = KeyChain(ROOT, block_tokens=4)
    chain.extend(tokens)
    tokens.append(9)
    assert chain.token_count == 8
