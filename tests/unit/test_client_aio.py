"""What only the asynchronous client promises: cancelled at once, one loop, nothing that holds the loop up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from kvstore.errors import InvalidArgument, Unavailable
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, Deadlines
from kvstore_client.aio import AsyncCacheClient
from tests.support.double import no_plan, service_double
from tests.support.service import short_directory

NAMESPACE = b"n" * 32


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_directory() as directory:
        directory.mkdir()
        yield directory


def test_it_has_every_method_of_the_synchronous_client() -> None:
    def names(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert names(AsyncCacheClient) == names(CacheClient)


async def test_cancelling_the_task_cancels_the_call_at_once(folder: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    def lookup(request: object, context: grpc.ServicerContext) -> pb.LookupReply:
        context.add_callback(ended.set)
        begun.set()
        ended.wait(20)
        return no_plan()

    with service_double(folder, answers={"Lookup": lookup}):
        async with AsyncCacheClient(folder, owner="t", deadlines=Deadlines(lookup=30)) as client:
            task = asyncio.create_task(client.lookup(NAMESPACE, [], prompt_tokens=0))
            assert await asyncio.to_thread(begun.wait, 10)
            start = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(ended.wait, 10)
            assert time.monotonic() - start < 5


async def test_closing_an_iterator_cancels_its_call(folder: Path) -> None:
    ended = threading.Event()

    def fetch(request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.ItemFrame]:
        context.add_callback(ended.set)
        header = pb.ItemHeader(kind=pb.BLOCK, index=0, length=0, lineage=pb.LINEAGE_EXACT)
        yield pb.ItemFrame(items=[header])
        ended.wait(20)

    def lookup(request: object, context: object) -> pb.LookupReply:
        chosen = pb.Alternative(state_source=pb.CHECKPOINT, compute_from=32, state_at=32, replay_from=32)
        plan = pb.RestorePlan(prompt_tokens=40, chosen=chosen, exactness=pb.EXACT)
        return pb.LookupReply(plan=plan, lease_id=7, lease_seconds=60.0)

    with service_double(folder, answers={"Lookup": lookup, "Fetch": fetch}):
        async with AsyncCacheClient(folder, owner="t", deadlines=Deadlines(fetch=30)) as client:
            lease = (await client.lookup(NAMESPACE, [], prompt_tokens=40)).lease
            assert lease is not None
            items = client.fetch(lease, first_block=0, block_count=2, state=False)
            async with aclosing(items):  # type: ignore[type-var]
                assert (await anext(items)).index == 0
            assert await asyncio.to_thread(ended.wait, 10)


async def test_a_service_that_does_not_speak_does_not_hold_up_the_loop(folder: Path) -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    with service_double(folder, greet=lambda number: None):
        async with AsyncCacheClient(folder, owner="t", deadlines=Deadlines(connect=0.5)) as client:
            turning = asyncio.create_task(turn())
            with pytest.raises(Unavailable, match="no session"):
                await client.lookup(NAMESPACE, [], prompt_tokens=0)
            turning.cancel()
    assert turns > 5


async def test_close_ends_calls_under_way_as_unavailable(folder: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    def lookup(request: object, context: grpc.ServicerContext) -> pb.LookupReply:
        context.add_callback(ended.set)
        begun.set()
        ended.wait(20)
        return no_plan()

    with service_double(folder, answers={"Lookup": lookup}):
        client = AsyncCacheClient(folder, owner="t", deadlines=Deadlines(lookup=30))
        task = asyncio.create_task(client.lookup(NAMESPACE, [], prompt_tokens=0))
        assert await asyncio.to_thread(begun.wait, 10)
        await client.close()
        with pytest.raises(Unavailable):
            await task
        with pytest.raises(Unavailable, match="closed"):
            await client.stats()


def test_another_loop_is_refused_by_name(folder: Path) -> None:
    with service_double(folder, answers={"Lookup": lambda request, context: no_plan()}):
        client = AsyncCacheClient(folder, owner="t")

        async def use() -> None:
            await client.lookup(NAMESPACE, [], prompt_tokens=0)

        with asyncio.Runner() as first:
            first.run(use())
            with asyncio.Runner() as second, pytest.raises(InvalidArgument, match="loop"):
                second.run(use())
            first.run(client.close())
