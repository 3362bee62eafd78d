"""The arena calls: memory of a session's own, and items that lie in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

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
"""An item, where its bytes lie in the source, and where they may be cut."""


class Source(Protocol):
    """Memory of a session's own: its arena, or its dock. What lies there may change at any moment."""

    @property
    def bytes(self) -> int: ...

    def copy(self, offset: int, target: memoryview) -> None:
        """`len(target)` bytes from there, all within it. Any thread."""


S = TypeVar("S", bound=Source)
S_contra = TypeVar("S_contra", bound=Source, contravariant=True)


class Borrowed(Protocol[S_contra]):
    """The sources of all sessions: one stays until it is given back as often as it was borrowed."""

    def borrow(self, source: S_contra, /) -> None: ...
    def give_back(self, source: S_contra, /) -> None: ...


class ArenaCalls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._items = ItemsInMemory(engine)
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
        reply = await self._items.write(request, session, arena, engine.arenas, is_quick=True)
        engine.counts["arena_written_bytes_total"] += reply.bytes
        return reply


class ItemsInMemory:
    """Items of a reservation whose bytes lie in memory of their session's own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def write(
        self,
        request: pb.WriteArenaRequest | pb.WriteDockRequest,
        session: Session,
        source: S,
        sources: Borrowed[S],
        *,
        is_quick: bool,
    ) -> pb.WriteReply:
        """Copy them and look at the copies. `is_quick`: copying keeps nobody waiting, so that little of it is done at once."""
        # For all of the call: there are turns for others in it, and the session may end.
        sources.borrow(source)
        try:
            upload = self._engine.uploads.get(request.reservation_id, session.id)
            return await self._written(request, source, sources, upload, is_quick=is_quick)
        finally:
            sources.give_back(source)

    async def _written(
        self,
        request: pb.WriteArenaRequest | pb.WriteDockRequest,
        source: S,
        sources: Borrowed[S],
        upload: Upload,
        *,
        is_quick: bool,
    ) -> pb.WriteReply:
        engine = self._engine
        await _check_places(request, source.bytes)
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
            if is_quick and taken <= FRAME_BYTES and len(pieces) <= ITEMS_AT_ONCE:
                _copy(source, pieces.values())
            else:
                job = self._copying(source, sources, list(pieces.values()))
                await asyncio.wrap_future(job)
            engine.uploads.finish(upload, {index: piece[0] for index, piece in pieces.items()})
            left = []
        finally:
            self._after(job, partial(engine.uploads.drop, upload, left))
        return pb.WriteReply(items=len(pieces), bytes=taken)

    def _copying(self, source: S, sources: Borrowed[S], pieces: list[Piece]) -> Future[None]:
        """All of them are copied out of the source and summed up when it is over."""
        sources.borrow(source)
        job = self._engine.threads.submit(_copy, source, pieces)
        self._after(job, partial(sources.give_back, source))
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


def _copy(source: Source, pieces: Iterable[Piece]) -> None:
    """DamagedBytes where what was copied does not have its checksum."""
    for incoming, offset, slices in pieces:
        incoming.fill(_from(source, offset), slices)
        incoming.check()


def _from(source: Source, offset: int) -> Callable[[memoryview], None]:
    return lambda target: source.copy(offset, target)


async def _check_places(request: pb.WriteArenaRequest | pb.WriteDockRequest, size: int) -> None:
    """InvalidArgument unless each item lies within the source's `size` bytes, and is named once."""
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
                f"items[{number}] does not lie in the session's memory",
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
