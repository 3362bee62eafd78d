"""One worker as a gateway sees it: what it says it is, its events, and how a call to it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc

from kvstore.errors import ConfigError
from kvstore.service.status import ERROR_METADATA, MAX_MESSAGE_CHARS
from kvstore.v1 import worker_pb2 as pb
from kvstore.v1 import worker_pb2_grpc
from kvstore_workers.runtime.caller import Caller

TAKEN_METADATA = "kvstore-taken"
"""A worker's first word, before any event: it has taken the request. One that dies before did nothing for it."""

DESCRIBE_SECONDS = 2.0

TAKEN_SECONDS = 2.0
"""How long a worker may take to say that it has taken a request: it says so at once, unless it hangs."""

WATCH_SECONDS = 60.0
"""How long a worker that is not there is looked out for, until a request tries it again."""


class Ending(Enum):
    """Why a worker did not do a request that another one may do."""

    BUSY = "busy"
    DRAINING = "shutting down"
    ABSENT = "not there"
    WRONG = "not what it should be"
    LOST = "went away"
    """After it had taken the request: the only one that may be the request's own doing."""


class WorkerAway(Exception):
    """The call ended without the worker's having refused it for good."""

    def __init__(self, ending: Ending, words: str) -> None:
        super().__init__(f"{ending.value}: {words}")
        self.ending = ending


@dataclass(frozen=True, slots=True)
class Described:
    """What a worker said of itself. `model`: equal for workers that can go on from each other's tokens. `name`: of the
    model, for people."""

    model: tuple[bytes, str]
    name: str


class Peer:
    """A worker with `role` at `address`. Raises WorkerAway where another one may be asked instead, and grpc.RpcError with
    the worker's own refusal where that would be of no use."""

    def __init__(self, role: str, address: str, channel: grpc.Channel) -> None:
        self.role = role
        self.address = address
        stub = (
            worker_pb2_grpc.PrefillStub(channel) if role == "prefill" else worker_pb2_grpc.DecodeStub(channel)
        )
        self._run: Callable[..., Any] = stub.Run
        worker = worker_pb2_grpc.WorkerStub(channel)
        self._describe: Callable[..., Any] = worker.Describe.future
        self._discard: Callable[..., Any] = worker.Discard.future
        self._described: Described | None = None

    def __str__(self) -> str:
        return f"{self.role} worker {self.address}"

    def described(self, caller: Caller) -> Described:
        """What it is, asked at the first contact and again after it was away. ConfigError when it is something else than
        a worker with our role."""
        if self._described is None:
            said = self._ask_what_it_is(caller)
            if said.role != self.role:
                raise self._not_ours(f"a {said.role} worker")
            self._described = Described(
                (said.profile.geometry, said.weights_revision),
                f"{said.profile.name} with weights {said.weights_revision}",
            )
        return self._described

    def _ask_what_it_is(self, caller: Caller) -> pb.WorkerDescription:
        with self._minding():
            call = self._describe(pb.DescribeRequest(), timeout=caller.seconds_left(DESCRIBE_SECONDS))
            try:
                with caller.holding(call):
                    said: pb.WorkerDescription = call.result()
                    return said
            except grpc.RpcError as error:
                code = _call(error).code()
                if code is grpc.StatusCode.UNIMPLEMENTED:
                    raise self._not_ours("no worker at all") from error
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise WorkerAway(Ending.ABSENT, words(error)) from error
                raise

    def _not_ours(self, what: str) -> ConfigError:
        return ConfigError(
            f"not a {self.role} worker",
            field=f"--{self.role}",
            value=f"{self.address}, {what}",
            allowed=f"addresses of {self.role} workers",
        )

    def events(
        self, request: pb.GenerateRequest | pb.DecodeRequest, caller: Caller
    ) -> Generator[pb.GenerateEvent, None, None]:
        """The events of `request`; ends early, as Stopped, when the caller goes."""
        with self._minding():
            call = self._run(request, timeout=caller.seconds_left())
            with caller.holding(call):
                # A worker says at once that it has taken a request, or why not; one that says nothing hangs.
                late = threading.Timer(TAKEN_SECONDS, call.cancel)
                late.daemon = True
                late.start()
                try:
                    call.initial_metadata()
                finally:
                    late.cancel()
                yield from call

    def discard(self, ticket: bytes) -> None:
        """Tell a worker that nobody will take this handoff. Nobody waits for the answer: the handoff ends by itself too."""
        call = self._discard(pb.DiscardRequest(ticket=ticket), timeout=DESCRIBE_SECONDS)
        # gRPC cancels a call that nobody refers to; a callback refers to its call until it has ended.
        call.add_done_callback(lambda _: None)

    def when_there(self, tell: Callable[[bool], None]) -> None:
        """Call `tell` once, from another thread: with True when the worker answers and is not shutting down, with False
        when it does so or none has answered within WATCH_SECONDS."""

        def answered(call: Any) -> None:
            tell(call.code() is grpc.StatusCode.OK and not call.result().draining)

        # Waits in the channel until someone listens, and makes it look again and again.
        call = self._describe(pb.DescribeRequest(), timeout=WATCH_SECONDS, wait_for_ready=True)
        call.add_done_callback(answered)

    @contextmanager
    def _minding(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            ending = _ending(error)
            if ending is None:
                raise
            if ending in (Ending.ABSENT, Ending.LOST):
                self._described = None
            raise WorkerAway(ending, words(error)) from error


def _call(error: grpc.RpcError) -> grpc.Call:
    assert isinstance(error, grpc.Call), "every RpcError of a call is also a Call"
    return error


def _ending(error: grpc.RpcError) -> Ending | None:
    """None: the worker has refused by name, and would refuse again.

    CANCELLED is a worker's too, since a call that our own caller gave up ends as Stopped.
    """
    call = _call(error)
    taken = any(key == TAKEN_METADATA for key, _ in call.initial_metadata() or ())
    name = error_name(error)
    code = call.code()
    if not taken and name == "LIMIT_EXCEEDED":
        return Ending.BUSY
    if not taken and name == "DRAINING":
        return Ending.DRAINING
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Ending.LOST if taken else Ending.ABSENT
    return None


def error_name(error: grpc.RpcError) -> str | None:
    """The name, from kvstore.errors, under which a server of ours refused; None for gRPC's own errors."""
    metadata = _call(error).trailing_metadata() or ()
    return next((str(value) for key, value in metadata if key == ERROR_METADATA), None)


def words(error: grpc.RpcError) -> str:
    call = _call(error)
    return f"{call.code().name}: {call.details()}"[:MAX_MESSAGE_CHARS]
