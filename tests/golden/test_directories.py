"""Upgrades: what earlier releases left is opened, whole, and goes on being written to; what later ones left is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.clock import SystemClock
from kvstore.core import Core, describe
from kvstore.errors import FormatTooNew, StoreDamaged
from kvstore.pool import StatePool
from kvstore.store import catalog, open_log
from kvstore.store.base import RecordKind, Wanted
from kvstore.store.format import FORMAT_VERSION, crc32c
from kvstore.types import BlockKey, Checks, ItemKind, Lineage, NamespaceDigest
from kvstore_client import CacheClient, KeyedStore
from tests.golden import directories as golden
from tests.support.calls import look
from tests.support.chains import Chain
from tests.support.service import ServiceProcess, short_directory

WRITTEN = sorted(path.name.removesuffix(".tar.xz") for path in golden.FOLDER.glob("format-2.*.tar.xz"))
"""Directories that today's code reads; a new format's are added by their names."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as made:
        yield made


def unpacked(name: str, directory: Path) -> golden.Manifest:
    golden.unpack(golden.FOLDER / f"{name}.tar.xz", directory)
    return golden.manifest_of(name.rpartition("-")[0])


def opened(directory: Path) -> Any:
    return open_log(
        directory,
        budget_bytes=golden.OPTIONS["disk"],
        segment_bytes=golden.OPTIONS["segment"],
        clock=SystemClock(),
    )


def test_there_are_directories_of_todays_format() -> None:
    """Where this fails, a version was raised: `python ops/dev.py golden`."""
    assert {f"{golden.TODAY}-{ending}" for ending in golden.ENDINGS} <= set(WRITTEN)


def test_written_directories_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="raise the version"):
        golden.write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", WRITTEN)
def test_every_payload_is_there_and_right_and_what_had_left_is_not(name: str, directory: Path) -> None:
    manifest = unpacked(name, directory)
    log, recovery = opened(directory)
    try:
        assert not recovery.fresh
        assert not recovery.rebuilt
        assert (recovery.damaged_records, recovery.damaged_segments, recovery.missing_segments) == (0, 0, 0)
        found = {
            (each.namespace.hex(), int(each.kind), each.key.hex()): each
            for each in recovery.records
            if each.kind is not RecordKind.NAMESPACE
        }
        assert found.keys() == {(digest, kind, key) for digest, kind, key, *_ in manifest.items}
        assert not found.keys() & {(digest, kind, key) for digest, kind, key in manifest.absent}
        for digest, kind, key, position, length, sha256 in manifest.items:
            each = found[digest, kind, key]
            assert (each.position, each.place.length) == (position, length)
            [payload] = log.read([Wanted(each.place, each.key, each.kind)])
            assert payload is not None
            assert hashlib.sha256(payload).hexdigest() == sha256
        core = Core(pool=StatePool(1 << 20, 600.0))
        report = core.load(recovery.records, recovery.policies, now_wall=SystemClock().wall())
        assert report.blocks + report.states == len(manifest.items)
        assert {info.digest.hex(): str(info.policy) for info in core.namespaces()} == manifest.policies
        assert {info.digest for info in core.namespaces()} == {
            identity.digest() for identity in golden.identities().values()
        }, "namespaces have the digests that they had"
    finally:
        log.close()


def check_prompts(client: CacheClient, manifest: golden.Manifest) -> None:
    """All that was stored is found by keys that are made today, and comes back as it was written."""
    identities = golden.identities()
    for name, blocks, seed, edges in manifest.prompts:
        space = client.open_namespace(identities[name], name=name)
        chain = Chain.of(space, blocks, seed=seed)
        found = look(client, chain)
        assert found.blocks_held == blocks, name
        if edges:
            assert found.plan.compute_from == edges[-1] * space.block_tokens
        assert found.lease is not None or not found.plan.compute_from
        if found.lease is None:
            continue
        with found.lease as lease:
            count = found.plan.compute_from // space.block_tokens
            for item in client.fetch(lease, first_block=0, block_count=count, state=bool(edges)):
                block = item.index if item.kind is ItemKind.BLOCK else item.index // space.block_tokens - 1
                assert item.payload is not None
                want = golden.payload_of(chain.keys[block], item.kind, len(item.payload))
                assert bytes(item.payload) == want
    keyed = KeyedStore(client, identities["keyed"], name="keyed")
    rooms = [bytearray(keyed.payload_bytes) for _ in golden.OPAQUE]
    assert all(keyed.get_into(list(zip(golden.OPAQUE, rooms, strict=True))))


