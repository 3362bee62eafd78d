"""States at any position, given from one worker to another under a ticket."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field

from kvstore.types import Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.handoff_frames import HandoffContent, HandoffReader
from kvstore_client.link import Connection, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTake:
    """A handoff that was taken, verified. It goes back for another taker unless it is confirmed in time."""

    payload: bytes
    position: int
    note: bytes
    lineage: Lineage
    take_id: int
    _link: Link = field(repr=False)
    _connection: Connection = field(repr=False)

    def confirm(self) -> bool:
        """The state is in use: the take is spent. Whether it was still out; False too after the service has gone."""
        request = pb.ConfirmHandoffRequest(take_id=self.take_id)
        reply = self._link.hint(self._connection, "ConfirmHandoff", request)
        return reply is not None and bool(reply.was_out)


def read_handoff(frames: Generator[pb.HandoffFrame, None, None]) -> HandoffContent:
    """DamagedBytes as HandoffReader. `frames` is closed at the end."""
    reader = HandoffReader()
    with closing(frames):
        for frame in frames:
            reader.feed(frame)
    return reader.finish()
