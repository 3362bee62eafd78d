"""Clearing a tenant: none of its bytes are left in any file, others' are, and a crash in the middle does not end it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvstore.errors import KvstoreError, NoSpace, UnknownNamespace
from kvstore.store.device import DeviceFile, PosixDevice
from kvstore_client import CacheClient
from kvstore_client.aio import AsyncCacheClient
from kvstore_client.values import Erased
from tests.support.chains import Chain, identity_of
from tests.support.polling import wait_for
from tests.support.service import ServiceProcess, running_service, short_directory
from tests.support.serving import serving

SEGMENT = 1 << 20
PROFILE = "flash-slim"
BLOCKS = 6


def stored(client: CacheClient, tenant: str, *, seeds: Iterable[int]) -> list[Chain]:
    """Chains of BLOCKS blocks, whose payloads are random bytes."""
    opened = client.open_namespace(identity_of(PROFILE, salt=tenant), name=f"of {tenant}")
    made = [Chain.of(opened, BLOCKS, seed=seed) for seed in seeds]
    for chain in made:
        chain.store(client)
    return made


def marks(chain: Chain) -> list[bytes]:
    """Sixteen bytes at three places of each payload."""
    found = []
    for index in range(BLOCKS):
        payload = chain.payload(chain.block_item(index))
        found += [bytes(payload[at : at + 16]) for at in (0, len(payload) // 3, len(payload) - 16)]
    return found


def found_in(directory: Path, wanted: Iterable[bytes]) -> int:
    """How many of these are in the directory's files, as they are on the disk."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    data = b"\n".join(path.read_bytes() for path in files)
    return sum(mark in data for mark in wanted)


@pytest.fixture
def service() -> Iterator[ServiceProcess]:
    with running_service(disk=256 << 20, segment=16 << 20) as process:
        yield process


def erase(client: CacheClient, tenant: str) -> None:
    with closing(client.erase_tenant(tenant)) as steps:  # type: ignore[type-var]  # it is a generator
        last = list(steps)[-1]
    assert (last.done, last.files_left) == (True, 0)


def test_no_byte_of_a_cleared_tenant_is_left_in_any_file_and_others_keep_theirs(
    service: ServiceProcess,
) -> None:
    with CacheClient(service.directory, owner="erase") as client:
        both = [
            (stored(client, "acme", seeds=[seed]), stored(client, "other", seeds=[seed])) for seed in range(6)
        ]
        acme = [mark for chains, _ in both for chain in chains for mark in marks(chain)]
        kept = [chain for _, chains in both for chain in chains]
        assert found_in(service.directory, acme) == len(acme)
        erase(client, "acme")
        assert found_in(service.directory, acme) == 0
        for chain in kept:
            answer = client.lookup(
                chain.namespace.digest,
                chain.keys,
                prompt_tokens=BLOCKS * chain.namespace.block_tokens + 1,
                lease=False,
            )
            assert answer.blocks_held == BLOCKS
            assert found_in(service.directory, marks(chain)) == len(marks(chain))
        figures = client.stats()
        assert figures["log_overwritten_bytes_total"] >= 6 * BLOCKS * kept[0].namespace.block_bytes
        assert figures["erased_tenants_total"] == 1
        # What comes later is a tenant's like any other.
        assert stored(client, "acme", seeds=[99])
    assert not (service.directory / "erasing.json").exists()


def test_what_left_long_before_is_overwritten_too(service: ServiceProcess) -> None:
    """Bytes of segments that went lie in spare files, and behind the records of files that were used again."""
    with CacheClient(service.directory, owner="erase") as client:
        first = stored(client, "acme", seeds=range(8))
        marked = [mark for chain in first for mark in marks(chain)]
        client.clear(first[0].namespace.digest)
        stored(client, "other", seeds=range(2))
        assert 0 < found_in(service.directory, marked) <= len(marked)
        erase(client, "acme")
        assert found_in(service.directory, marked) == 0


@pytest.mark.parametrize("when", ["as it begins", "when it is forgotten"])
def test_a_kill_in_the_middle_does_not_end_it(service: ServiceProcess, when: str) -> None:
    note = service.directory / "erasing.json"
    with CacheClient(service.directory, owner="erase") as client:
        acme = [mark for chain in stored(client, "acme", seeds=range(6)) for mark in marks(chain)]
        kept = stored(client, "other", seeds=range(6))
        with ThreadPoolExecutor(1) as thread, closing(client.erase_tenant("acme")) as steps:  # type: ignore[type-var]  # it is a generator
            first = thread.submit(next, steps)
            if when == "as it begins":
                wait_for(note.exists, 30)
            else:
                first.result()
            service.kill()
            wait([first])
    left = found_in(service.directory, acme)
    service.start()
    wait_for(lambda: not note.exists(), 60)
    assert "going on" in service.log
    assert left > 0
    assert found_in(service.directory, acme) == 0
    with CacheClient(service.directory, owner="look") as client:
        for chain in kept:
            tokens = BLOCKS * chain.namespace.block_tokens + 1
            found = client.lookup(chain.namespace.digest, chain.keys, prompt_tokens=tokens, lease=False)
            assert found.blocks_held == BLOCKS


