"""The log's directory, when someone takes it away from a running store."""

from __future__ import annotations

import hashlib
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import DeviceError
from kvstore.store import Record, RecordKind, RecordLog, open_log
from kvstore.types import BlockKey, Checks, Lineage, NamespaceDigest

MIB = 1 << 20
NAMESPACE = NamespaceDigest(b"n" * 32)


def append(log: RecordLog, number: int) -> None:
    payload = bytes(300_000)
    key = BlockKey(hashlib.sha256(b"%d" % number).digest())
    checks = Checks(zlib.crc32(payload))
    log.append(
        [Record(RecordKind.BLOCK, NAMESPACE, key, BlockKey(NAMESPACE), 32, Lineage.EXACT, payload, checks)]
    )


def _replace(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()


@pytest.mark.parametrize(
    "take_away",
    [shutil.rmtree, lambda directory: directory.rename(directory.with_name("elsewhere")), _replace],
    ids=["removed", "renamed", "replaced"],
)
def test_nothing_is_kept_in_a_directory_that_is_not_the_one_locked(
    tmp_path: Path, take_away: Callable[[Path], object]
) -> None:
    directory = tmp_path / "store"
    log, _ = open_log(directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=ManualClock())
    append(log, 0)
    take_away(directory)

    def fill() -> None:
        for number in range(1, 9):
            append(log, number)

    for _ in range(2):
        with pytest.raises(DeviceError, match="directory="):
            fill()
    assert not directory.exists() or not list(directory.iterdir())
    log.close()
    assert not directory.exists() or not list(directory.iterdir())
    # Another store may begin there.
    log, recovery = open_log(directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=ManualClock())
    assert recovery.fresh
    log.close()
