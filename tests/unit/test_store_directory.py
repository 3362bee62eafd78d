"""The log's directory, when someone takes it away from a running store."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import DeviceError, DirectoryInUse
from kvstore.store import Record, RecordKind, RecordLog, open_log
from kvstore.store.device import LOCK_NAME, PosixDevice
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


_HOLDER = """
import sys
from kvstore.clock import SystemClock
from kvstore.store import open_log
log, _ = open_log(sys.argv[1], budget_bytes=16 << 20, segment_bytes=1 << 20, clock=SystemClock())
print("held", flush=True)
sys.stdin.read()
log.close()
"""


@contextmanager
def another_process_that_holds(directory: Path) -> Iterator[int]:
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        yield child.pid
        assert child.stdin is not None
        child.stdin.close()
    assert child.returncode == 0


def test_a_removed_lock_file_does_not_let_a_second_process_in(tmp_path: Path) -> None:
    directory = tmp_path / "store"
    with another_process_that_holds(directory) as pid:
        with pytest.raises(DirectoryInUse, match=f"pid {pid}"):
            open_log(directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=ManualClock())
        (directory / LOCK_NAME).unlink()
        with pytest.raises(DirectoryInUse, match="pid unknown"):
            open_log(directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=ManualClock())
        assert not (directory / LOCK_NAME).exists(), "who is refused leaves nothing behind"
    log, _ = open_log(directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=ManualClock())
    log.close()


@pytest.mark.parametrize("code", [errno.EBADF, errno.EINVAL, errno.ENOTSUP])
def test_where_no_directory_can_be_locked_the_file_alone_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    really = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        really(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    first, second = PosixDevice(tmp_path), PosixDevice(tmp_path)
    first.lock()
    with pytest.raises(DirectoryInUse, match=f"pid {os.getpid()}"):
        second.lock()
    first.close()
    second.lock()
    second.close()


def test_a_refused_lock_keeps_no_descriptor(tmp_path: Path) -> None:
    first, second = PosixDevice(tmp_path), PosixDevice(tmp_path)
    first.lock()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(DirectoryInUse):
            second.lock()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    first.close()
