"""The Session call: a session whose connection is a stream, for clients that cannot reach the session socket."""

from __future__ import annotations

import grpc.aio

from kvstore.errors import InvalidArgument, KvstoreError, Unavailable, UnknownSession
from kvstore.service.callers import current_caller
from kvstore.service.engine import Engine
from kvstore.service.session import OLDEST_PROTOCOL, PROTOCOL
from kvstore.service.status import Context
from kvstore.service.waiting import until_end
from kvstore.v1 import cache_pb2 as pb

HELLO_SECONDS = 10.0
"""For a client to take its hello."""


class SessionCalls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def hold(self, context: Context) -> None:
        """Begin a session, and end it with the call, however that ends. Draining, LimitExceeded."""
        engine = self._engine
        engine.check_open()
        sessions = engine.sessions
        session = sessions.begin(0, lambda: sessions.end(session), caller=current_caller())
        hello = pb.SessionHello(
            protocol=OLDEST_PROTOCOL, newest=PROTOCOL, session=session.id, boot=sessions.boot.hex()
        )
        try:
            await until_end(context.write(hello), session=session, seconds=HELLO_SECONDS, late=_late)
            said = await until_end(context.read(), session=session, seconds=None, late=_late)
        except UnknownSession as error:
            raise Unavailable("the service ended the session; it is going") from error
        finally:
            sessions.end(session)
        if said is not grpc.aio.EOF:
            raise InvalidArgument(
                "a session carries nothing from the client",
                field="SessionRequest",
                value="a message",
                allowed="none",
            )


def _late() -> KvstoreError:
    return Unavailable("the client did not take its hello", field="seconds", value=HELLO_SECONDS)
