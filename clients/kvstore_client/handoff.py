"""States at any position, given from one worker to another under a ticket."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from kvstore.errors import DamagedBytes
from kvstore.types import BytesLike, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import crc32
from kvstore_client.framing import ITEM_BYTES_MAX, cut_frames
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


def handoff_frames(header: pb.HandoffHeader, payload: BytesLike) -> Iterator[pb.HandoffFrame]:
    first: pb.HandoffHeader | None = header
    for _, data in cut_frames([(header, payload)]):
        yield pb.HandoffFrame(header=first, data=data)
        first = None


def read_handoff(frames: Generator[pb.HandoffFrame, None, None]) -> tuple[pb.HandoffHeader, bytes]:
    """The header and the payload; DamagedBytes where they do not belong together. `frames` is closed at the end."""
    header: pb.HandoffHeader | None = None
    chunks: list[bytes] = []
    got = 0
    with closing(frames):
        for frame in frames:
            if header is None:
                if not frame.HasField("header"):
                    raise DamagedBytes(
                        "the first frame of a handoff has no header", field="header", value="none"
                    )
                header = frame.header
                if header.length > ITEM_BYTES_MAX:
                    raise DamagedBytes(
                        "a handoff is too long",
                        field="length",
                        value=header.length,
                        allowed=f"{ITEM_BYTES_MAX} bytes",
                    )
            elif frame.HasField("header"):
                raise DamagedBytes("a handoff has a second header", field="header", value="second")
            chunks.append(frame.data)
            got += len(frame.data)
            if got > header.length:
                raise DamagedBytes(
                    "a handoff has too many bytes", field="bytes", value=got, allowed=f"{header.length}"
                )
    if header is None:
        raise DamagedBytes("a handoff without frames came", field="frames", value=0, allowed="1 or more")
    payload = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if got != header.length:
        raise DamagedBytes(
            "the stream of a handoff ended early", field="bytes", value=got, allowed=f"{header.length}"
        )
    if crc32(payload) != header.crc32:
        raise DamagedBytes("a handoff does not have its checksum", field="crc32", value=header.crc32)
    if header.lineage not in (pb.LINEAGE_EXACT, pb.LINEAGE_BOUNDED):
        raise DamagedBytes(
            "a handoff has no lineage", field="lineage", value=header.lineage, allowed="EXACT or BOUNDED"
        )
    return header, payload
