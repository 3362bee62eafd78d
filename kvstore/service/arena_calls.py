"""The arena calls: memory of a session's own, and items that lie in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from kvstore.errors import InvalidArgument, MemoryUnavailable
from kvstore.memory import Arena
from kvstore.service import encode
from kvstore.service.engine import Engine
from kvstore.service.frames import FRAME_BYTES, Incoming
from kvstore.service.session import Session
from kvstore.service.turns import in_parts, mapped
from kvstore.service.uploads import Upload
from kvstore.v1 import cache_pb2 as pb

log = logging.getLogger(__name__)

ITEMS_AT_ONCE = 64
"""Small ones are copied in the event loop's thread, a frame's worth of them: less than a millisecond."""

Piece = tuple[Incoming, int, Sequence[int]]
"""An item, where its bytes lie in the arena, and where they may be cut."""


class ArenaCalls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_short = False
        """Whether it has been said that this system has no memory for arenas."""

    def open(self, request: pb.OpenArenaRequest, session: Session) -> pb.OpenArenaReply:
        """The session's arena, made now if it has none. Its line is on its way when this returns."""
        arenas = self._engine.arenas
        arena = arenas.find(session.id)
        if arena is None:
            # Also while draining: what was reserved before is still to be written.
            arena = self._made(request, session)
        if not session.give_arena(arena):
            # Nobody else has it, or whoever has it can ask again.
            arenas.end(session.id)
            raise MemoryUnavailable(
                "the arena's descriptor cannot be passed: not over this session, or the system has no room for it now",
                field="session",
                value=session.id,
                allowed="Write, which moves the same bytes",
            )
        return pb.OpenArenaReply(arena=arena.number, bytes=arena.bytes)

    def _made(self, request: pb.OpenArenaRequest, session: Session) -> Arena:
        if not request.bytes:
            raise InvalidArgument(
                "an arena has a size", field="bytes", value=0, allowed="1 or more; what is left is the limit"
            )
        try:
            return self._engine.arenas.make(session.id, request.bytes)
        except (OSError, AttributeError) as error:
            if not self._is_short:
                self._is_short = True
                log.warning("no memory for arenas, clients write through the socket: %s", error)
            raise MemoryUnavailable(
                f"this system gives no sealed shared memory: {error}",
                field="bytes",
                value=request.bytes,
                allowed="Write, which moves the same bytes",
            ) from error

    async def write(self, request: pb.WriteArenaRequest, session: Session) -> pb.WriteReply:
        engine = self._engine
        arena = engine.arenas.find(session.id)
        if arena is None:
            raise InvalidArgument(
                "the session has no arena", field="arena", value="none", allowed="an OpenArena before"
            )
        # For all of the call: there are turns for others in it, and the session may end.
        engine.arenas.borrow(arena)
        try:
            return await self._written(request, arena, engine.uploads.get(request.reservation_id, session.id))
        finally:
            engine.arenas.give_back(arena)

    async def _written(self, request: pb.WriteArenaRequest, arena: Arena, upload: Upload) -> pb.WriteReply:
        engine = self._engine
        await _check_places(request, arena.bytes)
        pieces: dict[int, Piece] = {}
        taken = 0
        left: list[Incoming] = []
        job: Future[None] | None = None
        try:
            async for part in in_parts(range(len(request.items))):
                for number in part:
                    item = request.items[number]
                    incoming = engine.uploads.start(upload, item.item, item.length, encode.take_checks(item))
                    left.append(incoming)
                    taken += incoming.length
                    pieces[item.item] = incoming, request.offset[number], upload.slices(item.item)
            if taken <= FRAME_BYTES and len(pieces) <= ITEMS_AT_ONCE:
                _copy(arena, pieces.values())
            else:
                job = self._copying(arena, list(pieces.values()))
                await asyncio.wrap_future(job)
            engine.uploads.finish(upload, {index: piece[0] for index, piece in pieces.items()})
            left = []
        finally:
            self._after(job, partial(engine.uploads.drop, upload, left))
        engine.counts["arena_written_bytes_total"] += taken
        return pb.WriteReply(items=len(pieces), bytes=taken)

    def _copying(self, arena: Arena, pieces: list[Piece]) -> Future[None]:
        """All of them are copied out of the arena and summed up when it is over."""
        arenas = self._engine.arenas
        job = self._engine.threads.submit(_copy, arena, pieces)
        arenas.borrow(arena)
        self._after(job, partial(arenas.give_back, arena))
        # One that is cancelled before its turn stays in the queue until then, without what it was to fill.
        self._after(job, pieces.clear)
        return job

    def _after(self, job: Future[None] | None, call: Callable[[], object]) -> None:
        """At once where there is no job, else when it is over: not when a call ends, which may be cancelled, since a thread that
        has begun cannot be stopped."""
        if job is None or job.done():
            call()
            return
        loop = asyncio.get_running_loop()
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(call))


def _copy(arena: Arena, pieces: Iterable[Piece]) -> None:
    """DamagedBytes where what was copied does not have its checksum."""
    for incoming, offset, slices in pieces:
        incoming.fill(_from(arena, offset), slices)
        incoming.check()


def _from(arena: Arena, offset: int) -> Callable[[memoryview], None]:
    return lambda target: arena.copy(offset, target)


async def _check_places(request: pb.WriteArenaRequest, size: int) -> None:
    """InvalidArgument unless each item lies within an arena of `size` bytes, and is named once."""
    if len(request.offset) != len(request.items):
        raise InvalidArgument(
            "each item lies somewhere",
            field="offset",
            value=f"{len(request.offset)} offsets",
            allowed=f"{len(request.items)}, one for each item",
        )
    seen: set[int] = set()

    def check(number: int, item: pb.WriteItem) -> None:
        offset = request.offset[number]
        if item.length > size or offset > size - item.length:
            raise InvalidArgument(
                f"items[{number}] does not lie in the arena",
                field=f"offset[{number}]",
                value=f"{offset} with {item.length} bytes",
                allowed=f"within {size} bytes",
            )
        if item.item in seen:
            raise InvalidArgument(
                "the item is named twice", field="items.item", value=item.item, allowed="each item once"
            )
        seen.add(item.item)

    await mapped(check, request.items)
