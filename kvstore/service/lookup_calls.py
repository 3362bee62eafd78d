"""The Lookup call: wait for others where that is worth it, look, and announce what the caller computes."""

from __future__ import annotations

from functools import partial

from kvstore.core import LookupResult, NamespaceInfo
from kvstore.core.held import SLOTS_AT_ONCE
from kvstore.errors import InvalidArgument
from kvstore.service import encode
from kvstore.service.delivery import send_head
from kvstore.service.engine import NO_SESSION, Engine, is_exact_only
from kvstore.service.flights import Prompt, Waited, check_open
from kvstore.service.session import Session
from kvstore.service.status import Context
from kvstore.service.tenant_limits import namespace_of_caller
from kvstore.service.turns import by_turns
from kvstore.types import KEY_BYTES
from kvstore.v1 import cache_pb2 as pb

WAIT_SECONDS_MAX = 3600.0


class LookupCalls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def look(
        self, request: pb.LookupRequest, session: Session | None, context: Context
    ) -> pb.LookupReply:
        """`session` is the caller's where a lease is asked for."""
        engine = self._engine
        info = namespace_of_caller(engine, encode.take_digest(request.namespace))
        engine.tenants.begin(info.tenant)
        if not (
            request.wait_seconds
            or request.announce
            or len(request.keys) > KEY_BYTES * SLOTS_AT_ONCE
            or engine.flights.are_open
        ):
            return self._at_once(request, info, NO_SESSION if session is None else session.id)
        wait_seconds = encode.take_seconds(request.wait_seconds, field="wait_seconds", high=WAIT_SECONDS_MAX)
        if session is None:
            for field, value in (("announce", request.announce), ("wait_seconds", wait_seconds)):
                if value:
                    raise InvalidArgument(
                        "only a lookup with a lease has a part in flights",
                        field=field,
                        value=value,
                        allowed="0 without `lease`",
                    )
        exact_only = is_exact_only(info.profile, encode.take_exactness(request.exactness))
        own, tokens = NO_SESSION if session is None else session.id, request.prompt_tokens
        keys = encode.split_keys(request.keys, most=engine.config.keys)
        look = partial(
            engine.lookup,
            info.digest,
            keys,
            prompt_tokens=tokens,
            costs=encode.take_costs(request.costs),
            measured=not request.assumed_costs,
            exact_only=exact_only,
            session=own,
        )
        if len(keys) > SLOTS_AT_ONCE and not wait_seconds:
            # Others have turns in between; from what this finds to the answer nothing waits. Who waits for a flight looks in
            # one go, since who wakes first announces before the next one looks.
            look = partial(look, held=await by_turns(engine.core.finding(info.digest, keys)))
            if session is not None:
                check_open(session)
        if not (wait_seconds or request.announce or engine.flights.are_open):
            return self._answer(look(lease=request.lease))
        prompt = Prompt(own, info.digest, keys, tokens, info.figures.block_tokens, exact_only)
        waited = Waited()
        if wait_seconds and session is not None:
            waited = await engine.flights.wait(
                prompt, session, seconds=wait_seconds, look=partial(look, lease=False, counted=False)
            )
        # From here to the answer nothing waits: who woke first announces before the next one looks.
        found = look(lease=request.lease)
        reply = encode.put_lookup(found, lease_seconds=engine.core.lease_seconds)
        if waited.seconds:
            reply.waited_seconds = waited.seconds
        blocks, seconds = engine.flights.ahead(prompt, found)
        if blocks:
            reply.blocks_in_flight, reply.in_flight_seconds = blocks, seconds
        if request.announce:
            flight = engine.flights.announce(prompt, found, inherits=waited.inherits)
            reply.flight_id = 0 if flight is None else flight.flight_id
        if wait_seconds or request.announce:
            # A call that cannot wait is over in a millisecond, and is not made slower.
            undo = partial(self._undo, reply.lease_id, reply.flight_id, own)
            await send_head(context, undo=undo)
        return reply

    def _at_once(self, request: pb.LookupRequest, info: NamespaceInfo, session: str) -> pb.LookupReply:
        """What most lookups are: no part in flights, and nothing that others would need a turn for."""
        engine = self._engine
        return self._answer(
            engine.lookup(
                info.digest,
                encode.split_keys(request.keys, most=engine.config.keys),
                prompt_tokens=request.prompt_tokens,
                costs=encode.take_costs(request.costs),
                session=session,
                lease=request.lease,
                exact_only=is_exact_only(info.profile, encode.take_exactness(request.exactness)),
                measured=not request.assumed_costs,
            )
        )

    def _answer(self, found: LookupResult) -> pb.LookupReply:
        """Where nobody computes what is missing, unless it is being written already."""
        reply = encode.put_lookup(found, lease_seconds=self._engine.core.lease_seconds)
        if found.plan.wait_for:
            reply.blocks_in_flight = len(found.plan.wait_for)
        return reply

    def _undo(self, lease_id: int, flight_id: int, session: str) -> None:
        if lease_id:
            self._engine.release(lease_id, session)
        if flight_id:
            self._engine.flights.end(flight_id, session)
