"""A service in its caller's process, and the calls to it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from kvstore.clock import SystemClock
from kvstore.service import inprocess_calls
from kvstore.service.inprocess import InProcessService
from kvstore.service.inprocess_calls import WAITING_MAX, CallFailed, Handler
from kvstore.service.inprocess_channel import AwaitedChannel, BlockingChannel
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.cache_pb2_grpc import CacheStub
from kvstore_client import CacheClient, InProcessAddress
from kvstore_client.aio import AsyncCacheClient
from tests.support.calls import look
from tests.support.chains import Chain, identity_of
from tests.support.inprocess import ServiceHere, running_here
from tests.support.polling import wait_for

SECONDS = 0.2


class Loop:
    """A loop of its own whose handlers are the test's: a `Where`."""

    def __init__(self, **handlers: Handler) -> None:
        self.clock = SystemClock()
        self.tasks: list[asyncio.Task[None]] = []
        self._handlers = handlers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def post(self, step: Any, *given: object) -> bool:
        self._loop.call_soon_threadsafe(step, *given)
        return True

    def handler(self, method: str) -> Handler | None:
        return self._handlers.get(method.rsplit("/", maxsplit=1)[-1])

    def began(self, call: inprocess_calls.Call, task: asyncio.Task[None]) -> None:
        self.tasks.append(task)

    def close(self) -> None:
        async def ended() -> None:
            for task in self.tasks:
                task.cancel()
            if self.tasks:
                await asyncio.wait(self.tasks)

        asyncio.run_coroutine_threadsafe(ended(), self._loop).result(10)
        self.post(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def ways() -> Iterator[Any]:
    """ways(name=handler): a channel for threads to those handlers."""
    made: list[Loop] = []

    def way(**handlers: Handler) -> BlockingChannel:
        made.append(Loop(**handlers))
        return BlockingChannel(made[-1])

    way.made = made  # type: ignore[attr-defined]
    yield way
    for each in made:
        each.close()


def method(channel: Any, kind: str, name: str) -> Any:
    return getattr(channel, kind)(f"/s/{name}", request_serializer=None, response_deserializer=bytes.decode)


async def forever(request: object, context: object) -> None:
    await asyncio.get_running_loop().create_future()


def test_what_is_sent_and_answered_are_the_objects_themselves(ways: Any) -> None:
    async def echo(request: object, context: Any) -> object:
        return [request, context.invocation_metadata()]

    sent = object()
    answer = method(ways(Echo=echo), "unary_unary", "Echo")(sent, timeout=5, metadata=(("a", "b"),))
    assert answer[0] is sent
    assert answer[1] == (("a", "b"),)


def test_what_the_service_has_as_bytes_is_parsed(ways: Any) -> None:
    async def answer(request: object, context: object) -> bytes:
        return b"text"

    assert method(ways(Answer=answer), "unary_unary", "Answer")(None, timeout=5) == "text"


def test_a_refusal_has_code_details_and_metadata(ways: Any) -> None:
    async def refuse(request: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no such thing", (("kvstore-error", "X"),))

    with pytest.raises(grpc.RpcError) as caught:
        method(ways(Refuse=refuse), "unary_unary", "Refuse")(None, timeout=5)
    error: Any = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "no such thing")
    assert error.trailing_metadata() == (("kvstore-error", "X"),)


def test_an_unknown_call_and_one_that_breaks_are_told_apart(ways: Any) -> None:
    async def broken(request: object, context: object) -> None:
        raise ZeroDivisionError

    channel = ways(Broken=broken)
    for name, code in (("None", grpc.StatusCode.UNIMPLEMENTED), ("Broken", grpc.StatusCode.INTERNAL)):
        with pytest.raises(CallFailed) as caught:
            method(channel, "unary_unary", name)(None, timeout=5)
        assert caught.value.code() is code
    [task] = ways.made[0].tasks
    wait_for(task.done)
    assert isinstance(task.exception(), ZeroDivisionError)


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
def test_a_call_ends_at_its_deadline_and_so_does_its_handler(ways: Any, kind: str) -> None:
    channel = ways(Forever=forever)
    begin = time.monotonic()
    with pytest.raises(CallFailed) as caught:
        list(method(channel, kind, "Forever")(None, timeout=SECONDS))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert SECONDS <= time.monotonic() - begin < SECONDS + 5
    wait_for(ways.made[0].tasks[0].done)


def test_a_call_ends_at_its_deadline_though_the_loop_stands_still(ways: Any) -> None:
    go_on = threading.Event()

    async def stuck(request: object, context: object) -> None:
        go_on.wait()

    with pytest.raises(CallFailed) as caught:
        method(ways(Stuck=stuck), "unary_unary", "Stuck")(None, timeout=SECONDS)
    go_on.set()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_result_that_is_late_for_who_waits_can_come_later(ways: Any) -> None:
    go_on = threading.Event()

    async def answer(request: object, context: object) -> str:
        await asyncio.get_running_loop().run_in_executor(None, go_on.wait)
        return "late"

    call = method(ways(Answer=answer), "unary_unary", "Answer").future(None, timeout=20)
    with pytest.raises(grpc.FutureTimeoutError):
        call.result(timeout=0.05)
    assert not call.done()
    go_on.set()
    assert call.result(timeout=10) == "late"


def test_who_does_not_take_answers_makes_the_service_wait(ways: Any) -> None:
    written: list[int] = []

    async def many(request: object, context: Any) -> None:
        for number in range(10 * WAITING_MAX):
            await context.write(str(number))
            written.append(number)

    call = method(ways(Many=many), "unary_stream", "Many")(None, timeout=20)
    wait_for(lambda: len(written) == WAITING_MAX)
    first = next(call)
    wait_for(lambda: len(written) == WAITING_MAX + 1)
    assert [first, *call] == [str(number) for number in range(10 * WAITING_MAX)]
    assert call.cancel() is False


def test_a_cancelled_call_ends_on_both_sides(ways: Any) -> None:
    async def one(request: object, context: Any) -> None:
        await context.write("first")
        await forever(request, context)

    call = method(ways(One=one), "unary_stream", "One")(None, timeout=20)
    assert next(call) == "first"
    assert call.cancel() is True
    with pytest.raises(CallFailed) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    wait_for(ways.made[0].tasks[0].done)


def test_requests_are_made_when_they_are_asked_for_and_in_another_thread(ways: Any) -> None:
    made: list[int] = []
    threads: set[int] = set()

    def requests() -> Iterator[int]:
        for number in range(5):
            threads.add(threading.get_ident())
            made.append(number)
            yield number

    async def two(request: object, context: Any) -> str:
        assert request is None
        return f"{await context.read()} {await context.read()}"

    async def count(request: object, context: Any) -> str:
        taken = 0
        while await context.read() is not grpc.aio.EOF:
            taken += 1
        return str(taken)

    channel = ways(Two=two, Count=count)
    assert method(channel, "stream_unary", "Two")(requests(), timeout=10) == "0 1"
    assert made == [0, 1]
    assert method(channel, "stream_unary", "Count")(requests(), timeout=10) == "5"
    assert ways.made[0]._thread.ident not in threads


def test_requests_that_fail_end_the_call(ways: Any) -> None:
    def requests() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("of the caller's")

    async def read(request: object, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            continue

    with pytest.raises(CallFailed, match="of the caller's") as caught:
        method(ways(Read=read), "stream_unary", "Read")(requests(), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNKNOWN


def test_a_closed_channel_ends_its_calls_and_takes_no_more(ways: Any) -> None:
    channel = ways(Forever=forever)
    call = method(channel, "unary_stream", "Forever")(None, timeout=20)
    channel.close()
    with pytest.raises(CallFailed) as caught:
        next(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(ValueError, match="closed"):
        method(channel, "unary_unary", "Forever")(None, timeout=20)


async def test_a_task_that_is_cancelled_cancels_its_call() -> None:
    loop = Loop(Forever=forever)
    try:
        channel = AwaitedChannel(loop)
        call = method(channel, "unary_unary", "Forever")(None, timeout=20)
        waiting = asyncio.create_task(call._result())
        await asyncio.sleep(0)
        while not loop.tasks:
            await asyncio.sleep(0)
        # A task that has not begun would be ended without the call's hearing of it.
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert call.done()
        with pytest.raises(CallFailed) as caught:
            await method(channel, "unary_unary", "Forever")(None, timeout=SECONDS)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await channel.close()
        with pytest.raises(grpc.aio.UsageError):
            method(channel, "unary_unary", "Forever")(None, timeout=20)
    finally:
        await asyncio.to_thread(loop.close)


# ---- the service ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceHere]:
    with running_here() as service:
        yield service


def client_of(service: InProcessService) -> CacheClient:
    return CacheClient(InProcessAddress(service), owner="tests")


def test_a_client_of_threads_and_one_of_tasks_share_a_service(service: ServiceHere) -> None:
    async def held(chain: Chain) -> int:
        async with AsyncCacheClient(service.address, owner="tests") as client:
            return (await look(client, chain)).blocks_held  # type: ignore[arg-type, misc, no-any-return]

    with client_of(service) as client:
        chain = Chain.of(client.open_namespace(identity_of(salt="share"), name="share"), 3, seed=1)
        chain.store(client)
        assert asyncio.run(held(chain)) == 3


def test_a_forgotten_client_gives_all_back(service: ServiceHere) -> None:
    with client_of(service) as admin:
        chain = Chain.of(admin.open_namespace(identity_of(salt="forgot"), name="forgot"), 3, seed=1)
        chain.store(admin)
        found = look(client_of(service), chain)
        assert admin.stats()["leases"] == 1
        del found
        gc.collect()
        wait_for(lambda: (admin.stats()["leases"], admin.stats()["sessions"]) == (0, 1))


def test_there_is_no_memory_to_map_or_to_write_to(service: ServiceHere) -> None:
    session = service.open_session().result(10)
    cache = CacheStub(service.channel())
    metadata = (("kvstore-session", session.number),)
    for call, request in (
        (cache.Map, pb.MapRequest(lease_id=1)),
        (cache.OpenArena, pb.OpenArenaRequest(bytes=4096)),
        (cache.OpenDock, pb.OpenDockRequest()),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(call(request, metadata=metadata, timeout=10))
        assert dict(caught.value.trailing_metadata())["kvstore-error"] == "MEMORY_UNAVAILABLE"
    session.close()
    session.close()
    assert not session.alive()
