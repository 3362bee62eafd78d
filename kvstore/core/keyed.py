"""Contains: which keys of a keyed namespace are held. Each stands for itself, so each has an answer of its own."""

from __future__ import annotations

from array import array

from kvstore.core.base import Contained
from kvstore.core.index import NO_SLOT
from kvstore.core.live import Live
from kvstore.errors import LimitExceeded
from kvstore.prefix.joined import JoinedKeys


def contains(
    live: Live,
    namespace: bytes,
    keys: JoinedKeys,
    *,
    session: str,
    now_mono: float,
    now_wall: float,
    use: bool,
    lease: bool,
) -> Contained:
    """See Core.contains."""
    info = live.namespaces.get(namespace)
    info.check_keyed()
    if len(keys) > live.limits.contained_keys:
        raise LimitExceeded(
            "too many keys in one call; ask in several",
            field="keys",
            value=len(keys),
            allowed=f"{live.limits.contained_keys}",
        )
    slots = array("i", [_held(live, info.number, key, now_wall) for key in keys])
    held = bytes(slot != NO_SLOT for slot in slots)
    found = array("i", [slot for slot in slots if slot != NO_SLOT])
    if lease and found:
        live.leases.check_room(session, len(found))
    if use or lease:
        # The last one first: what one request brought goes from its end on.
        for slot in reversed(found):
            live.touch_chain(array("i", (slot,)), now_wall)
    if not (lease and found):
        return Contained(held, None)
    granted = live.leases.grant(
        live.next_number(), session, info.digest, slots=found, state_at=0, now=now_mono, apart=True
    )
    return Contained(held, granted.lease_id)


def _held(live: Live, space: int, key: bytes, now_wall: float) -> int:
    slot = live.index.find(space, key)
    if slot != NO_SLOT and live.index.used[slot] + live.retention_seconds <= now_wall:
        return NO_SLOT
    return slot
