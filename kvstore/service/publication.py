"""A commit's way to the writer and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvstore.core import CommitReport, Granted
from kvstore.service.turns import in_parts
from kvstore.service.uploads import Upload
from kvstore.store.base import Place, Record


class Publication:
    """A Publisher of one upload. `publish` is told at which places of the log its items lie, by their place in the Reserve
    call; what did not become durable is left out."""

    def __init__(
        self,
        upload: Upload,
        publish: Callable[[Upload, dict[int, Place]], Awaitable[CommitReport]],
        *,
        is_void: Callable[[int], bool] = lambda reservation_id: False,
    ) -> None:
        """`is_void`: whether nothing of the reservation may become visible any more, since its namespace was cleared."""
        self._upload = upload
        self._is_void = is_void
        self._publish = publish
        self._granted: list[Granted] = []

    async def records(self) -> list[Record]:
        if self._is_void(self._upload.reservation_id):
            # It would be on the disk for nobody, and behind what has cleared it.
            return []
        pairs: list[tuple[Granted, Record]] = []
        async for part in in_parts(list(self._upload.granted)):
            pairs += self._upload.records(part)
        self._granted = [granted for granted, _ in pairs]
        return [record for _, record in pairs]

    async def publish(self, places: Sequence[Place | None]) -> CommitReport:
        return await self._publish(
            self._upload,
            {
                each.index: place
                for each, place in zip(self._granted, places, strict=True)
                if place is not None
            },
        )
