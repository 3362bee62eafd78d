"""Bytes on their way in: whose they are from the first one to the commit, and when they are given back."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.core import CommitReport, Granted, ReserveItem
from kvstore.core.steps import whole
from kvstore.errors import LimitExceeded, UnknownReservation
from kvstore.policy.limits import TenantLimits
from kvstore.profile.registry import get_profile
from kvstore.service.frames import Incoming
from kvstore.service.publication import Publication
from kvstore.service.staging import Staging
from kvstore.service.tenancy import Tenancy
from kvstore.service.tenants import TenantsFile
from kvstore.service.uploads import Upload, Uploads
from kvstore.store.base import Place
from kvstore.types import BlockKey, ItemKind, NamespaceDigest
from kvstore_client.checks import make_checks

TINY = get_profile("tiny")
SIZE = TINY.block_bytes
PAYLOAD = bytes(range(256)) * (SIZE // 256)
CHECKS = make_checks(PAYLOAD)
NAMESPACE = NamespaceDigest(b"n" * 32)


class Rig:
    """One reservation of two blocks, with room for both."""

    def __init__(self) -> None:
        self.staging = Staging(4 * SIZE)
        self.tenants = Tenancy(lambda: 0.0, Counter())
        self.uploads = Uploads(self.staging, self.tenants)
        keys = [BlockKey(bytes([number]) * 32) for number in range(2)]
        items = [
            ReserveItem(key, ItemKind.BLOCK, NAMESPACE, TINY.block_tokens, SIZE, to_ssd=True) for key in keys
        ]
        self.granted = [Granted(index, item) for index, item in enumerate(items)]
        self.uploads.begin(
            1,
            session="w",
            namespace=NAMESPACE,
            profile=TINY,
            granted=self.granted,
            deadline=1.0,
        )

    def get(self) -> Upload:
        return self.uploads.get(1, "w")

    def start(self, upload: Upload, index: int) -> Incoming:
        return self.uploads.start(upload, index, SIZE, CHECKS)


def test_bytes_that_may_still_be_written_to_count_though_their_reservation_has_ended() -> None:
    rig = Rig()
    upload = rig.get()
    arrived = rig.start(upload, 0)
    arrived.feed(memoryview(PAYLOAD))
    rig.uploads.finish(upload, {0: arrived})
    coming = rig.start(upload, 1)
    assert rig.staging.held_bytes == 2 * SIZE
    whole(rig.uploads.ending(1))
    # What has arrived goes with the reservation; who has the rest drops it when nobody writes to it any more.
    assert rig.staging.held_bytes == SIZE
    rig.uploads.drop(upload, [coming])
    assert rig.staging.held_bytes == 0


def test_who_was_late_for_its_reservation_gives_its_bytes_back_once() -> None:
    rig = Rig()
    upload = rig.get()
    coming = rig.start(upload, 0)
    whole(rig.uploads.ending(1))
    assert rig.staging.held_bytes == SIZE
    coming.feed(memoryview(PAYLOAD))
    with pytest.raises(UnknownReservation):
        rig.uploads.finish(upload, {0: coming})
    rig.uploads.drop(upload, [coming])
    assert rig.staging.held_bytes == 0


async def test_nothing_is_written_for_a_namespace_that_was_cleared_meanwhile() -> None:
    async def publish(upload: Upload, places: dict[int, Place]) -> CommitReport:
        return CommitReport([], [], 0)

    void: set[int] = set()
    rig = Rig()
    upload = rig.get()
    arrived = rig.start(upload, 0)
    arrived.feed(memoryview(PAYLOAD))
    rig.uploads.finish(upload, {0: arrived})
    [record] = await Publication(upload, publish, is_void=void.__contains__).records()
    assert bytes(memoryview(record.payload)) == PAYLOAD
    void.add(1)
    assert await Publication(upload, publish, is_void=void.__contains__).records() == []


def test_bytes_on_their_way_are_their_tenants_too_and_go_back_together() -> None:
    rig = Rig()
    rig.tenants.adopt(TenantsFile(limits={"t": TenantLimits(in_flight=SIZE)}))
    rig.uploads.begin(
        2, session="w", namespace=NAMESPACE, profile=TINY, granted=rig.granted, deadline=1.0, tenant="t"
    )
    upload = rig.uploads.get(2, "w")
    incoming = rig.start(upload, 0)
    with pytest.raises(LimitExceeded, match=r"tenant\.in_flight"):
        rig.start(upload, 1)
    assert (rig.staging.held_bytes, rig.tenants.in_flight("t")) == (SIZE, SIZE)
    rig.uploads.drop(upload, [incoming])
    assert (rig.staging.held_bytes, rig.tenants.in_flight("t")) == (0, 0)
