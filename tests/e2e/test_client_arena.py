"""A client's writes through shared memory, against a running service."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvstore.errors import DamagedBytes, UnknownReservation
from kvstore.memory import why_not_mapped
from kvstore_client import CacheClient, OpenedNamespace, Reservation
from kvstore_client import arena as client_arena
from tests.support.calls import look
from tests.support.chains import Chain, identity_of, payload_of
from tests.support.service import ServiceProcess, running_service

pytestmark = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "there is such memory")

PROFILE = "deepseek-v4-flash"
BLOCKS = 40


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service(arenas=256 << 20, staging=256 << 20, cache=256 << 20) as process:
        yield process


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[CacheClient]:
    with CacheClient(service.directory, owner="tests") as made:
        yield made


def opened(client: CacheClient, salt: str, profile: str = PROFILE) -> OpenedNamespace:
    return client.open_namespace(identity_of(profile, salt=salt), name=salt)


def reserved(client: CacheClient, chain: Chain) -> Reservation:
    items = [chain.block_item(number) for number in range(len(chain.keys))]
    reservation = client.reserve(chain.namespace.digest, items)
    assert len(reservation.granted) == len(items)
    return reservation


def payloads_of(chain: Chain) -> dict[int, bytes]:
    return {number: payload_of(key, chain.namespace.block_bytes) for number, key in enumerate(chain.keys)}


def is_stored(client: CacheClient, chain: Chain) -> bool:
    found = look(client, chain)
    assert found.lease is not None
    with found.lease:
        items = list(client.map(found.lease, first_block=0, block_count=len(chain.keys), state=False))
        return [bytes(item.payload or b"") for item in items] == list(payloads_of(chain).values())


@contextmanager
def moved(client: CacheClient) -> Iterator[list[float]]:
    """Bytes that came through arenas inside, once it is left."""
    found: list[float] = []
    before = client.stats()["arena_written_bytes_total"]
    yield found
    found.append(client.stats()["arena_written_bytes_total"] - before)


def test_large_payloads_go_through_the_arena_in_rounds(client: CacheClient, salt: str) -> None:
    chain = Chain.of(opened(client, salt), BLOCKS, seed=1)
    with moved(client) as through, reserved(client, chain) as reservation:
        reservation.write(payloads_of(chain))
        assert reservation.commit().items == BLOCKS
    assert through == [BLOCKS * chain.namespace.block_bytes]
    assert is_stored(client, chain)


def test_small_ones_go_through_the_socket(client: CacheClient, salt: str) -> None:
    chain = Chain.of(opened(client, salt, "tiny"), 3, seed=1)
    with moved(client) as through, reserved(client, chain) as reservation:
        reservation.write(payloads_of(chain))
        assert reservation.commit().items == 3
    assert through == [0]


def test_a_buffer_is_filled_where_the_service_takes_it_from(client: CacheClient, salt: str) -> None:
    chain = Chain.of(opened(client, salt), 6, seed=2)
    payloads = payloads_of(chain)
    with moved(client) as through, reserved(client, chain) as reservation:
        buffers = {number: reservation.buffer(number) for number in (0, 1, 2, 3)}
        assert reservation.buffer(2) is buffers[2]
        for number, buffer in buffers.items():
            buffer[:] = payloads[number]
        # Some were filled in place, one of the buffers is not wanted, and some come as they are.
        reservation.write({number: buffers[number] for number in (2, 0, 1)} | {4: payloads[4]})
        with pytest.raises(ValueError, match="released"):
            buffers[0][0] = 1
        reservation.write({3: payloads[3], 5: payloads[5]})
        assert reservation.commit().items == 6
        with pytest.raises(ValueError, match="released"):
            buffers[3][0] = 1
    assert through == [6 * chain.namespace.block_bytes]
    assert is_stored(client, chain)
    with pytest.raises(UnknownReservation):
        reservation.buffer(0)


@pytest.mark.parametrize("room", [0, 5 << 20])
def test_without_room_in_the_arena_payloads_go_through_the_socket(salt: str, room: int) -> None:
    """A service with no room for the least arena, and one whose arena is smaller than what is written at once."""
    with (
        running_service(arenas=room or 4096, staging=64 << 20) as service,
        CacheClient(service.directory, owner="tests") as client,
    ):
        chain = Chain.of(opened(client, salt), BLOCKS, seed=3)
        payloads = payloads_of(chain)
        with moved(client) as through, reserved(client, chain) as reservation:
            # Held by another for as long as this one writes.
            held = [reservation.buffer(number) for number in range(6)]
            for number in range(6):
                held[number][:] = payloads[number]
            reservation.write({number: payloads[number] for number in range(6, BLOCKS)})
            reservation.write(dict(enumerate(held)))
            assert reservation.commit().items == BLOCKS
        assert through[0] == 0 if room == 0 else through[0] > 0
        assert is_stored(client, chain)


def test_threads_share_an_arena_that_is_too_small_for_all(
    client: CacheClient, salt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_arena, "ARENA_BYTES", 4 << 20)
    space = opened(client, salt)
    chains = [Chain.of(space, 16, seed=10 + number) for number in range(6)]

    def store(chain: Chain) -> int:
        with reserved(client, chain) as reservation:
            buffer = reservation.buffer(0)
            payloads = payloads_of(chain)
            buffer[:] = payloads[0]
            reservation.write({**payloads, 0: buffer})
            return reservation.commit().items

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(store, chains)) == [16] * 6
    assert all(is_stored(client, chain) for chain in chains)


def test_a_buffer_that_changes_while_it_is_taken_is_damaged_or_whole(client: CacheClient, salt: str) -> None:
    chain = Chain.of(opened(client, salt), 1, seed=4)
    outcomes = set()
    for _ in range(10):
        with reserved(client, chain) as reservation:
            buffer = reservation.buffer(0)
            buffer[:] = payloads_of(chain)[0]
            begun, stop = threading.Event(), threading.Event()

            def scribble(
                buffer: memoryview = buffer, begun: threading.Event = begun, stop: threading.Event = stop
            ) -> None:
                own = buffer[:]
                begun.set()
                while not stop.is_set():
                    own[7] ^= 1
                own.release()

            thread = threading.Thread(target=scribble)
            thread.start()
            assert begun.wait(10)
            try:
                reservation.write({0: buffer})
                outcomes.add("whole")
            except DamagedBytes:
                outcomes.add("damaged")
            finally:
                stop.set()
                thread.join()
    assert outcomes <= {"whole", "damaged"}
    with reserved(client, chain) as reservation:
        reservation.write(payloads_of(chain))
        assert reservation.commit().items == 1
    assert is_stored(client, chain)


def test_a_forked_child_does_not_touch_it(client: CacheClient, salt: str) -> None:
    chain = Chain.of(opened(client, salt), 2, seed=5)
    with reserved(client, chain) as reservation:
        buffer = reservation.buffer(0)
        buffer[:] = payloads_of(chain)[0]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                buffer[0] ^= 0xFF
            except ValueError:
                try:
                    reservation.buffer(1)
                except UnknownReservation:
                    code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        reservation.write({0: buffer, 1: payloads_of(chain)[1]})
        assert reservation.commit().items == 2
    assert is_stored(client, chain)


def test_after_a_restart_there_is_an_arena_again(salt: str) -> None:
    with (
        running_service(staging=64 << 20) as service,
        CacheClient(service.directory, owner="tests") as client,
    ):
        for seed in (6, 7):
            chain = Chain.of(opened(client, salt), 4, seed=seed)
            with moved(client) as through, reserved(client, chain) as reservation:
                reservation.write(payloads_of(chain))
                if seed == 6:
                    lost = reserved(client, Chain.of(chain.namespace, 2, seed=8)).buffer(0)
                assert reservation.commit().items == 4
            assert through[0] > 0
            if seed == 6:
                service.restart()
                # Whoever fills what is lost fills it in vain, and is not hurt.
                lost[:] = bytes(len(lost))
