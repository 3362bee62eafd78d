"""How the bytes of a reservation get to the service: through the session's arena where there is one, or by Write."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvstore.errors import MemoryUnavailable
from kvstore.pages import SharedPages, copy_memory
from kvstore.types import BytesLike
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arena import ARENA_WRITE_BYTES_MIN, Arena, Room
from kvstore_client.dock import Dock
from kvstore_client.landing import lend
from kvstore_client.link import Begun, Connection, Link
from kvstore_client.write_messages import Items, size_of, write_frames, write_item, write_seconds

ROUND_BYTES = 16 << 20
ROUNDS = 2
"""Of one writer in the arena at once: one is filled while the service copies the other."""


@dataclass(slots=True)
class _Round:
    call: Begun
    rooms: list[Room]


class Bytes:
    """Moves the items of one reservation. One thread at a time."""

    def __init__(self, link: Link, connection: Connection, reservation_id: int) -> None:
        self._link = link
        self._connection = connection
        self._id = reservation_id
        self._lent: dict[int, Room] = {}
        self._own: dict[int, memoryview] = {}
        """Buffers for which the arena had no room."""

    def buffer(self, index: int, length: int) -> memoryview:
        """Memory for an item of so many bytes; the same again until it has been written."""
        if (own := self._own.get(index)) is not None:
            return own
        room = self._lent.get(index)
        if room is None:
            arena = self._arena()
            room = arena.take(length) if arena is not None and length else None
            if room is None:
                return self._own.setdefault(index, memoryview(bytearray(length)))
            self._lent[index] = room
        return room.view

    def write(self, payloads: Mapping[int, BytesLike], dock: Dock | None = None) -> None:
        """All of them have arrived, or it raises."""
        items = sorted(payloads.items(), key=lambda pair: pair[0])
        places = self._places(items, dock)
        in_place = [(index, payload) for index, payload in items if self._is_lent(index, payload)]
        others = [
            (index, payload)
            for index, payload in items
            if index not in places and not self._is_lent(index, payload)
        ]
        arena = self._arena() if size_of(others) >= ARENA_WRITE_BYTES_MIN else None
        rounds: deque[_Round] = deque()
        try:
            for part in _parts([item for item in items if item[0] in places], ROUND_BYTES):
                self._end_down_to(ROUNDS - 1, rounds)
                rounds.append(self._begin_in_dock(part, places))
            for lent in _parts(in_place, ROUND_BYTES):
                self._end_down_to(ROUNDS - 1, rounds)
                rounds.append(self._begin_in_place(lent))
            for part in [others] if arena is None else _parts(others, min(ROUND_BYTES, arena.bytes)):
                if arena is None or not self._begin_copied(arena, part, rounds):
                    self._send(part)
            self._end_down_to(0, rounds)
        finally:
            # What failed has failed as a whole.
            for each in rounds:
                each.call.cancel()
                _give_back(each.rooms)
        for index in payloads:
            self._own.pop(index, None)

    def close(self) -> None:
        """What was lent and not written goes back."""
        _give_back(self._lent.values())
        self._lent.clear()
        self._own.clear()

    # ---- inside ---------------------------------------------------------------------------------------------

    def _is_lent(self, index: int, payload: BytesLike) -> bool:
        room = self._lent.get(index)
        return room is not None and room.view is payload

    def _arena(self) -> Arena | None:
        memory = self._connection.session.memory
        return None if memory is None else memory.arena.get(self._ask)

    def _ask(self, size: int) -> SharedPages | None:
        reply = self._link.call(
            self._connection,
            "OpenArena",
            pb.OpenArenaRequest(bytes=size),
            timeout=self._link.deadlines.control,
        )
        memory = self._connection.session.memory
        assert memory is not None, "an arena comes over a connection that passes memory"
        return memory.find_arena(reply.arena)

    def _begin_in_place(self, items: Items) -> _Round:
        """Of what its writer has put where it is to lie."""
        request = pb.WriteArenaRequest(reservation_id=self._id)
        rooms = [self._lent[index] for index, _ in items]
        for (index, _), room in zip(items, rooms, strict=True):
            request.items.append(write_item(index, room.view))
            request.offset.append(room.begin)
        begun = self._begin(request, rooms)
        for index, _ in items:
            del self._lent[index]
        return begun

    def _places(self, items: Items, dock: Dock | None) -> dict[int, int]:
        """Of those items that lie in the dock: where; none of them where the service has it not."""
        memory = self._connection.session.memory
        if memory is None or dock is None:
            return {}
        found = {
            index: dock.place_of(payload)
            for index, payload in items
            if isinstance(payload, (memoryview, bytearray)) and memoryview(payload).nbytes
        }
        places = {index: place for index, place in found.items() if place is not None}
        if not places:
            return {}
        lock = memory.dock.lock_of(dock, lambda each, byte: lend(self._link, self._connection, each, byte))
        return {} if lock is None else places

    def _begin_in_dock(self, items: Items, places: Mapping[int, int]) -> _Round:
        """Of what the service takes from where it lies. Should it be late, it reads what does not have its checksum any more."""
        request = pb.WriteDockRequest(
            reservation_id=self._id,
            items=[write_item(index, payload) for index, payload in items],
            offset=[places[index] for index, _ in items],
        )
        return self._begin(request, [])

    def _begin_copied(self, arena: Arena, items: Items, rounds: deque[_Round]) -> bool:
        """Copy items to the arena and begin their call. False where it has no room for them though none is waiting there
        for this writer: others have it, and are not waited for."""
        size = size_of(items)
        self._end_down_to(ROUNDS - 1, rounds)
        while (room := arena.take(size) if size else None) is None:
            if not rounds:
                return False
            self._end(rounds)
        request = pb.WriteArenaRequest(reservation_id=self._id)
        at = 0
        try:
            for index, payload in items:
                view = memoryview(payload).cast("B")
                with room.view[at : at + len(view)] as copy:
                    if len(view):
                        copy_memory(view, copy)
                    request.items.append(write_item(index, copy))
                request.offset.append(room.begin + at)
                at += len(view)
            rounds.append(self._begin(request, [room]))
        except BaseException:
            room.give_back()
            raise
        return True

    def _begin(self, request: pb.WriteArenaRequest | pb.WriteDockRequest, rooms: list[Room]) -> _Round:
        size = sum(item.length for item in request.items)
        name = "WriteDock" if isinstance(request, pb.WriteDockRequest) else "WriteArena"
        call = self._link.begin(
            self._connection, name, request, timeout=write_seconds(self._link.deadlines, size)
        )
        return _Round(call, rooms)

    def _end_down_to(self, count: int, rounds: deque[_Round]) -> None:
        while len(rounds) > count:
            self._end(rounds)

    def _end(self, rounds: deque[_Round]) -> None:
        """The first of them has been taken."""
        first = rounds[0]
        try:
            first.call.result()
        except MemoryUnavailable:
            # Only a dock is lost in the middle: its file has shrunk, say. Other ways are there for the next ones.
            if self._connection.session.memory is not None:
                self._connection.session.memory.dock.refuse()
            raise
        rounds.popleft()
        _give_back(first.rooms)

    def _send(self, items: Items) -> None:
        if items:
            frames = write_frames(self._id, items)
            self._link.call(
                self._connection, "Write", frames, timeout=write_seconds(self._link.deadlines, size_of(items))
            )


def _give_back(rooms: Iterable[Room]) -> None:
    for room in rooms:
        room.give_back()


def _parts(items: Items, limit: int) -> Iterator[Items]:
    """Neighbours of up to `limit` bytes together; what is larger goes alone."""
    part: list[tuple[int, BytesLike]] = []
    size = 0
    for index, payload in items:
        length = memoryview(payload).nbytes
        if part and size + length > limit:
            yield part
            part, size = [], 0
        part.append((index, payload))
        size += length
    if part:
        yield part
