"""One fetch of whole items, over as many streams as it takes. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.v1 import cache_pb2 as pb
from kvstore_client.reading import ItemReader
from kvstore_client.values import FetchedItem
from kvstore_client.wanted import Whole

RESUMPTIONS_MAX = 3
"""Of one fetch: a way that breaks more often is no way."""


class Fetching:
    """What has come, and what is still to be asked for.

    Feed the frames of a stream; where it breaks off, `go_on` and ask with `request` again: bytes of the item under way are
    kept, if what comes has the checksums that were promised with them.
    """

    def __init__(self, lease_id: int, wanted: Whole, *, verify: bool) -> None:
        self._lease_id = lease_id
        self._wanted = wanted
        self._reader = ItemReader(wanted, verify=verify)
        self._resumptions = 0

    def request(self) -> pb.FetchRequest:
        """For what has not come yet. The state's items are asked for all or none."""
        seen, wanted = self._reader.seen, self._wanted
        came = min(seen, wanted.block_count)
        return pb.FetchRequest(
            lease_id=self._lease_id,
            first_block=wanted.first_block + came if wanted.block_count > came else 0,
            block_count=wanted.block_count - came,
            state=bool(wanted.state),
            offset=self._reader.held_bytes,
        )

    def feed(self, frame: pb.ItemFrame) -> Iterator[FetchedItem]:
        """Items that end in this frame. DamagedBytes where they are not the wanted ones in their order, or bytes do not have
        their checksum; what was yielded before is good."""
        for place, payload, lineage in self._reader.feed(frame):
            yield FetchedItem(kind=place.kind, index=place.index, payload=payload, lineage=lineage)

    def finish(self) -> None:
        """DamagedBytes unless all items have come."""
        self._reader.finish()

    @property
    def may_go_on(self) -> bool:
        """Whether there is more to come and a resumption left."""
        return self._resumptions < RESUMPTIONS_MAX and not self._reader.is_complete

    def go_on(self, *, anew: bool) -> None:
        """Prepare for the rest after a stream has ended early; with `anew`, the item under way from its beginning."""
        self._resumptions += 1
        state_items_seen = self._reader.seen - self._wanted.block_count
        if state_items_seen > 0:
            # Its first items come once more.
            self._reader.go_on(keep=False, skip=state_items_seen)
        else:
            self._reader.go_on(keep=not anew)
