"""One map over the messages that answer it: what lies in memory, and what Fetch has to bring. No I/O but the session's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from kvstore.errors import DamagedBytes
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.mapped import MappedItem
from kvstore_client.mapping import mapped_items
from kvstore_client.memory import Memory
from kvstore_client.wanted import Whole


@dataclass(frozen=True, slots=True)
class Gap:
    """Numbers [begin, end) of the wanted items, which do not lie in memory."""

    begin: int
    end: int

    def part_of(self, wanted: Whole) -> tuple[Whole, int]:
        """What one Fetch is asked for, and the number of its first item: it brings the state's items all or none."""
        blocks = max(min(self.end, wanted.block_count) - self.begin, 0)
        part = Whole(
            wanted.first_block + self.begin if blocks else 0,
            blocks,
            wanted.state if self.end > wanted.block_count else (),
        )
        return part, min(self.begin, wanted.block_count)


class Mapping:
    """Feed the messages in order, and then ask for the rest."""

    def __init__(self, wanted: Whole, memory: Memory, *, verify: bool) -> None:
        self.wanted = wanted
        self.memory = memory
        self.verify = verify
        self._seen = 0

    def feed(self, reply: pb.MapReply) -> Iterator[Gap | Sequence[MappedItem]]:
        """The message's items in runs of those that are mapped, and the gaps between them. Raises as mapped_items."""
        first = self._seen
        items = mapped_items(reply, self.wanted, first, find=self.memory.find, verify=self.verify)
        self._seen += len(items)
        for begin, end in _runs(items):
            if items[begin] is None:
                yield Gap(first + begin, first + end)
            else:
                yield cast("Sequence[MappedItem]", items[begin:end])

    def rest(self) -> Gap | None:
        """What the messages did not name; DamagedBytes unless the memory was refused."""
        if self._seen == len(self.wanted):
            return None
        if not self.memory.refused:
            raise DamagedBytes(
                "the map ended early", field="items", value=self._seen, allowed=f"{len(self.wanted)} items"
            )
        return Gap(self._seen, len(self.wanted))


def _runs(items: Sequence[MappedItem | None]) -> Iterator[tuple[int, int]]:
    """Where neighbours that are mapped, or that are not, begin and end."""
    begin = 0
    # The rule is one run of all of them, which is found without a step for each.
    while begin < len(items):
        if None not in items:
            end = len(items)
        else:
            mapped = items[begin] is not None
            end = begin + 1
            while end < len(items) and (items[end] is not None) is mapped:
                end += 1
        yield begin, end
        begin = end