@pytest.mark.parametrize("name", WRITTEN)
def test_a_service_goes_on_where_the_one_before_it_ended(name: str, directory: Path) -> None:
    manifest = unpacked(name, directory)
    with ServiceProcess(directory, **golden.KEPT) as service:
        with CacheClient(directory, owner="t") as client:
            check_prompts(client, manifest)
            space = client.open_namespace(golden.identities()["prompts"], name="prompts")
            longer = Chain.of(space, 60, seed=1)
            assert look(client, longer, lease=False).blocks_held == 30
            longer.store(client, first=30, states=[59])
        service.restart()
        with CacheClient(directory, owner="t") as client:
            check_prompts(client, manifest)
            assert look(client, longer, lease=False).blocks_held == 60
        assert service.stop() == 0
    verify = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "verify", "--dir", str(directory), "--json", "-"],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
        check=False,
    )
    assert verify.returncode == 0, verify.stderr
    assert json.loads(verify.stdout)["records"] >= len(manifest.items)


# ---- what is newer, or from before the first release --------------------------------------------------------


def newer_format(directory: Path) -> None:
    path = directory / "identity"
    body = bytearray(path.read_bytes()[:60])
    struct.pack_into("<I", body, 8, FORMAT_VERSION + 1)
    path.write_bytes(body + struct.pack("<I", crc32c(bytes(body))))


def newer_catalogue(directory: Path) -> None:
    with (
        lmdb.open(str(directory / "catalog.mdb"), subdir=False, lock=False) as environment,
        environment.begin(write=True) as change,
    ):
        row = catalog.open_value(catalog.IDENTITY_KEY, change.get(catalog.IDENTITY_KEY))
        assert row is not None
        later = row[:16] + struct.pack("<I", catalog.CATALOG_VERSION + 1) + b"more"
        change.put(catalog.IDENTITY_KEY, catalog.seal_value(catalog.IDENTITY_KEY, later))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (newer_format, f"format_version={FORMAT_VERSION + 1}"),
        (newer_catalogue, f"catalog_version={catalog.CATALOG_VERSION + 1}"),
    ],
)
def test_what_a_later_release_left_is_refused_by_name_and_nothing_is_touched(
    change: Callable[[Path], None], told: str, directory: Path
) -> None:
    unpacked(WRITTEN[0], directory)
    change(directory)
    (directory / "segment-0000000000000099.log.tmp").write_bytes(b"theirs")
    before = golden.contents(directory)
    with pytest.raises(FormatTooNew, match=told):
        opened(directory)
    assert golden.contents(directory) == before
    served = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "serve", "--dir", str(directory), "--disk", "16MiB"],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
        check=False,
    )
    assert served.returncode == 1
    assert told in served.stderr.splitlines()[-1]
    assert "start it with the release that wrote it" in served.stderr
    assert golden.contents(directory) == before


def test_a_namespace_that_a_later_release_described_stops_the_start_and_is_not_given_up() -> None:
    info = Core(pool=StatePool(1 << 20, 600.0)).open_namespace("n", golden.identities()["prompts"])
    fields = json.loads(describe(info.identity, "n", "zero"))
    payload = json.dumps({**fields, "version": 99, "news": 1}).encode()
    from kvstore.store.base import Found, Place

    later = Found(
        RecordKind.NAMESPACE,
        info.digest,
        BlockKey(info.digest),
        BlockKey(bytes(32)),
        0,
        Lineage.EXACT,
        Checks(0),
        Place(1, 4096, len(payload)),
        1,
        0.0,
        payload,
    )
    with pytest.raises(FormatTooNew, match="description_version=99"):
        Core(pool=StatePool(1 << 20, 600.0)).load([later], {}, now_wall=0.0)
    assert NamespaceDigest(info.digest) == info.digest


def test_a_directory_from_before_the_first_release_is_refused_by_name_and_nothing_is_touched(
    directory: Path,
) -> None:
    golden.unpack(golden.FOLDER / "format-1.tar.xz", directory)
    before = golden.contents(directory)
    assert any(name.startswith("segment-") for name in before)
    with pytest.raises(StoreDamaged, match=r"disk format 1.*start with an empty directory"):
        opened(directory)
    assert golden.contents(directory) == before
