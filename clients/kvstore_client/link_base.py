"""What links have in common that wait in different ways: what follows from an answer or a failure. Nothing here waits."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from kvstore.clock import Clock
from kvstore.errors import InvalidArgument, KvstoreError, Unavailable, UnknownSession
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.cache_pb2_grpc import AdminStub, CacheStub
from kvstore_client.address import Address, RemoteAddress
from kvstore_client.breaker import Breaker, RetryBudget
from kvstore_client.calls import Call
from kvstore_client.failures import broke_off
from kvstore_client.fetching import Fetching
from kvstore_client.memory import Memory
from kvstore_client.reading import StoredAgain
from kvstore_client.values import Deadlines

MESSAGE_BYTES_MAX = 64 << 20
SMALL_BYTES_MAX = 4096
"""Requests up to here share a channel. Dozens of them fit a socket's buffer, and so are never stuck in a write."""
PATIENCE_SECONDS = 0.1
"""How much later than its deadline a large call is given up: its own error says more."""
SESSION_ENTRY = "kvstore-session"
KEEPALIVE_SECONDS = 10.0
KEEPALIVE_TIMEOUT_SECONDS = 5.0
"""A way to another machine that is cut without a word is noticed after both together."""


class SessionLike(Protocol):
    @property
    def number(self) -> str: ...
    @property
    def boot(self) -> str: ...
    @property
    def memory(self) -> Memory | None: ...
    def alive(self) -> bool: ...
    def close(self) -> None: ...


class ConnectionBase:
    """One session and the channels that are used with it. They begin and end together, so that no call can quote a
    session of one service process to another.

    Two channels, since gRPC does not end a call at its deadline while bytes of it are in a write that the socket does
    not take, as when the service is stopped: large requests go their own way, and only they have to be waited for with
    a limit of our own. A channel dials when it is first used.
    """

    def __init__(self, session: SessionLike, address: Address, small: Any, large: Any) -> None:
        self.session = session
        self.metadata = (*address.metadata, (SESSION_ENTRY, session.number))
        self.closed = False
        self.channels = (small, large)
        self._stubs: Mapping[bool, tuple[CacheStub, AdminStub]] = {
            large_way: (CacheStub(channel), AdminStub(channel))
            for large_way, channel in ((False, small), (True, large))
        }

    def method(self, name: str, *, large: bool = False) -> Any:
        """The call of that name in either service of the contract."""
        cache, admin = self._stubs[large]
        return getattr(cache if hasattr(cache, name) else admin, name)

    def usable(self) -> bool:
        return not self.closed and self.session.alive()


class LinkBase:
    """One service's address, whether it could be reached lately, and the process that may ask it."""

    def __init__(self, address: Address, *, owner: str, deadlines: Deadlines, clock: Clock) -> None:
        self.address = address
        self.deadlines = deadlines
        self._clock = clock
        self._options = _options(owner, deadlines, keepalive=isinstance(address, RemoteAddress))
        self._pid = os.getpid()
        self._breaker = Breaker(deadlines.pause_first, deadlines.pause_most)
        self._retries = RetryBudget()
        self._closed = False

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    def goes_on(
        self, connection: ConnectionBase, fetching: Fetching, failure: KvstoreError, left: float
    ) -> bool:
        """Whether a fetch that ended with `failure`, and has `left` seconds, is to be asked for once more, and is prepared for
        that."""
        if left <= 0:
            return False
        anew = isinstance(failure, StoredAgain)
        if not anew and not (broke_off(failure) and connection.usable()):
            return False
        if not (fetching.may_go_on and self._may_retry()):
            return False
        fetching.go_on(anew=anew)
        return True

    def asks_again(
        self, connection: ConnectionBase, call: Call[Any], failure: KvstoreError, left: float
    ) -> bool:
        """Whether a call that ended with `failure`, and has `left` seconds, is to be made once more in its session."""
        broke = call.again and left > 0 and broke_off(failure) and connection.usable()
        return broke and self._may_retry()

    def failure(
        self, connection: ConnectionBase, failure: KvstoreError, *, counts: bool = True
    ) -> KvstoreError:
        """`failure`, with what follows from it for this link. `counts`: whether it says that the service cannot be
        reached."""
        if isinstance(failure, Unavailable) and counts and not connection.closed:
            self._note_failure()
        return failure

    # ---- inside ---------------------------------------------------------------------------------------------

    def _check_boot(self, connection: ConnectionBase, call: Call[Any], reply: Any) -> None:
        if call.names_boot and reply.boot != connection.session.boot:
            raise UnknownSession("the service has started again", field="boot", value=reply.boot)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable(
                "this client is closed", field="client", value="closed", allowed="a new CacheClient"
            )

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            # gRPC's threads and locks do not survive a fork; a call would hang, and waiting is what a miss must not cost.
            raise InvalidArgument(
                "this client was made before a fork; make one in the process that uses it",
                field="pid",
                value=os.getpid(),
                allowed=f"{self._pid}",
            )

    def check_served(self, name: str) -> None:
        if isinstance(self.address, RemoteAddress) and name in _ADMIN and not self.address.admin:
            raise InvalidArgument(
                "administration is not served to other machines with a client's token",
                field="call",
                value=name,
                allowed="with the service's directory as the address, or with a token for administration",
            )

    def _may_retry(self) -> bool:
        left = self._retries.taken()
        self._retries = left or self._retries
        return left is not None

    def _note_failure(self) -> None:
        self._breaker = self._breaker.failed(self.now())

    def _note_success(self) -> None:
        self._retries = self._retries.succeeded()
        if not self._breaker.is_closed:
            self._breaker = self._breaker.succeeded()

    def _refuse_if_open(self) -> None:
        left = self._breaker.seconds_left(self.now())
        if left > 0:
            raise Unavailable(
                "the service could not be reached just now",
                field="address",
                value=self.address,
                allowed=f"calls again in {left * 1000:.0f} ms",
            )

    def _another_looks(self) -> Unavailable:
        return Unavailable("another call is trying to reach the service", field="address", value=self.address)


def too_slow(name: str, timeout: float) -> Unavailable:
    """For a call that gRPC failed to end at its deadline."""
    return Unavailable(
        f"{name} failed: the service does not take the request", field="timeout", value=timeout
    )


def no_session_here(address: Address, timeout: float) -> Unavailable:
    """For a service of this process whose loop is busy."""
    return Unavailable(
        "the service gave no session",
        field="address",
        value=address,
        allowed=f"an answer within {timeout:g} s",
    )


def dropped(name: str) -> Unavailable:
    """For a call on a channel that another one closed."""
    return Unavailable(f"{name} failed: the connection was dropped")


_ADMIN = frozenset(pb.DESCRIPTOR.services_by_name["Admin"].methods_by_name)


def _options(owner: str, deadlines: Deadlines, *, keepalive: bool) -> tuple[tuple[str, int | str], ...]:
    options: tuple[tuple[str, int | str], ...] = (
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.initial_reconnect_backoff_ms", 20),
        ("grpc.max_reconnect_backoff_ms", 100),
        # Also how long gRPC lets one attempt to connect take, so it is not smaller than our own patience.
        ("grpc.min_reconnect_backoff_ms", max(20, int(deadlines.connect * 1000))),
        # A pool shared in the process would hand a new channel the backoff of the one before.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.primary_user_agent", owner),
    )
    if not keepalive:
        return options
    return (
        *options,
        ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
        # The one that counts in newer versions, which wait a minute without it.
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
        # A session says nothing for hours: its pings are all that tells that it lives.
        ("grpc.http2.max_pings_without_data", 0),
    )
