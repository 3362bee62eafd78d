"""Raw stubs against a running service, for tests of the service itself: no client library in between."""

from __future__ import annotations

import hashlib
import json
import socket
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from kvstore.prefix import block_keys
from kvstore.profile.registry import get_profile
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc

FRAME_BYTES = 1 << 20
MESSAGE_BYTES = 64 << 20
EAGER = pb.Costs(seconds_per_layer_token=1.0)
"""Computing is so dear that every plan restores all it can."""


def payload_of(key: bytes, length: int) -> bytes:
    return hashlib.shake_256(key).digest(length)


def error_of(error: grpc.RpcError) -> str:
    """The error's name as the service sent it; empty when it sent none."""
    return dict(error.trailing_metadata() or ()).get("kvstore-error", "")


class Raw:
    """A session and both stubs. `directory` is the service's."""

    def __init__(self, directory: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10.0)
        self.socket.connect(str(directory / "session.sock"))
        with self.socket.makefile("rb") as lines:
            self.hello: dict[str, Any] = json.loads(lines.readline())
        self.channel = grpc.insecure_channel(
            f"unix:{directory / 'kvstore.sock'}",
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.max_send_message_length", MESSAGE_BYTES),
                ("grpc.use_local_subchannel_pool", 1),
            ],
        )
        self.cache = cache_pb2_grpc.CacheStub(self.channel)
        self.admin = cache_pb2_grpc.AdminStub(self.channel)
        self.metadata = (("kvstore-session", str(self.hello.get("session", ""))),)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.channel.close()
        self.socket.close()

    def call(self, name: str, request: Any, *, timeout: float = 20.0) -> Any:
        return getattr(self.cache, name)(request, timeout=timeout, metadata=self.metadata)

    def stats(self) -> dict[str, float]:
        return dict(self.admin.Stats(pb.StatsRequest(), timeout=10).values)

    def open(self, name: str, *, profile: str = "tiny", policy: str = "", **fields: str) -> pb.Namespace:
        geometry = get_profile(profile).geometry()
        return self.call(
            "OpenNamespace",
            pb.OpenNamespaceRequest(
                name=name,
                profile=pb.Profile(name=profile, geometry=geometry),
                policy=policy,
                **{"tenant_salt": name, **fields},
            ),
        )

    # ---- writing --------------------------------------------------------------------------------------------

    def reserve(self, namespace: pb.Namespace, items: Sequence[pb.ReserveItem]) -> pb.ReserveReply:
        return self.call("Reserve", pb.ReserveRequest(namespace=namespace.digest, items=items))

    def write(self, reservation_id: int, payloads: dict[int, bytes]) -> pb.WriteReply:
        return self.call("Write", write_frames(reservation_id, payloads))

    def commit(self, reservation_id: int) -> pb.CommitReply:
        return self.call("Commit", pb.CommitRequest(reservation_id=reservation_id))

    def store_items(self, namespace: pb.Namespace, items: Sequence[pb.ReserveItem]) -> pb.CommitReply:
        """All of them, of which the service must have none."""
        reply = self.reserve(namespace, items)
        assert set(reply.outcomes) == {pb.GRANTED}, reply
        self.write(
            reply.reservation_id, {i: payload_of(item.key, item.length) for i, item in enumerate(items)}
        )
        return self.commit(reply.reservation_id)

    def store(
        self,
        chain: Chain,
        *,
        first: int = 0,
        last: int | None = None,
        states: Sequence[int] = (),
        pool: bool = False,
    ) -> pb.CommitReply:
        """Blocks [first, last) and the states at the ends of the blocks in `states`."""
        items = [chain.block(i) for i in range(first, len(chain.keys) if last is None else last)]
        items += [chain.state(i, pool=pool) for i in states]
        return self.store_items(chain.namespace, items)

    # ---- reading --------------------------------------------------------------------------------------------

    def lookup(
        self, chain: Chain, *, lease: bool = True, prompt_tokens: int | None = None, **changed: Any
    ) -> pb.LookupReply:
        tokens = (
            len(chain.keys) * chain.namespace.block_tokens + 1 if prompt_tokens is None else prompt_tokens
        )
        whole = tokens // chain.namespace.block_tokens
        return self.call(
            "Lookup",
            pb.LookupRequest(
                **{
                    "namespace": chain.namespace.digest,
                    "keys": b"".join(chain.keys[:whole]),
                    "prompt_tokens": tokens,
                    "costs": EAGER,
                    "lease": lease,
                    **changed,
                }
            ),
        )

    def fetch(
        self, lease_id: int, *, first: int = 0, count: int, state: bool = False, timeout: float = 30.0
    ) -> list[tuple[pb.ItemHeader, bytes]]:
        frames = self.cache.Fetch(
            pb.FetchRequest(lease_id=lease_id, first_block=first, block_count=count, state=state),
            timeout=timeout,
            metadata=self.metadata,
        )
        headers: list[pb.ItemHeader] = []
        data = bytearray()
        for frame in frames:
            assert len(frame.data) <= FRAME_BYTES
            headers += frame.items
            data += frame.data
        items, at = [], 0
        for header in headers:
            items.append((header, bytes(data[at : at + header.length])))
            at += header.length
        assert at == len(data), "the stream has as many bytes as its headers say"
        return items


