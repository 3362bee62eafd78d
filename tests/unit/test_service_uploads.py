"""Bytes on their way in: whose they are from the first one to the commit, and when they are given back."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.core import Granted, ReserveItem
from kvstore.core.steps import whole
from kvstore.errors import UnknownReservation
from kvstore.profile.registry import get_profile
from kvstore.service.frames import Incoming
from kvstore.service.staging import Staging
from kvstore.service.tenancy import Tenancy
from kvstore.service.uploads import Upload, Uploads
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
        self.uploads = Uploads(self.staging, Tenancy(lambda: 0.0, Counter()))
        keys = [BlockKey(bytes([number]) * 32) for number in range(2)]
        items = [
            ReserveItem(key, ItemKind.BLOCK, NAMESPACE, TINY.block_tokens, SIZE, to_ssd=True) for key in keys
        ]
        self.uploads.begin(
            1,
            session="w",
            namespace=NAMESPACE,
            profile=TINY,
            granted=[Granted(index, item) for index, item in enumerate(items)],
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
