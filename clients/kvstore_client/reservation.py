"""The writer's side: items that are claimed, written, and then made visible together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from kvstore.errors import (
    InvalidArgument,
    KvstoreError,
    UnknownReservation,
)
from kvstore.types import BytesLike, Durability
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.dock import Dock
from kvstore_client.link import Connection, Link
from kvstore_client.link_base import ConnectionBase
from kvstore_client.values import Committed, ReserveItem, ReserveOutcome
from kvstore_client.writing import Bytes


class Claim:
    """What the service has answered to a reserve call, and what may still be done with it. Nothing here waits."""

    def __init__(
        self, connection: ConnectionBase, items: Sequence[ReserveItem], reply: pb.ReserveReply
    ) -> None:
        self.id: int = reply.reservation_id
        self.seconds: float = reply.reservation_seconds
        self.outcomes = _outcomes(reply, len(items))
        self.owner_age_seconds: tuple[float, ...] = tuple(reply.owner_age_seconds)
        self.granted = tuple(
            i for i, outcome in enumerate(self.outcomes) if outcome is ReserveOutcome.GRANTED
        )
        self._lengths = {index: items[index].length for index in self.granted}
        self._session = connection
        self._ended = self.id == 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id}, granted={len(self.granted)} of {len(self.outcomes)}, ended={self._ended})"

    def _check_granted(self, index: int) -> None:
        if index not in self._lengths:
            raise InvalidArgument(
                "the item was not granted", field="item", value=index, allowed=f"one of {list(self.granted)}"
            )

    def _check_payload(self, index: int, payload: BytesLike) -> None:
        self._check_granted(index)
        length = len(memoryview(payload).cast("B"))
        if length != self._lengths[index]:
            raise InvalidArgument(
                "the payload is not as long as was reserved",
                field=f"payloads[{index}]",
                value=length,
                allowed=f"{self._lengths[index]} bytes",
            )

    def _check_open(self) -> None:
        if self._ended:
            raise UnknownReservation(
                "the reservation has ended", field="reservation_id", value=self.id, allowed="a new one"
            )
        if not self._session.usable():
            raise UnknownReservation(
                "the reservation ended with its session; the service has ended it or started again",
                field="reservation_id",
                value=self.id,
                allowed="a new one",
            )


class Reservation(Claim):
    """One answer per reserved item, in their order; what was GRANTED may be written. Use it from one thread at a time.

    Invisible until commit. Leaving the context without a commit gives everything back; so do the session's end and the
    deadline `seconds` after the call.
    """

    def __init__(
        self, link: Link, connection: Connection, items: Sequence[ReserveItem], reply: pb.ReserveReply
    ) -> None:
        super().__init__(connection, items, reply)
        self._link = link
        self._connection = connection
        self._bytes = Bytes(link, connection, self.id)

    def buffer(self, index: int) -> memoryview:
        """Memory for the bytes of a granted item, by its place in the reserve call: where the service takes them from, as
        long as there is room for them, and else of this process. What it holds is undefined. `write({index: buffer})` sends
        it as it lies there; afterwards, and after commit and abort, it is not to be used, and mostly cannot be."""
        self._check_granted(index)
        self._check_open()
        return self._bytes.buffer(index, self._lengths[index])

    def write(self, payloads: Mapping[int, BytesLike], *, dock: Dock | None = None) -> None:
        """Hand over the bytes of granted items, by their place in the reserve call. May be called again for others. What lies in
        `dock` the service takes from there, where it has it; the rest goes through shared memory where the service gives some, and
        else through the socket."""
        for index, payload in payloads.items():
            self._check_payload(index, payload)
        if not payloads:
            return
        self._check_open()
        self._bytes.write(payloads, dock)

    def commit(self, durability: Durability = Durability.DURABLE) -> Committed:
        """Make what was written durable with its ancestors, and then visible; what was not written is given back. ACCEPTED: return
        when it is visible, and before it is durable; where the service has no room for that, when it is durable. What was accepted is
        lost by a crash, or by a write that fails, before it is durable, and is a miss then.

        With nothing granted there is nothing to do. After Unavailable nobody knows whether the items are stored: they
        may be found later, whole and right, or not at all.
        """
        if self.id == 0:
            return Committed(0, 0)
        self._check_open()
        reply = self._link.call(
            self._connection,
            "Commit",
            commit_request(self.id, durability),
            timeout=self._link.deadlines.commit,
        )
        self._ended = True
        self._bytes.close()
        return committed(reply)

    def abort(self) -> bool:
        """Whether the reservation was still open. Aborting again, or after the service has gone, does nothing."""
        if self._ended:
            return False
        self._ended = True
        self._bytes.close()
        reply = self._link.hint(self._connection, "Abort", pb.AbortRequest(reservation_id=self.id))
        return reply is not None and bool(reply.was_open)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


def commit_request(reservation_id: int, durability: Durability) -> pb.CommitRequest:
    return pb.CommitRequest(
        reservation_id=reservation_id,
        durability=pb.ACCEPTED if durability is Durability.ACCEPTED else pb.DURABLE,
    )


def committed(reply: pb.CommitReply) -> Committed:
    # A service that does not say so knows nothing else.
    is_accepted = reply.durability == pb.ACCEPTED
    return Committed(
        reply.items,
        reply.bytes,
        tuple(reply.left_out),
        Durability.ACCEPTED if is_accepted else Durability.DURABLE,
    )


def _outcomes(reply: pb.ReserveReply, asked: int) -> tuple[ReserveOutcome, ...]:
    known = {int(outcome) for outcome in ReserveOutcome}
    if len(reply.outcomes) != asked or not known.issuperset(reply.outcomes):
        raise KvstoreError(
            "the service's answer to Reserve is not understood",
            field="outcomes",
            value=list(reply.outcomes),
            allowed=f"{asked} outcomes, one per item",
        )
    return tuple(ReserveOutcome(outcome) for outcome in reply.outcomes)
