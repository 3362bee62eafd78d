from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import ConfigError, InvalidArgument
from kvstore.prefix.opaque import OpaqueKey
from kvstore.profile.keyed import profile_of
from kvstore_vllm.identity import EngineRows, Group, identity_of, name_of, opaque_key
from kvstore_vllm.settings import TierSettings, read_settings

ROWS = EngineRows(
    engine="vllm-0.32",
    model="some/model",
    dtype="torch.bfloat16",
    layout="LBHNC",
    row_bytes=65_536,
    blocks_per_row=1,
    tokens_per_hash=32,
    groups=(Group(tokens_per_block=32, layers=("l0", "l1")),),
    parallel=(("tp_size", 2), ("world_size", 2)),
)


def test_only_the_address_is_needed() -> None:
    assert read_settings({"address": "/run/kv"}) == TierSettings(address="/run/kv")


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "address"),
        ({"address": ""}, "address"),
        ({"address": 3}, "address"),
        ({"address": "/a", "adress": "/b"}, "adress"),
        ({"address": "/a", "salt": None}, "salt"),
        ({"address": "/a", "insecure": "yes"}, "insecure"),
        ({"address": "/a", "load_rows": 0}, "load_rows"),
        ({"address": "/a", "store_rows": True}, "store_rows"),
        ({"address": "/a", "load_threads": 1.5}, "load_threads"),
        ({"address": "/a", "lookup_seconds": 0}, "lookup_seconds"),
        ({"address": "/a", "shutdown_seconds": float("nan")}, "shutdown_seconds"),
    ],
)
def test_what_is_wrong_is_refused_by_name(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(given)
    assert caught.value.field == field


def test_a_token_file_that_is_not_there_is_refused_at_the_start() -> None:
    settings = read_settings({"address": "tcp://store:7700", "token_file": "/no/such/file"})
    with pytest.raises(InvalidArgument, match="token"):
        settings.where()


def test_whatever_bytes_depend_on_makes_another_namespace() -> None:
    others = [
        replace(ROWS, engine="vllm-0.33"),
        replace(ROWS, model="some/other"),
        replace(ROWS, dtype="torch.float16"),
        replace(ROWS, layout="BLHNC"),
        replace(ROWS, row_bytes=131_072),
        replace(ROWS, blocks_per_row=2),
        replace(ROWS, tokens_per_hash=16),
        replace(ROWS, groups=(*ROWS.groups, ROWS.groups[0])),
        replace(ROWS, groups=(Group(tokens_per_block=32, layers=("l1", "l0")),)),
        replace(ROWS, parallel=()),
    ]
    made = [identity_of(rows, revision="", salt="").digest() for rows in (ROWS, *others)]
    made += [identity_of(ROWS, revision="r2", salt="").digest()]
    made += [identity_of(ROWS, revision="", salt="../x").digest()]
    assert len(set(made)) == len(made)
    assert made[0] == identity_of(replace(ROWS), revision="", salt="").digest()


def test_names_that_cannot_be_printed_or_are_long_make_a_namespace_too() -> None:
    long = replace(ROWS, model="/a\nb/" + "x" * 300)
    identity = identity_of(long, revision="", salt="")
    profile = identity.profile
    assert profile_of(profile.name, profile.geometry()) == profile
    assert name_of(identity).isprintable()
    assert len(name_of(identity)) <= 128
    assert identity_of(replace(long, model=long.model + "y"), revision="", salt="") != identity
    assert identity_of(replace(ROWS, model=""), revision="", salt="").profile.name == "unnamed"


def test_an_offload_key_is_a_hash_and_a_group() -> None:
    assert opaque_key(b"hash" + (258).to_bytes(4, "big")) == OpaqueKey(b"hash", 258)