class NoNotes(PosixDevice):
    """A disk without room for one more small file."""

    def create(self, name: str, *, bulk: bool = False) -> DeviceFile:
        if name.startswith("erasing.json"):
            raise NoSpace("no space left on the device", field="file", value=name)
        return super().create(name, bulk=bulk)


async def test_a_start_on_a_full_disk_lets_nobody_find_what_was_being_erased() -> None:
    def held(directory: Path) -> list[int]:
        with CacheClient(directory, owner="look") as client:
            return [
                sum(each.held_bytes for each in client.tenants() if each.tenant == name) for name in names
            ]

    names = ("acme", "other")
    with short_directory() as directory:
        directory.mkdir()
        async with serving(directory):

            def store() -> None:
                with CacheClient(directory, owner="store") as client:
                    for name in names:
                        stored(client, name, seeds=[1])

            await asyncio.to_thread(store)
        # As a kill leaves it that came before the first record.
        (directory / "erasing.json").write_text('{"tenant": "acme"}')
        async with serving(directory, device=NoNotes(directory)):
            acme, other = await asyncio.to_thread(held, directory)
            assert acme == 0 < other
        assert (directory / "erasing.json").exists()
        async with serving(directory):
            await asyncio.to_thread(wait_for, lambda: not (directory / "erasing.json").exists(), 60)
            acme, other = await asyncio.to_thread(held, directory)
            assert acme == 0 < other


def test_a_tenant_that_goes_on_writing_keeps_what_it_writes_and_the_erase_ends(
    service: ServiceProcess,
) -> None:
    with CacheClient(service.directory, owner="erase") as client, ThreadPoolExecutor(1) as thread:
        before = [mark for chain in stored(client, "acme", seeds=range(4)) for mark in marks(chain)]
        stored(client, "other", seeds=range(4))
        over = threading.Event()

        def write() -> list[Chain]:
            made = []
            while not over.is_set():
                # A clear ends what is on its way: then it is stored anew.
                with suppress(KvstoreError, AssertionError):
                    made += stored(client, "acme", seeds=[1000 + len(made)])
            return made

        writing = thread.submit(write)
        erase(client, "acme")
        over.set()
        assert found_in(service.directory, before) == 0
        writing.result()
        later = stored(client, "acme", seeds=[5000])[0]
        assert found_in(service.directory, marks(later)) == len(marks(later))


def kvstore(service: ServiceProcess, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.cli.main", *words, "--dir", str(service.directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_says_what_was_done_and_refuses_tenants_that_are_not_there(
    service: ServiceProcess,
) -> None:
    with CacheClient(service.directory, owner="erase") as client:
        [chain] = stored(client, "../x", seeds=[1])
        done = kvstore(service, "clear", "--tenant", "../x")
        assert done.returncode == 0, done.stderr
        assert f"cleared {BLOCKS} blocks" in done.stdout
        assert "nothing of the tenant is left on the disk" in done.stdout
        assert found_in(service.directory, marks(chain)) == 0
        for name in ("../y", "a" * 5000, "a\nb"):
            done = kvstore(service, "clear", "--tenant", name)
            assert done.returncode == 1
            assert "no namespace is this tenant's" in done.stderr
            assert len(done.stderr.splitlines()) == 1
        for name in ("a\0b", ""):
            with pytest.raises(UnknownNamespace):
                erase(client, name)
        assert "../x" in kvstore(service, "tenants").stdout


async def test_the_async_client_follows_an_erase_and_a_second_caller_joins_it(
    service: ServiceProcess,
) -> None:
    with CacheClient(service.directory, owner="erase") as client:
        [chain] = stored(client, "acme", seeds=[7])
        stored(client, "other", seeds=[7])
    async with (
        AsyncCacheClient(service.directory, owner="one") as one,
        AsyncCacheClient(service.directory, owner="two") as two,
    ):

        async def last(client: AsyncCacheClient) -> Erased:
            return [now async for now in client.erase_tenant("acme")][-1]

        first, second = await asyncio.gather(last(one), last(two))
        assert first.done
        assert second.done
        assert BLOCKS in (first.blocks, second.blocks)
        found = {each.tenant: each for each in await one.tenants()}
        assert (found["acme"].held_bytes, found["acme"].erasing) == (0, False)
        assert found["other"].held_bytes > 0
    assert found_in(service.directory, marks(chain)) == 0
