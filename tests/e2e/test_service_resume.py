"""Fetches that go on from an offset, that are given up, and that nobody reads."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Iterator

import grpc
import pytest

from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, error_of, payload_of
from tests.support.service import ServiceProcess, running_service

FRAME_BYTES = 1 << 20
PROFILE = "deepseek-v4-flash"
"""Its states are of several frames."""


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service(segment=32 << 20, staging=32 << 20, pool=64 << 20) as process:
        yield process


@pytest.fixture
def raw(service: ServiceProcess) -> Iterator[Raw]:
    with Raw(service.directory) as made:
        yield made


@pytest.fixture(scope="module")
def chain(service: ServiceProcess) -> Chain:
    with Raw(service.directory) as made:
        chain = Chain(made.open("resume", profile=PROFILE), 24, seed=1)
        made.store(chain, states=[23])
    return chain


def fetched(raw: Raw, **asked: object) -> tuple[list[pb.ItemHeader], bytes]:
    frames = list(raw.cache.Fetch(pb.FetchRequest(**asked), timeout=30, metadata=raw.metadata))
    assert all(len(frame.data) <= FRAME_BYTES for frame in frames)
    return [header for frame in frames for header in frame.items], b"".join(frame.data for frame in frames)


@pytest.mark.parametrize("asked", [{"block_count": 3}, {"block_count": 1, "state": True}, {"state": True}])
def test_what_follows_an_offset_is_the_rest_and_its_header_the_whole_items(
    raw: Raw, chain: Chain, asked: dict[str, int]
) -> None:
    lease = raw.lookup(chain).lease_id
    headers, whole = fetched(raw, lease_id=lease, **asked)
    length = headers[0].length
    chance = random.Random(5)
    for offset in (1, 4096, chance.randrange(length), length - 1, length):
        rest_headers, rest = fetched(raw, lease_id=lease, offset=offset, **asked)
        assert rest == whole[offset:]
        first = rest_headers[0]
        assert first.offset == offset
        first.offset = 0
        assert rest_headers == headers
    whole_item = payload_of(chain.keys[0 if headers[0].kind == pb.BLOCK else 23], length)
    assert headers[0].crc32 == zlib.crc32(whole_item)


def test_an_offset_at_the_end_of_the_only_item_brings_its_header_and_no_bytes(raw: Raw, chain: Chain) -> None:
    lease = raw.lookup(chain).lease_id
    length = chain.namespace.block_bytes
    [header], data = fetched(raw, lease_id=lease, first_block=2, block_count=1, offset=length)
    assert (header.index, header.length, header.offset, data) == (2, length, length, b"")


@pytest.mark.parametrize(
    "asked",
    [
        {"block_count": 2, "offset": 449_825},
        {"block_count": 2, "offset": 1 << 63},
        {"state": True, "offset": 3_619_305},
        {"block_count": 2, "slices": 2, "offset": 1},
        {"offset": 1},
    ],
)
def test_an_offset_that_makes_no_sense_is_refused_by_name(
    raw: Raw, chain: Chain, asked: dict[str, int]
) -> None:
    lease = raw.lookup(chain).lease_id
    with pytest.raises(grpc.RpcError) as caught:
        fetched(raw, lease_id=lease, **asked)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_of(caught.value) == "INVALID_ARGUMENT"
    assert f"offset={asked['offset']}" in caught.value.details()


def test_a_missing_item_is_missing_at_any_offset(raw: Raw) -> None:
    chain = Chain(raw.open("cleared"), 2, seed=2)
    raw.store(chain)
    lease = raw.lookup(chain).lease_id
    raw.admin.Clear(pb.ClearRequest(namespace=chain.namespace.digest), timeout=10)
    headers, data = fetched(raw, lease_id=lease, block_count=2, offset=17)
    assert [header.missing for header in headers] == [True, True]
    assert data == b""


def test_a_stream_that_is_broken_off_anywhere_is_put_together_again(raw: Raw, chain: Chain) -> None:
    lease = raw.lookup(chain).lease_id
    want = b"".join(payload_of(key, chain.namespace.block_bytes) for key in chain.keys[:20])
    chance = random.Random(9)
    for _ in range(10):
        got = bytearray()
        while len(got) < len(want):
            index, offset = divmod(len(got), chain.namespace.block_bytes)
            request = pb.FetchRequest(
                lease_id=lease, first_block=index, block_count=20 - index, offset=offset
            )
            call = raw.cache.Fetch(request, timeout=30, metadata=raw.metadata)
            for _, frame in zip(range(chance.randrange(1, 4)), call, strict=False):
                got += frame.data
            call.cancel()
            # As if the last frame had come in part.
            del got[len(got) - chance.randrange(4096) if len(got) < len(want) else len(got) :]
        assert got == want


def until_idle(raw: Raw) -> dict[str, float]:
    """The figures, once nothing is being fetched."""
    limit = time.monotonic() + 20
    while (figures := raw.stats())["fetching_bytes"]:
        assert time.monotonic() < limit, figures
    return figures


def test_a_thousand_fetches_that_are_given_up_leave_nothing(raw: Raw, chain: Chain) -> None:
    lease = raw.lookup(chain).lease_id
    fetched(raw, lease_id=lease, block_count=23)
    request = pb.FetchRequest(lease_id=lease, block_count=23, state=True)
    chance = random.Random(3)
    for number in range(1000):
        call = raw.cache.Fetch(request, timeout=30, metadata=raw.metadata)
        if number % 10:
            next(call)
        if chance.random() < 0.1:
            next(call)
        call.cancel()
    figures = until_idle(raw)
    assert figures["fetch_refused_total"] == 0
    raw.call("Release", pb.ReleaseRequest(lease_id=lease))
    figures = raw.stats()
    assert (figures["leases"], figures["mapped_items"]) == (0, 0)
    # Nothing stays pinned: all of it can leave.
    raw.admin.Clear(pb.ClearRequest(namespace=chain.namespace.digest), timeout=30)
    figures = raw.stats()
    assert (figures["memory_items"], figures["memory_held_bytes"]) == (0, 0)
    raw.store(chain, states=[23])


def test_a_reader_that_takes_nothing_holds_up_nobody_and_keeps_no_more_than_its_share() -> None:
    # Nothing stays in memory, so that all of it passes the gate: 16 MiB, of which a session has half.
    with (
        running_service(memory=400 << 20, segment=32 << 20, staging=32 << 20, cache=1 << 20) as service,
        Raw(service.directory) as idle,
        Raw(service.directory) as eager,
    ):
        chain = Chain(eager.open("shared", profile=PROFILE), 24, seed=3)
        eager.store(chain)
        lease = idle.lookup(chain).lease_id
        request = pb.FetchRequest(lease_id=lease, block_count=24)
        untaken = [idle.cache.Fetch(request, timeout=60, metadata=idle.metadata) for _ in range(30)]
        for call in untaken[:2]:
            next(call)
        mine = eager.lookup(chain).lease_id
        for _ in range(20):
            items = eager.fetch(mine, count=24)
            assert all(chain.is_right(*item) for item in items)
            assert eager.stats()["fetching_bytes"] <= 8 * FRAME_BYTES
        idle.close()
        assert until_idle(eager)["leases"] == 1
        for call in untaken:
            call.cancel()


def test_a_reader_slower_than_its_lease_gets_an_error_and_never_other_bytes() -> None:
    with (
        running_service(segment=32 << 20, staging=32 << 20, lease=1.0) as service,
        Raw(service.directory) as raw,
    ):
        chain = Chain(raw.open("slow", profile=PROFILE), 60, seed=4)
        raw.store(chain, last=30)
        raw.store(chain, first=30)
        lease = raw.lookup(chain).lease_id
        request = pb.FetchRequest(lease_id=lease, block_count=60)
        call = raw.cache.Fetch(request, timeout=60, metadata=raw.metadata)
        next(call)
        limit = time.monotonic() + 20
        while raw.stats()["leases"]:
            assert time.monotonic() < limit
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert error_of(caught.value) == "UNKNOWN_LEASE"
        assert until_idle(raw)["mapped_items"] == 0
