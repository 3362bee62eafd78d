"""Answers on their way out: items as frames, and callers that have gone before the answer comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence

from kvstore.core import Lease
from kvstore.errors import UnknownLease
from kvstore.service.engine import Engine
from kvstore.service.frames import Cutter
from kvstore.service.session import Session
from kvstore.service.status import Context
from kvstore.service.waiting import Until
from kvstore.types import BytesLike
from kvstore.v1 import cache_pb2 as pb

Part = tuple[pb.ItemHeader, BytesLike]
"""One item of a fetch on its way out."""


LAST_WRITE_SECONDS = 1.0

_DATA_TAG = bytes([pb.ItemFrame.DATA_FIELD_NUMBER << 3 | 2])
"""Of the field `data` on the wire, with its type: bytes behind their length."""


def wire_frame(headers: Sequence[pb.ItemHeader], data: Sequence[memoryview]) -> bytes:
    """An ItemFrame as it goes over the wire. Its data is copied once, here, where a message object would take four copies."""
    head = pb.ItemFrame(items=headers).SerializeToString()
    if not data:
        return head
    return b"".join((head, _DATA_TAG, _varint(sum(map(len, data))), *data))


def _varint(value: int) -> bytes:
    """The wire's way to write a whole number, seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


async def framed(batches: AsyncIterable[Sequence[Part]]) -> AsyncGenerator[bytes, None]:
    """Frames of batches, as they go over the wire. Each holds copies, and ends with its batch at the latest: a batch's bytes
    are good only until the next one is asked for."""
    cutter = Cutter[pb.ItemHeader]()
    async for parts in batches:
        for header, payload in parts:
            for headers, data in cutter.add(header, payload):
                yield wire_frame(headers, data)
        for headers, data in cutter.rest():
            yield wire_frame(headers, data)


async def send_frames(
    context: Context, frames: AsyncIterable[bytes], *, may_send: Callable[[], object]
) -> None:
    """Write them all; the next one is made while one is on its way. `may_send` is called before each, and raises where it may
    not go."""
    sending: asyncio.Future[None] | None = None
    try:
        async for frame in frames:
            if sending is not None:
                await asyncio.shield(sending)
            may_send()
            sending = _begin(context.write(frame))
            # One turn of the loop, in which it begins.
            await asyncio.sleep(0)
        if sending is not None:
            await asyncio.shield(sending)
    finally:
        if sending is not None:
            await _ended(sending)


async def send(context: Context, message: object) -> None:
    """Write one message of several. Who is cancelled meanwhile comes back when the write is over."""
    sending = _begin(context.write(message))
    try:
        await asyncio.shield(sending)
    finally:
        await _ended(sending)


def _begin(write: Awaitable[None]) -> asyncio.Future[None]:
    sending = asyncio.ensure_future(write)
    # Where nobody is left to hear of its error, that is no error of ours.
    sending.add_done_callback(lambda done: done.cancelled() or done.exception())
    return sending


async def _ended(sending: asyncio.Future[None]) -> None:
    """While a write is under way gRPC takes no status, and a caller that is still there would wait for one without end."""
    if not sending.done():
        await asyncio.wait({sending}, timeout=LAST_WRITE_SECONDS)
    if not sending.done():
        sending.cancel()
        await asyncio.wait({sending}, timeout=LAST_WRITE_SECONDS)


def under(engine: Engine, lease: Lease, session: Session) -> Until:
    """For all messages of a call that a lease covers: a reader slower than its lease, or its session, gets an error."""
    return Until(
        session=session,
        seconds=lambda: lease.deadline - engine.time.monotonic(),
        late=lambda: UnknownLease(
            "the lease ended before its bytes were taken; look up again",
            field="lease_id",
            value=lease.lease_id,
            allowed=f"fetching within {engine.core.lease_seconds:g} s",
        ),
    )


async def send_head(context: Context, *, undo: Callable[[], object]) -> None:
    """Send the answer's headers; where the caller is found to be gone, `undo` what it was granted.

    gRPC says nothing about an answer that was lost on its way. So this finds who left while the call waited or stood in
    a queue, at the price of one more message; who leaves while the answer is on its way keeps the grant to its deadline.
    """
    try:
        await context.send_initial_metadata(())
    except BaseException:
        undo()
        raise
