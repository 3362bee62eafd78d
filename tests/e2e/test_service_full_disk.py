"""A real file system that others have filled, and a process that may write no larger files: refusals, and their end."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.errors import KvstoreError, LimitExceeded
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.keys import block_keys
from kvstore.profile.registry import get_profile
from kvstore.types import ItemKind
from kvstore_client import CacheClient, ReserveItem
from tests.support.polling import wait_for
from tests.support.service import ServiceProcess, short_directory

MIB = 1 << 20
VOLUME_BYTES = 320 * MIB
BLOCKS = 400
BACK_SECONDS = 5.0


class Chat:
    """Chains of blocks, each of tokens of its own."""

    def __init__(self, client: CacheClient) -> None:
        self.client = client
        identity = NamespaceIdentity(profile=get_profile("tiny"), weights_revision="w", numerics="n")
        self.space = client.open_namespace(identity, name="chat")

    def keys(self, number: int) -> list[bytes]:
        length = self.space.block_tokens
        tokens = [(number * 7919 + i * 31) % 251 for i in range(BLOCKS * length)]
        tokens[0] = number
        return block_keys(self.space.digest, tokens, block_tokens=length)

    def store(self, number: int) -> None:
        keys = self.keys(number)
        items = [
            ReserveItem(
                kind=ItemKind.BLOCK,
                key=key,
                parent=parent,
                position=(i + 1) * self.space.block_tokens,
                length=self.space.block_bytes,
            )
            for i, (key, parent) in enumerate(zip(keys, [self.space.digest, *keys], strict=False))
        ]
        with self.client.reserve(self.space.digest, items) as reservation:
            reservation.write({i: bytes([number]) * self.space.block_bytes for i in reservation.granted})
            reservation.commit()

    def whole(self, number: int) -> int:
        """How many blocks of the chain are read; each has the bytes that it was stored with."""
        keys = self.keys(number)
        found = self.client.lookup(
            self.space.digest, keys, prompt_tokens=BLOCKS * self.space.block_tokens + 1
        )
        if found.lease is None:
            return 0
        with found.lease as lease:
            count = found.plan.compute_from // self.space.block_tokens
            items = list(self.client.fetch(lease, first_block=0, block_count=count, state=False))
        for item in items:
            assert item.payload in (None, bytes([number]) * self.space.block_bytes)
        return sum(item.payload is not None for item in items)

    def try_until_stored(self, number: int, seconds: float) -> float:
        """Seconds until a store succeeded."""
        begun = time.monotonic()
        while True:
            try:
                self.store(number)
                return time.monotonic() - begun
            except KvstoreError:
                assert time.monotonic() - begun < seconds, "writing did not come back"


@pytest.fixture
def volume(require: Callable[[str, bool, str], None]) -> Iterator[Path]:
    with short_directory() as directory:
        directory.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={VOLUME_BYTES}", "tmpfs", str(directory)],
            capture_output=True,
            text=True,
            check=False,
        )
        require("mount", done.returncode == 0, f"cannot mount a small tmpfs: {done.stderr.strip()}")
        try:
            yield directory
        finally:
            subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture
def volume_of_few_inodes(require: Callable[[str, bool, str], None], tmp_path: Path) -> Iterator[Path]:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(VOLUME_BYTES)
    with short_directory() as directory:
        directory.mkdir()
        for command in (
            ["mkfs.ext4", "-q", "-F", "-N", "2000", "-m", "0", "-O", "^has_journal", str(image)],
            ["mount", "-o", "loop", str(image), str(directory)],
        ):
            is_there = shutil.which(command[0]) is not None
            done = subprocess.run(command, capture_output=True, text=True, check=False) if is_there else None
            why = "no such command (package e2fsprogs)" if done is None else done.stderr.strip()
            require("mount", done is not None and done.returncode == 0, f"{command[0]}: {why}")
        try:
            yield directory
        finally:
            subprocess.run(["umount", str(directory)], check=True)


def test_a_volume_without_inodes_is_no_end_of_writing(volume_of_few_inodes: Path) -> None:
    volume = volume_of_few_inodes
    others = volume / "others"
    others.mkdir()
    with (
        ServiceProcess(volume / "s", disk=64 * MIB, segment=4 * MIB) as service,
        CacheClient(service.directory, owner="test") as client,
    ):
        chat = Chat(client)
        for number in range(4):
            chat.store(number)
        while os.statvfs(volume).f_favail:
            (others / str(os.statvfs(volume).f_favail)).touch()
        refusals = []
        for number in range(10, 70):
            try:
                chat.store(number)
            except KvstoreError as error:
                refusals.append(str(error))
        assert all("full" in text for text in refusals), refusals
        assert sum(chat.whole(number) > 0 for number in [*range(4), *range(10, 70)]) > 0
        shutil.rmtree(others)
        assert chat.try_until_stored(80, BACK_SECONDS) < BACK_SECONDS
        assert chat.whole(80) >= BLOCKS - 1


def fill(volume: Path, *, but: int) -> Path:
    """Another program takes all that is free but so many bytes."""
    system = os.statvfs(volume)
    other = volume / "others"
    with other.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, system.f_bavail * system.f_frsize - but)
    return other


@pytest.mark.parametrize("left", [10 * MIB, 0])
def test_a_volume_that_others_filled_is_eviction_or_a_refusal_and_writing_comes_back(
    volume: Path, left: int
) -> None:
    with (
        ServiceProcess(volume / "s", disk=1 << 30, segment=8 * MIB) as service,
        CacheClient(service.directory, owner="test") as client,
    ):
        chat = Chat(client)
        for number in range(4):
            chat.store(number)
        assert (service.directory / "ballast").stat().st_size == 16 * MIB
        other = fill(volume, but=left)
        refusals = []
        for number in range(10, 40):
            begun = time.monotonic()
            try:
                chat.store(number)
            except KvstoreError as error:
                refusals.append((time.monotonic() - begun, str(error)))
        assert all("full" in text or "budget" in text for _, text in refusals), refusals
        # What was stored last is there, whatever had to go for it.
        assert sum(chat.whole(number) > 0 for number in [*range(4), *range(10, 40)]) > 0
        other.unlink()
        assert chat.try_until_stored(50, BACK_SECONDS) < BACK_SECONDS
        assert chat.whole(50) >= BLOCKS - 1
        wait_for(lambda: accounted(client) == pytest.approx(taken(service.directory), rel=0.01))


def accounted(client: CacheClient) -> float:
    values = client.stats()
    return values["disk_allocated_bytes"] + values["disk_other_bytes"]


def taken(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir() if path.is_file())


def test_a_volume_that_has_room_for_one_segment_and_no_second_is_written_to_again_and_again(
    volume: Path,
) -> None:
    with (
        ServiceProcess(volume / "s", disk=512 * MIB, segment=8 * MIB) as service,
        CacheClient(service.directory, owner="test") as client,
    ):
        fill(volume, but=10 * MIB)
        chat = Chat(client)
        for number in range(1, 31):
            chat.store(number)
        assert client.stats()["log_reclaimed_segments_total"] >= 2
        assert chat.whole(30) >= BLOCKS - 1


def test_a_limit_on_the_size_of_files_is_a_refusal_at_once_by_name_and_reads_go_on() -> None:
    with (
        short_directory() as directory,
        ServiceProcess(directory, segment=8 * MIB) as service,
        CacheClient(service.directory, owner="test") as client,
    ):
        chat = Chat(client)
        chat.store(1)
        before = resource.prlimit(service.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (64 * 1024, before[1]))
        seconds = []
        for number in range(2, 12):
            begun = time.monotonic()
            with pytest.raises(KvstoreError, match="EFBIG"):
                chat.store(number)
            seconds.append(time.monotonic() - begun)
            assert chat.whole(1) >= BLOCKS - 1
        # The upload of the blocks is part of it.
        assert min(seconds) < 0.25, seconds
        resource.prlimit(service.pid, resource.RLIMIT_FSIZE, before)
        assert chat.try_until_stored(20, BACK_SECONDS) < BACK_SECONDS
        assert chat.whole(20) >= BLOCKS - 1


def test_a_drives_budget_that_is_used_up_refuses_writes_by_name_and_reads_go_on() -> None:
    with (
        short_directory() as directory,
        ServiceProcess(directory, segment=8 * MIB, wear=4 << 30) as service,
        CacheClient(service.directory, owner="test") as client,
    ):
        chat = Chat(client)

        def fill_the_minute() -> None:
            for number in range(1, 20):
                chat.store(number)

        with pytest.raises(LimitExceeded, match=r"come back in \d+ s; wear="):
            fill_the_minute()
        assert chat.whole(1) >= BLOCKS - 1
        values = client.stats()
        assert values["wear_budget_bytes_per_day"] == 4 << 30
        assert values["wear_left_bytes"] < 4 * MIB
        assert values["wear_refused_total"] >= 1
        assert values["log_written_bytes_total"] >= values["log_appended_bytes_total"] > 0
