"""A handoff as the frames of a stream, in both directions. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

from kvstore.errors import DamagedBytes
from kvstore.types import BytesLike, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import crc32
from kvstore_client.framing import ITEM_BYTES_MAX, cut_frames


def handoff_frames(header: pb.HandoffHeader, payload: BytesLike) -> Iterator[pb.HandoffFrame]:
    first: pb.HandoffHeader | None = header
    for _, data in cut_frames([(header, payload)]):
        yield pb.HandoffFrame(header=first, data=data)
        first = None


class HandoffContent(TypedDict):
    """What a take brings, verified."""

    payload: bytes
    position: int
    note: bytes
    lineage: Lineage
    take_id: int


class HandoffReader:
    """Feed the frames in order, then `finish`; DamagedBytes where they do not belong together."""

    def __init__(self) -> None:
        self._header: pb.HandoffHeader | None = None
        self._chunks: list[bytes] = []
        self._got = 0

    def feed(self, frame: pb.HandoffFrame) -> None:
        if self._header is None:
            self._header = _first_header(frame)
        elif frame.HasField("header"):
            raise DamagedBytes("a handoff has a second header", field="header", value="second")
        self._chunks.append(frame.data)
        self._got += len(frame.data)
        if self._got > self._header.length:
            raise DamagedBytes(
                "a handoff has too many bytes",
                field="bytes",
                value=self._got,
                allowed=f"{self._header.length}",
            )

    def finish(self) -> HandoffContent:
        header = self._header
        if header is None:
            raise DamagedBytes("a handoff without frames came", field="frames", value=0, allowed="1 or more")
        payload = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        if self._got != header.length:
            raise DamagedBytes(
                "the stream of a handoff ended early",
                field="bytes",
                value=self._got,
                allowed=f"{header.length}",
            )
        if crc32(payload) != header.crc32:
            raise DamagedBytes("a handoff does not have its checksum", field="crc32", value=header.crc32)
        if header.lineage not in (pb.LINEAGE_EXACT, pb.LINEAGE_BOUNDED):
            raise DamagedBytes(
                "a handoff has no lineage", field="lineage", value=header.lineage, allowed="EXACT or BOUNDED"
            )
        return HandoffContent(
            payload=payload,
            position=header.position,
            note=header.note,
            lineage=Lineage(header.lineage),
            take_id=header.take_id,
        )


def _first_header(frame: pb.HandoffFrame) -> pb.HandoffHeader:
    if not frame.HasField("header"):
        raise DamagedBytes("the first frame of a handoff has no header", field="header", value="none")
    if frame.header.length > ITEM_BYTES_MAX:
        raise DamagedBytes(
            "a handoff is too long",
            field="length",
            value=frame.header.length,
            allowed=f"{ITEM_BYTES_MAX} bytes",
        )
    return frame.header
