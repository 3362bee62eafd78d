"""Ends: of sessions, and of what is past its deadline, in steps."""

from __future__ import annotations

from kvstore.core.base import Ended
from kvstore.core.leases import Lease
from kvstore.core.live import Live
from kvstore.core.reservations import Reservation, returned
from kvstore.core.steps import ITEMS_AT_ONCE, Steps

BLOCKS_PER_ITEM = 32
"""What a lease has mapped is let go of with it: so many of its blocks count as one item of a step."""


def end_session(live: Live, session: str, now_mono: float) -> Steps[None, Ended]:
    """See Core.ending."""
    leases = done = 0
    for lease_id in live.leases.of_session(session):
        # Its deadline may have come meanwhile.
        lease = live.leases.pop(lease_id, session)
        if lease is None:
            continue
        live.end_leases([lease], now_mono)
        leases += 1
        done += _weight(lease)
        if done >= ITEMS_AT_ONCE:
            done = 0
            yield
    ended: list[Reservation] = []
    for number in live.reservations.of_session(session):
        found = live.reservations.find(number)
        if found is not None and not found.writing:
            live.reservations.end(found)
            ended.append(found)
            if len(ended) % ITEMS_AT_ONCE == 0:
                yield
    return Ended(leases, len(ended), returned(ended))


def expire_leases(live: Live, now_mono: float) -> Steps[None, int]:
    """See Core.expiring_leases."""
    count = done = 0
    while (lease := live.leases.pop_due(now_mono)) is not None:
        live.end_leases([lease], now_mono)
        count += 1
        done += _weight(lease)
        if done >= ITEMS_AT_ONCE:
            done = 0
            yield
    return count


def _weight(lease: Lease) -> int:
    return 1 + lease.blocks // BLOCKS_PER_ITEM
