"""What is visible before it is durable: while it is being written memory that clients map stands for it, into which its bytes
came, or were copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.core import CommitReport, FetchItem, Granted, Written
from kvstore.core.accepted import accepted_place
from kvstore.core.accepting import Settled
from kvstore.memory import Slot
from kvstore.service.frames import Incoming
from kvstore.service.turns import by_turns, in_parts
from kvstore.service.uploads import Upload
from kvstore.store.base import Place
from kvstore.types import Durability, ItemId

if TYPE_CHECKING:
    from kvstore.service.engine import Engine

Pair = tuple[Granted, Incoming]


class Acceptance:
    """Of all uploads. The copies stay until their write is over; then they are like others that were read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: dict[int, list[tuple[Place, Slot]]] = {}
        self._is_failing = False

    def __len__(self) -> int:
        return len(self._kept)

    async def accept(self, upload: Upload) -> CommitReport | None:
        """Its commit is in the writer's queue: show what it has brought. None where not all of that can be seen now: so much waits
        for the disk already, the last write failed, memory has no room for it, or there is something of it. The rest is
        visible when it is durable."""
        engine = self._engine
        if engine.staging.is_crowded(upload.session) or engine.core.is_crowded(upload.session):
            # Who is not answered brings no more: a writer that is faster than the disk waits here, and is not refused.
            return self._none()
        if self._is_failing:
            # Who is answered at once would never be told of a disk that takes nothing.
            return self._none()
        pairs = [(upload.granted[index], upload.arrived[index]) for index in sorted(upload.arrived)]
        on_ssd = [pair for pair in pairs if pair[0].item.to_ssd]
        kept = await self._copied(upload, [pair for pair in on_ssd if pair[1].shown is None])
        if kept is None:
            return self._none()
        if not engine.core.is_open(upload.reservation_id):
            self._let_go(kept)
            return self._none()
        engine.counts["accepted_copied_bytes_total"] += sum(place.length for place, _ in kept)
        kept += self._shown(upload, [pair for pair in on_ssd if pair[1].shown is not None])
        self._kept[upload.reservation_id] = kept
        visible: list[ItemId] = []
        size = 0
        async for part in in_parts(pairs):
            # Others had a turn: its write may be over, and a clear takes no newcomers.
            if engine.registry.is_clearing or not engine.core.is_open(upload.reservation_id):
                return self._none()
            now = engine.time.monotonic()
            shown = engine.core.accept(
                upload.reservation_id,
                upload.session,
                [(granted, _written(granted, incoming)) for granted, incoming in part],
                now_mono=now,
                now_wall=engine.time.wall_at(now),
            )
            engine.flights.published(upload.namespace, shown)
            visible += shown
            size += sum(granted.item.length for granted, _ in part)
        engine.counts["accepted_items_total"] += len(visible)
        if len(visible) < len(pairs):
            return self._none()
        engine.counts["accepted_bytes_total"] += size
        return CommitReport(visible, (), size, durability=Durability.ACCEPTED)

    async def settle(self, upload: Upload, results: Mapping[ItemId, Written]) -> None:
        """Its write is over: what was accepted lies where it says, or is taken back."""
        engine = self._engine
        if len(results) < len(upload.arrived):
            self._is_failing = True
        elif any(written.place is not None for written in results.values()):
            self._is_failing = False

        def settled(step: Settled) -> None:
            engine.reader.moved(step.moved)
            engine.discard(step.gone)

        await by_turns(engine.core.settling(upload.reservation_id, upload.session, results), settled)

    def end(self, reservation_id: int) -> None:
        """Its reservation has ended."""
        self._let_go(self._kept.pop(reservation_id, ()))

    def _none(self) -> CommitReport | None:
        self._engine.counts["accepted_as_durable_total"] += 1
        return None

    def _shown(self, upload: Upload, pairs: Sequence[Pair]) -> list[tuple[Place, Slot]]:
        """Those that lie already where they are to be found. From here on they are ended as the copies are: not before their
        write is over, which is made from there."""
        shown: list[tuple[Place, Slot]] = []
        for granted, incoming in pairs:
            slot, incoming.shown = incoming.shown, None
            assert slot is not None
            place = _place(upload, granted)
            self._engine.reader.show(_item(granted, incoming, place), slot)
            shown.append((place, slot))
        return shown

    async def _copied(self, upload: Upload, pairs: Sequence[Pair]) -> list[tuple[Place, Slot]] | None:
        """Copies of all of them, pinned, at the places at which they are going to be found; None without room."""
        engine = self._engine
        domain = engine.core.namespace(upload.namespace).identity.tenant_salt
        kept: list[tuple[Place, Slot]] = []
        is_whole = False
        try:
            async for part in in_parts(pairs):
                places = [_place(upload, granted) for granted, _ in part]
                items = [
                    _item(granted, incoming, place)
                    for (granted, incoming), place in zip(part, places, strict=True)
                ]
                slots = await engine.reader.kept(items, domain, engine.threads)
                if slots is None:
                    return None
                kept += zip(places, slots, strict=True)
            is_whole = True
            return kept
        finally:
            if not is_whole:
                self._let_go(kept)

    def _let_go(self, kept: Sequence[tuple[Place, Slot]]) -> None:
        memory = self._engine.reader.memory
        if memory is not None and kept:
            # Those that were settled are found by other places now.
            memory.forget(place for place, _ in kept)
            memory.unpin(slot for _, slot in reversed(kept))


def _place(upload: Upload, granted: Granted) -> Place:
    return accepted_place(upload.reservation_id, granted.index, granted.item.length)


def _item(granted: Granted, incoming: Incoming, place: Place) -> FetchItem:
    item = granted.item
    return FetchItem(
        item.item_id,
        item.position,
        item.lineage,
        incoming.checks,
        place,
        incoming.payload(),
    )


def _written(granted: Granted, incoming: Incoming) -> Written:
    return Written(incoming.checks, None, incoming.payload() if granted.item.to_pool else None)
