"""Answers on their way out: items as frames, and callers that have gone before the answer comes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence

from kvstore.core import Lease
from kvstore.errors import UnknownLease
from kvstore.service.engine import Engine
from kvstore.service.frames import Cutter
from kvstore.service.session import Session
from kvstore.service.status import Context
from kvstore.service.waiting import until_end
from kvstore.types import BytesLike
from kvstore.v1 import cache_pb2 as pb

Part = tuple[pb.ItemHeader, BytesLike]
"""One item of a fetch on its way out."""


async def framed(batches: AsyncIterable[Sequence[Part]]) -> AsyncGenerator[pb.ItemFrame, None]:
    """Frames of batches. Each holds copies, and ends with its batch at the latest: a batch's bytes are good only until the
    next one is asked for."""
    cutter = Cutter[pb.ItemHeader]()
    async for parts in batches:
        for header, payload in parts:
            for headers, data in cutter.add(header, payload):
                yield pb.ItemFrame(items=headers, data=data)
        for headers, data in cutter.rest():
            yield pb.ItemFrame(items=headers, data=data)


async def send_under(
    engine: Engine, lease: Lease, session: Session, context: Context, message: pb.ItemFrame | pb.MapReply
) -> None:
    """Write one message under a lease that holds: a reader slower than its lease gets an error, and never other bytes."""
    held = engine.lease(lease.lease_id, session.id)
    await until_end(
        context.write(message),
        session=session,
        seconds=held.deadline - engine.time.monotonic(),
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
