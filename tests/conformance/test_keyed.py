"""Payloads under opaque keys, on every kind of way to a service that a plug-in takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidArgument, LimitExceeded, Unavailable
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.opaque import store_key
from kvstore.profile.keyed import KeyedProfile
from kvstore.profile.registry import get_profile
from kvstore.types import ItemKind
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore_client import CacheClient, KeyedStore, OpaqueKey, ReserveItem, ReserveOutcome
from kvstore_client.keyed import KEYS_PER_CALL
from tests.support.inprocess import ServiceHere, running_here
from tests.support.remote import TOKENS, port_of, write_private
from tests.support.service import running_service

SIZE = 5000
ROWS = KeyedProfile(name="m", payload_bytes=SIZE, dtype="f32")


@contextmanager
def over_tcp(folder: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    write_private(folder / "tokens", TOKENS[0].encode())
    options = {
        "listen": "127.0.0.1:0",
        "unsafe_plaintext_tcp": True,
        "token_file": str(folder / "tokens"),
    }
    with running_service(**options) as service:
        address = f"tcp://127.0.0.1:{port_of(service)}"
        yield service, {"address": address, "token": TOKENS[0], "insecure": True}


@contextmanager
def on_sockets(folder: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    with running_service() as service:
        yield service, {"address": service.directory}


@contextmanager
def in_process(folder: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    with running_here() as service:
        yield service, {"address": service.address}


@pytest.fixture(scope="module", params=[on_sockets, over_tcp, in_process])
def way(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, dict[str, Any]]]:
    with request.param(tmp_path_factory.mktemp("way")) as made:
        yield made


@pytest.fixture
def client(way: tuple[Any, dict[str, Any]]) -> Iterator[CacheClient]:
    with CacheClient(**way[1], owner="keyed") as made:
        yield made


@pytest.fixture
def store(client: CacheClient, request: pytest.FixtureRequest) -> KeyedStore:
    return a_store(client, request.node.name)


def a_store(client: CacheClient, salt: str, profile: KeyedProfile = ROWS) -> KeyedStore:
    identity = NamespaceIdentity(profile, "w1", "", tenant_salt=salt)
    return KeyedStore(client, identity, name=salt[:128])


def payload_of(key: OpaqueKey) -> bytes:
    return (key.key + bytes([key.group]) * 8).ljust(64, b".") * (SIZE // 64) + bytes(SIZE % 64)


def keys_of(count: int, groups: int = 2) -> list[OpaqueKey]:
    return [OpaqueKey(b"hash%d" % number, group) for number in range(count) for group in range(groups)]


def keep(store: KeyedStore, keys: list[OpaqueKey]) -> tuple[bool, ...]:
    return store.put([(key, payload_of(key)) for key in keys])


def read(store: KeyedStore, keys: list[OpaqueKey]) -> list[bytes | None]:
    """What came of each; None for a miss."""
    rooms = [bytearray(SIZE) for _ in keys]
    got = store.get_into(list(zip(keys, map(memoryview, rooms), strict=True)))
    return [bytes(room) if is_there else None for room, is_there in zip(rooms, got, strict=True)]


def test_what_was_put_comes_back_and_everything_else_is_a_miss(store: KeyedStore) -> None:
    keys = keys_of(4)
    assert store.contains(keys) == (False,) * 8
    assert read(store, keys) == [None] * 8
    assert keep(store, keys[:5]) == (True,) * 5
    assert store.contains(keys) == (True,) * 5 + (False,) * 3
    asked = [keys[7], keys[4], keys[0], keys[0], keys[5]]
    assert read(store, asked) == [None, payload_of(keys[4]), payload_of(keys[0]), payload_of(keys[0]), None]


def test_what_is_held_is_not_written_again(store: KeyedStore, client: CacheClient) -> None:
    keys = keys_of(2)
    keep(store, keys[:2])
    assert keep(store, [*keys, keys[0]]) == (True,) * 5
    assert store.put([(keys[0], bytes(SIZE))]) == (True,)
    assert read(store, keys[:1]) == [payload_of(keys[0])]


def test_what_another_is_writing_is_not_held_yet(
    store: KeyedStore, way: tuple[Any, dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    keys = keys_of(1)
    keep(store, keys[:1])
    with CacheClient(**way[1], owner="other") as other:
        theirs = a_store(other, request.node.name)
        theirs.contains(keys)
        items = _items(theirs, keys)
        with other.reserve(theirs.digest, items) as reservation:
            assert reservation.outcomes == (ReserveOutcome.HELD, ReserveOutcome.GRANTED)
            assert keep(store, keys) == (True, False)
    assert keep(store, keys) == (True, True)


def _items(store: KeyedStore, keys: list[OpaqueKey]) -> list[Any]:
    return [
        ReserveItem(
            kind=ItemKind.BLOCK,
            key=store_key(store.digest, key),
            parent=store.digest,
            position=1,
            length=SIZE,
        )
        for key in keys
    ]


def test_no_namespace_finds_anothers_payloads(client: CacheClient, store: KeyedStore) -> None:
    keys = keys_of(2)
    keep(store, keys)
    for changed in (replace(ROWS, dtype="f16"), replace(ROWS, layout="L3"), replace(ROWS, part="1/2")):
        identity = replace(store._identity, profile=changed)
        other = KeyedStore(client, identity, name=identity.digest().hex())
        assert not any(other.contains(keys))
    with pytest.raises(InvalidArgument, match="need a keyed namespace"):
        KeyedStore(client, NamespaceIdentity(get_profile("tiny"), "", ""), name="n")


def test_more_keys_than_one_call_takes_are_asked_for_in_several(
    store: KeyedStore, client: CacheClient
) -> None:
    keys = [OpaqueKey(b"%d" % number) for number in range(2 * KEYS_PER_CALL + 5)]
    kept = [keys[3], keys[KEYS_PER_CALL + 7], keys[-1]]
    keep(store, kept)
    held = store.contains(keys, use=True)
    assert [key for key, is_held in zip(keys, held, strict=True) if is_held] == kept
    room = memoryview(bytearray(SIZE))
    got = store.get_into([(key, room) for key in keys])
    assert got == held
    with pytest.raises(LimitExceeded, match="keys"):
        client.contains(store.digest, [bytes(32)] * (KEYS_PER_CALL + 1))


def test_a_keyed_lease_is_read_by_fetch_and_map_alike(store: KeyedStore, client: CacheClient) -> None:
    keys = keys_of(3, groups=1)
    keep(store, keys)
    names = [item.key for item in _items(store, keys)]
    found = client.contains(store.digest, [names[2], bytes(32), names[0]], lease=True)
    assert found.held == (True, False, True)
    assert found.lease is not None
    with found.lease as lease:
        for items in (
            client.fetch(lease, first_block=0, block_count=2, state=False),
            client.map(lease, first_block=0, block_count=2, state=False),
        ):
            got = [bytes(item.payload) for item in items if item.payload is not None]
            assert got == [payload_of(keys[2]), payload_of(keys[0])]
        with pytest.raises(InvalidArgument, match="block_count"):
            list(client.fetch(lease, first_block=0, block_count=3, state=False))
        with pytest.raises(InvalidArgument, match="no layers"):
            list(client.fetch_slices(lease, first_block=0, block_count=2, state=False, slices=2))


def test_prompts_states_and_handoffs_are_refused_by_name(store: KeyedStore, client: CacheClient) -> None:
    keep(store, keys_of(1))
    with pytest.raises(InvalidArgument, match="no prompts"):
        client.lookup(store.digest, [], prompt_tokens=3)
    with pytest.raises(InvalidArgument, match="no prompts"):
        client.put_handoff(store.digest, position=1, payload=b"12345678")


def test_a_payload_of_another_length_is_refused(store: KeyedStore) -> None:
    with pytest.raises(InvalidArgument, match="not as long as"):
        store.put([(OpaqueKey(b"a"), bytes(SIZE - 1))])
    assert store.contains([OpaqueKey(b"a")]) == (False,)


def test_a_target_without_room_is_refused(store: KeyedStore) -> None:
    keys = keys_of(1)
    keep(store, keys)
    with pytest.raises(InvalidArgument, match="not a target"):
        store.get_into([(keys[0], bytearray(SIZE - 1))])


# ---- over the life of a service -----------------------------------------------------------------------------


@pytest.fixture
def own() -> Iterator[ServiceHere]:
    with running_here() as service:
        yield service


def test_a_restart_loses_nothing_and_nobody_opens_anew(own: ServiceHere) -> None:
    keys = keys_of(5)
    with CacheClient(own.address, owner="keyed") as client:
        store = a_store(client, "restart")
        keep(store, keys)
        own.kill()
        own.start()
        assert read(store, keys) == list(map(payload_of, keys))
        [found] = [each for each in client.namespaces() if each.digest == store.digest]
        assert (found.policy, found.block_bytes, found.states_share_states) == ("zero", SIZE, 0)
        stats = client.stats()
        assert stats["contains_held_total"] == len(keys)
        assert stats["contains_total"] == 1


def test_without_a_service_every_call_ends_and_it_comes_back_by_itself(own: ServiceHere) -> None:
    with CacheClient(own.address, owner="keyed") as client:
        store = a_store(client, "back")
        own.stop()
        for call in (lambda: store.contains(keys_of(1)), lambda: keep(store, keys_of(1))):
            with pytest.raises(Unavailable):
                call()
        own.start()
        within_pause(lambda: keep(store, keys_of(1)))
        assert store.contains(keys_of(1)) == (True, True)


def within_pause(call: Any) -> None:
    """Calls are refused at once for a moment after a failure."""
    for _ in range(1000):
        try:
            call()
            return
        except Unavailable:
            continue
    raise AssertionError("the service was not reached again")


def test_damage_on_disk_is_a_miss_and_can_be_stored_again(own: ServiceHere) -> None:
    keys = keys_of(4, groups=1)
    with CacheClient(own.address, owner="keyed") as client:
        store = a_store(client, "damage")
        keep(store, keys)
        own.kill()
        assert damage(own.directory, payload_of(keys[1])) > 0
        own.start()
        assert read(store, keys) == [payload_of(keys[0]), None, *map(payload_of, keys[2:])]
        assert store.contains(keys) == (True, False, True, True)
        assert keep(store, keys) == (True,) * 4
        assert read(store, keys) == list(map(payload_of, keys))


def test_verify_and_clear_know_keyed_namespaces(own: ServiceHere) -> None:
    keys = keys_of(3)
    with CacheClient(own.address, owner="keyed") as client:
        store = a_store(client, "clear")
        keep(store, keys)
        [*_, last] = cache_pb2_grpc.AdminStub(own.channel()).Verify(
            pb.VerifyRequest(bytes_per_second=1 << 30)
        )
        assert (last.done, list(last.damages)) == (True, [])
        assert last.bytes >= len(keys) * SIZE
        assert client.clear(store.digest).blocks == len(keys)
        assert not any(store.contains(keys))
        own.kill()
        own.start()
        assert not any(store.contains(keys))


def damage(directory: Path, payload: bytes) -> int:
    """Turn a bit in each place below `directory` where the payload lies; in how many."""
    found = 0
    for path in directory.rglob("*"):
        if not path.is_file():
            continue
        data = path.read_bytes()
        at = data.find(payload)
        if at >= 0:
            found += 1
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(bytes([data[at + 100] ^ 1]))
    return found
