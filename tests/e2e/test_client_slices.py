"""Sliced fetches and window rows through a real service: the same bytes as whole blocks, in the order promised."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest

from kvstore.errors import InvalidArgument, UnknownLease
from kvstore.profile.layout import layer_slices, rows_needed
from kvstore.profile.registry import get_profile
from kvstore.types import ItemKind, Lineage, StateSource
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, FetchedItem, FetchedSlice, Lookup, OpenedNamespace, ReserveItem
from tests.support.calls import look
from tests.support.chains import Chain, identity_of, payload_of
from tests.support.service import ServiceProcess, running_service

Fetched = Sequence[FetchedItem | FetchedSlice]


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service(staging=32 << 20, prompt_tokens=16_384) as process:
        yield process


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[CacheClient]:
    with CacheClient(service.directory, owner="tests") as made:
        yield made


def opened(client: CacheClient, name: str, profile: str = "tiny", policy: str = "") -> OpenedNamespace:
    return client.open_namespace(identity_of(profile, salt=name), name=name, policy=policy)


def sliced(client: CacheClient, found: Lookup, *, count: int, slices: int, **asked: Any) -> Fetched:
    assert found.lease is not None
    asked = {"first_block": 0, "state": True, **asked}
    return list(client.fetch_slices(found.lease, block_count=count, slices=slices, **asked))


def check(chain: Chain, found: Fetched, *, count: int, slices: int, first: int = 0) -> None:
    """The slices are those of the blocks asked for, in order, and right."""
    cuts = layer_slices(get_profile(chain.namespace.profile_name), slices)
    parts = [each for each in found if isinstance(each, FetchedSlice)]
    assert [(part.slice, part.index) for part in parts] == [
        (number, block) for number in range(len(cuts)) for block in range(first, first + count)
    ]
    for part in parts:
        whole = payload_of(chain.keys[part.index], chain.namespace.block_bytes)
        cut = cuts[part.slice]
        assert part.payload == whole[cut.offset : cut.end]
        assert part.lineage is Lineage.EXACT


@pytest.mark.parametrize("profile", ["tiny", "flash-slim", "deepseek-v4.1-flash"])
@pytest.mark.parametrize("slices", [2, 5, 16])
def test_slices_come_layer_by_layer_after_the_state_and_are_the_blocks(
    client: CacheClient, profile: str, slices: int
) -> None:
    chain = Chain.of(opened(client, f"slices-{profile}-{slices}", profile), 6, seed=1)
    chain.store(client, states=[5])
    found = look(client, chain)
    assert found.plan.state_source is StateSource.CHECKPOINT
    items = sliced(client, found, count=6, slices=slices)
    assert isinstance(items[0], FetchedItem)
    assert (items[0].kind, items[0].payload) == (ItemKind.STATE, chain.right_bytes(items[0]))
    check(chain, items[1:], count=6, slices=slices)
    check(
        chain,
        sliced(client, found, count=3, slices=slices, first_block=2, state=False),
        count=3,
        slices=slices,
        first=2,
    )
    assert client.stats()["staged_bytes"] == 0


def test_of_a_damaged_block_every_slice_is_missing_and_the_rest_comes() -> None:
    with running_service() as service, CacheClient(service.directory, owner="tests") as client:
        chain = Chain.of(opened(client, "damaged"), 6, seed=2)
        chain.store(client, states=[5])
        [segment] = [path for path in service.directory.iterdir() if path.name.startswith("segment-")]
        wanted = payload_of(chain.keys[3], chain.namespace.block_bytes)
        with segment.open("r+b") as file:
            file.seek(segment.read_bytes().index(wanted) + len(wanted) - 1)
            file.write(bytes([wanted[-1] ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        # The bit that is wrong lies in the last slice; the first is not handed out all the same.
        items = sliced(client, look(client, chain), count=6, slices=2)
        missing = [each for each in items if each.payload is None]
        assert [(type(each), each.index) for each in missing] == [(FetchedSlice, 3)] * 2
        assert client.stats()["damaged_total"] == 1


def test_slices_need_no_room_of_writers_however_many_blocks_there_are(client: CacheClient) -> None:
    namespace = opened(client, "many", "flash-slim")
    count = 80
    assert count * namespace.block_bytes > 32 << 20
    chain = Chain.of(namespace, count, seed=3)
    for first in range(0, count, 20):
        chain.store(client, first=first, last=first + 20)
    found = look(client, chain)
    before = client.stats()
    check(chain, sliced(client, found, count=count, slices=4, state=False), count=count, slices=4)
    after = client.stats()
    assert after["staging_refused_total"] == before["staging_refused_total"]
    read = after["disk_read_payload_bytes_total"] - before["disk_read_payload_bytes_total"]
    assert read == count * namespace.block_bytes
    idle(client)


def test_of_a_large_block_the_slices_before_the_damage_come() -> None:
    with running_service() as service, CacheClient(service.directory, owner="tests") as client:
        chain = Chain.of(opened(client, "large", "flash-slim"), 4, seed=9)
        chain.store(client)
        [segment] = [path for path in service.directory.iterdir() if path.name.startswith("segment-")]
        wanted = payload_of(chain.keys[2], chain.namespace.block_bytes)
        with segment.open("r+b") as file:
            file.seek(segment.read_bytes().index(wanted) + len(wanted) // 2)
            file.write(bytes([wanted[len(wanted) // 2] ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        cuts = layer_slices(get_profile("flash-slim"), 4)
        bad = next(number for number, cut in enumerate(cuts) if cut.end > len(wanted) // 2)
        items = sliced(client, look(client, chain), count=4, slices=4, state=False)
        parts = [each for each in items if isinstance(each, FetchedSlice)]
        assert [(each.slice, each.index) for each in parts if each.payload is None] == [
            (number, 2) for number in range(bad, len(cuts))
        ]
        assert client.stats()["damaged_total"] == 1


def test_a_sliced_fetch_that_is_closed_early_or_whose_lease_ends_gives_its_memory_back(
    client: CacheClient,
) -> None:
    chain = Chain.of(opened(client, "closed", "flash-slim"), 24, seed=4)
    chain.store(client)
    found = look(client, chain)
    assert found.lease is not None
    for wanted in (1, 30, 60):
        items = client.fetch_slices(found.lease, first_block=0, block_count=24, state=False, slices=4)
        assert [each.payload is not None for each, _ in zip(items, range(wanted), strict=False)]
        items.close()  # type: ignore[attr-defined]
        idle(client)
    items = client.fetch_slices(found.lease, first_block=0, block_count=24, state=False, slices=4)
    next(items)
    found.lease.release()
    with pytest.raises(UnknownLease):
        list(items)
    idle(client)


def idle(client: CacheClient) -> None:
    deadline = time.monotonic() + 20
    while any((stats := client.stats())[name] for name in ("staged_bytes", "fetching_bytes")):
        assert time.monotonic() < deadline, stats


def test_what_makes_no_sense_is_refused_by_name(client: CacheClient) -> None:
    chain = Chain.of(opened(client, "senseless"), 2, seed=5)
    chain.store(client, states=[1])
    found = look(client, chain)
    assert found.lease is not None
    for count, slices, field in ((2, 1, "slices"), (2, 17, "slices"), (0, 2, "block_count")):
        with pytest.raises(InvalidArgument, match=f"{field}="):
            sliced(client, found, count=count, slices=slices)
    with pytest.raises(InvalidArgument, match="block_count=3"):
        sliced(client, found, count=3, slices=2)
    connection = client._link.connection()
    for request in (
        pb.FetchRequest(lease_id=found.lease.id, block_count=2, slices=17),
        pb.FetchRequest(lease_id=found.lease.id, state=True, slices=2),
    ):
        with pytest.raises(grpc.RpcError, match="slices=") as refused:
            list(connection.method("Fetch")(request, metadata=connection.metadata, timeout=10))
        assert dict(refused.value.trailing_metadata() or ())["kvstore-error"] == "INVALID_ARGUMENT"


# ---- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("profile", ["tiny", "flash-slim"])
def test_the_state_of_a_rows_plan_is_the_rows_that_its_resume_needs(
    client: CacheClient, service: ServiceProcess, profile: str, overlap: bool
) -> None:
    name = f"rows-{profile}-{overlap}"
    geometry = get_profile(profile)
    namespace = opened(client, name, profile, "full+overlap" if overlap else "full")
    chain = Chain.of(namespace, 4, seed=6)
    length = geometry.rows_overlap_block_bytes if overlap else geometry.rows_block_bytes
    items = [chain.block_item(i) for i in range(4)]
    items += [
        ReserveItem(
            kind=ItemKind.ROWS,
            key=chain.keys[i],
            position=(i + 1) * namespace.block_tokens,
            length=length,
            to_ssd=True,
        )
        for i in range(4)
    ]
    with client.reserve(namespace.digest, items) as reservation:
        assert len(reservation.granted) == 8
        reservation.write({i: chain.payload(items[i]) for i in reservation.granted})
        reservation.commit()
    needed = rows_needed(geometry, 4 * namespace.block_tokens, overlap=overlap)
    # A client that did not open the namespace itself asks the service what its blocks look like.
    with CacheClient(service.directory, owner="other") as other:
        for each in (client, other):
            found = look(each, chain)
            assert (found.plan.state_source, found.plan.state_at) == (StateSource.ROWS, needed.state_at)
            edges = found.coverage.rows_overlap if overlap else found.coverage.rows
            assert 4 * namespace.block_tokens in edges
            assert found.lease is not None
            whole = list(each.fetch(found.lease, first_block=0, block_count=4, state=True))
            rows = [item for item in whole if item.kind is ItemKind.ROWS]
            assert whole[4:] == rows
            assert [item.index for item in rows] == list(
                range(needed.first_block, needed.first_block + needed.blocks)
            )
            for item in rows:
                assert item.payload == payload_of(chain.keys[item.index], length, ItemKind.ROWS)
            cut = sliced(each, found, count=4, slices=2)
            assert list(cut[: len(rows)]) == rows
            check(chain, cut[len(rows) :], count=4, slices=2)
            found.lease.release()