class Chain:
    """The blocks of one token run in a namespace."""

    def __init__(self, namespace: pb.Namespace, blocks: int, *, seed: int) -> None:
        self.namespace = namespace
        tokens = [(seed * 1_000_003 + i * 31) % 65_536 for i in range(blocks * namespace.block_tokens)]
        self.keys = block_keys(namespace.digest, tokens, block_tokens=namespace.block_tokens)

    def block(self, index: int, **changed: Any) -> pb.ReserveItem:
        return pb.ReserveItem(
            **{
                "kind": pb.BLOCK,
                "key": self.keys[index],
                "parent": self.keys[index - 1] if index else self.namespace.digest,
                "position": (index + 1) * self.namespace.block_tokens,
                "length": self.namespace.block_bytes,
                "lineage": pb.LINEAGE_EXACT,
                **changed,
            }
        )

    def state(self, index: int, *, pool: bool = False, ssd: bool = True) -> pb.ReserveItem:
        return pb.ReserveItem(
            kind=pb.STATE,
            key=self.keys[index],
            position=(index + 1) * self.namespace.block_tokens,
            length=self.namespace.state_bytes,
            to_pool=pool,
            to_ssd=ssd,
            lineage=pb.LINEAGE_EXACT,
        )

    def rows(self, index: int, *, overlap: bool = False, **changed: Any) -> pb.ReserveItem:
        """The window rows of block `index`."""
        profile = get_profile(self.namespace.profile.name)
        return pb.ReserveItem(
            **{
                "kind": pb.WINDOW_ROWS,
                "key": self.keys[index],
                "position": (index + 1) * self.namespace.block_tokens,
                "length": profile.rows_overlap_block_bytes if overlap else profile.rows_block_bytes,
                "lineage": pb.LINEAGE_EXACT,
                **changed,
            }
        )

    def is_right(self, header: pb.ItemHeader, data: bytes) -> bool:
        """Whether these are the bytes of the item that the header names, and the header's checksum is theirs."""
        is_state = header.kind == pb.STATE
        index = header.index // self.namespace.block_tokens - 1 if is_state else header.index
        return data == payload_of(self.keys[index], header.length) and header.crc32 == zlib.crc32(data)


def write_frames(reservation_id: int, payloads: dict[int, bytes]) -> Iterator[pb.WriteFrame]:
    """The stream of a Write call: as few frames as the contract allows."""
    items = [pb.WriteItem(item=i, length=len(data), crc32=zlib.crc32(data)) for i, data in payloads.items()]
    stream = b"".join(payloads.values())
    starts, at = [], 0
    for item in items:
        starts.append(at)
        at += item.length
    for begin in range(0, max(len(stream), 1), FRAME_BYTES):
        here = [
            item for item, start in zip(items, starts, strict=True) if begin <= start < begin + FRAME_BYTES
        ]
        yield pb.WriteFrame(
            reservation_id=reservation_id if begin == 0 else 0,
            items=here,
            data=stream[begin : begin + FRAME_BYTES],
        )


def put_handoff(raw: Raw, namespace: pb.Namespace, payload: bytes, **header: Any) -> pb.HandoffTicket:
    fields = {
        "position": 45,
        "crc32": zlib.crc32(payload),
        "lineage": pb.LINEAGE_EXACT,
        "length": len(payload),
        **header,
    }
    first = pb.HandoffHeader(namespace=namespace.digest, **fields)
    parts = [payload[at : at + FRAME_BYTES] for at in range(0, len(payload), FRAME_BYTES)] or [b""]
    frames = (
        pb.HandoffFrame(header=None if number else first, data=part) for number, part in enumerate(parts)
    )
    return raw.call("PutHandoff", frames)


def frame_of(number: int, data: bytes, **item: Any) -> pb.WriteFrame:
    announced = pb.WriteItem(**{"item": 0, "length": 3328, "crc32": zlib.crc32(data), **item})
    return pb.WriteFrame(reservation_id=number, items=[announced], data=data)
