"""How a client reads shared memory and what it does without, against a stand-in for the service."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from kvstore.errors import DamagedBytes, InvalidArgument, Unavailable, UnknownLease
from kvstore.memory.extent import Extent
from kvstore.types import ItemKind, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, FetchedItem, Lease, MappedItem
from kvstore_client.checks import make_checks
from kvstore_client.lease import _private_items
from tests.support.double import ServiceDouble, refuse, service_double
from tests.support.extents import filled, give, map_reply, refill
from tests.support.service import short_directory

NAMESPACE = b"n" * 32
BLOCKS = 8
PAYLOADS = [bytes([65 + number]) * (3000 + number) for number in range(BLOCKS + 1)]
"""Of blocks 0 to 7, and of the state."""


class Store:
    """A double that holds PAYLOADS, and what it is to do when it is asked. `holes`: numbers of items that are not mapped."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self.holes: set[int] = set()
        self.missing: set[int] = set()
        self.fetched: list[tuple[int, int, bool]] = []
        self.batch = 4
        self.extent: Extent = filled(7, PAYLOADS)
        ends.callback(self.extent.close)
        self.given = False
        self.answer: Callable[[pb.MapRequest, grpc.ServicerContext], Iterator[pb.MapReply]] = self.map
        answers = {
            "Lookup": self._lookup,
            "Map": self._map,
            "Fetch": self._fetch,
            "Release": lambda request, context: pb.ReleaseReply(was_held=True),
        }
        self.double: ServiceDouble = ends.enter_context(service_double(folder, answers=answers))
        self.client = ends.enter_context(CacheClient(folder, owner="t"))

    @property
    def maps(self) -> int:
        return [name for name, _ in self.double.calls].count("Map")

    def lease(self) -> Lease:
        lease = self.client.lookup(NAMESPACE, [b"k" * 32] * BLOCKS, prompt_tokens=300).lease
        assert lease is not None
        return lease

    def _map(self, request: pb.MapRequest, context: grpc.ServicerContext) -> Iterator[pb.MapReply]:
        return self.answer(request, context)

    def _lookup(self, request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
        chosen = pb.Alternative(state_source=pb.CHECKPOINT, compute_from=256, state_at=256, replay_from=256)
        plan = pb.RestorePlan(prompt_tokens=300, chosen=chosen, exactness=pb.EXACT)
        return pb.LookupReply(plan=plan, lease_id=3, lease_seconds=60.0, blocks_held=BLOCKS)

    def asked(self, request: pb.MapRequest | pb.FetchRequest) -> list[tuple[int, int, int]]:
        """(number, kind, index) of what is asked for."""
        last = request.first_block + request.block_count
        items = [(number, 1, number) for number in range(request.first_block, last)]
        return [*items, (BLOCKS, 2, 256)] if request.state else items

    def give(self) -> None:
        if not self.given:
            self.given = True
            give(self.double.sessions[-1], self.extent)

    def map(self, request: pb.MapRequest, context: grpc.ServicerContext) -> Iterator[pb.MapReply]:
        self.give()
        asked = self.asked(request)
        for at in range(0, len(asked), self.batch):
            yield map_reply(
                [
                    (kind, index, None if number in self.holes else self.extent, number)
                    for number, kind, index in asked[at : at + self.batch]
                ]
            )

    def _fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[pb.ItemFrame]:
        self.fetched.append((request.first_block, request.block_count, request.state))
        for number, kind, index in self.asked(request):
            if number in self.missing:
                yield pb.ItemFrame(
                    items=[pb.ItemHeader(kind=pb.ItemKind.Name(kind), index=index, missing=True)]
                )
                continue
            payload = PAYLOADS[number]
            made = make_checks(payload)
            header = pb.ItemHeader(
                kind=pb.ItemKind.Name(kind),
                index=index,
                length=len(payload),
                crc32=made.crc32,
                xxh3_64=made.xxh3_64,
                has_xxh3=made.has_xxh3,
                lineage=pb.LINEAGE_EXACT,
            )
            yield pb.ItemFrame(items=[header], data=payload)

    def all(self, *, verify: bool = True) -> list[MappedItem]:
        """Every item, held against what is right."""
        items = list(
            self.client.map(self.lease(), first_block=0, block_count=BLOCKS, state=True, verify=verify)
        )
        assert [(item.kind, item.index) for item in items] == [
            *((ItemKind.BLOCK, index) for index in range(BLOCKS)),
            (ItemKind.STATE, 256),
        ]
        for number, item in enumerate(items):
            target = bytearray(len(PAYLOADS[number]))
            if number in self.missing:
                assert item.payload is None
            else:
                assert item.payload == PAYLOADS[number]
                assert item.copy_to(target)
                assert target == PAYLOADS[number]
        return items


@pytest.fixture
def store() -> Iterator[Store]:
    with ExitStack() as ends:
        folder = ends.enter_context(short_directory())
        folder.mkdir()
        yield Store(folder, ends)


# ---- shared memory ------------------------------------------------------------------------------------------


def test_everything_lies_in_shared_memory_and_nothing_is_fetched(store: Store) -> None:
    items = store.all()
    assert store.fetched == []
    refill(store.extent, 2, b"another")
    assert [item.is_current() for item in items] == [number != 2 for number in range(BLOCKS + 1)]
    assert not items[2].copy_to(bytearray(5000))
    # The descriptor came once, and does for all calls of the session.
    store.extent.slots[2].length = len(PAYLOADS[2])
    store.extent.slots[2].payload[:] = PAYLOADS[2]
    store.all()
    assert store.maps == 2


def test_part_of_a_lease_is_mapped(store: Store) -> None:
    items = list(store.client.map(store.lease(), first_block=3, block_count=2, state=False))
    assert [(item.index, item.payload) for item in items] == [(3, PAYLOADS[3]), (4, PAYLOADS[4])]
    [state] = store.client.map(store.lease(), first_block=0, block_count=0, state=True)
    assert (state.kind, state.payload) == (ItemKind.STATE, PAYLOADS[BLOCKS])


def test_the_bytes_can_be_read_after_the_service_has_gone(store: Store) -> None:
    items = store.all()
    store.double.end_sessions()
    store.client.close()
    assert [item.payload for item in items] == PAYLOADS
    assert all(item.check() for item in items)


def test_what_is_asked_for_wrongly_is_refused_before_any_call(store: Store) -> None:
    lease = store.lease()
    for wrong in (
        {"first_block": -1, "block_count": 1, "state": False},
        {"first_block": 0, "block_count": 1 << 25, "state": False},
        {"first_block": 0, "block_count": 0, "state": False},
    ):
        with pytest.raises(InvalidArgument):
            store.client.map(lease, **wrong)  # type: ignore[arg-type]
    lease.release()
    with pytest.raises(UnknownLease):
        store.client.map(lease, first_block=0, block_count=1, state=False)
    assert store.maps == 0


# ---- without ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holes", "fetched"),
    [
        ({0}, [(0, 1, False)]),
        ({1, 2}, [(1, 2, False)]),
        ({0, 1, 2, 6}, [(0, 3, False), (6, 1, False)]),
        ({3, 4}, [(3, 1, False), (4, 1, False)]),
        ({BLOCKS}, [(0, 0, True)]),
        (set(range(BLOCKS + 1)), [(0, 4, False), (4, 4, False), (0, 0, True)]),
    ],
)
def test_what_is_not_mapped_comes_by_fetch_in_its_place_neighbours_of_a_message_in_one_call(
    store: Store, holes: set[int], fetched: list[tuple[int, int, bool]]
) -> None:
    store.holes = holes
    items = store.all()
    assert store.fetched == fetched
    refill(store.extent, 5, b"another")
    assert items[5].is_current() is (5 in holes)
    assert [item.is_shared for item in items] == [number not in holes for number in range(BLOCKS + 1)]


def test_a_block_and_the_state_that_are_not_mapped_come_together(store: Store) -> None:
    store.holes = {7, 8}
    store.batch = 9
    store.all()
    assert store.fetched == [(7, 1, True)]


def test_what_is_missing_in_the_store_is_a_miss(store: Store) -> None:
    store.holes = store.missing = {2, BLOCKS}
    items = store.all()
    assert [item.check() for item in items] == [number not in store.missing for number in range(BLOCKS + 1)]


@pytest.mark.parametrize(("begin", "end"), [(2, 5), (2, 3), (3, 4), (4, 5), (3, 5)])
def test_of_a_states_rows_those_that_are_mapped_are_not_given_twice(begin: int, end: int) -> None:
    rows = (
        FetchedItem(kind=ItemKind.ROWS, index=number, payload=b"rows", lineage=Lineage.EXACT)
        for number in (2, 3, 4)
    )
    found = _private_items(rows, 2, begin, end)
    assert [item.index for item in found] == list(range(begin, end))


def no_such_call(request: object, context: grpc.ServicerContext) -> Iterator[pb.MapReply]:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    yield pb.MapReply()


def no_memory(request: object, context: grpc.ServicerContext) -> Iterator[pb.MapReply]:
    refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "MEMORY_UNAVAILABLE", "no memory")
    yield pb.MapReply()


@pytest.mark.parametrize("answer", [no_such_call, no_memory])
def test_without_memory_everything_comes_by_one_fetch_and_the_connection_remembers(
    store: Store, answer: Callable[..., Iterator[pb.MapReply]]
) -> None:
    store.answer = answer
    for _ in range(3):
        store.all()
    assert store.fetched == [(0, BLOCKS, True)] * 3
    assert store.maps == 1
    # Another session may be with a service that has some.
    store.answer = store.map
    store.double.end_sessions()
    store.all()
    assert store.maps == 2
    assert len(store.fetched) == 3


def test_memory_that_ends_in_the_middle_is_gone_on_without(store: Store) -> None:
    def half(request: pb.MapRequest, context: grpc.ServicerContext) -> Iterator[pb.MapReply]:
        yield next(store.map(request, context))
        refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "MEMORY_UNAVAILABLE", "no memory")

    store.answer = half
    store.all()
    assert store.fetched == [(4, 4, True)]


def test_what_lies_in_an_extent_that_this_process_could_not_take_is_read_by_fetch(store: Store) -> None:
    store.batch = 9
    lease = store.lease()
    store.give()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        assert lease._connection.usable()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    store.all()
    assert store.fetched == [(0, BLOCKS, True)]
    assert store.maps == 1


# ---- wrong --------------------------------------------------------------------------------------------------


def test_a_descriptor_that_never_came_gives_the_session_up(store: Store) -> None:
    store.given = True
    items = store.client.map(store.lease(), first_block=0, block_count=BLOCKS, state=True)
    with pytest.raises(Unavailable, match="extent 7, which was not given"):
        next(items)
    assert store.client.boot is None
    # And the client goes on with a new one, at once.
    store.given = False
    store.all()


def test_a_wrong_line_between_calls_ends_the_lease_with_its_session(store: Store) -> None:
    lease = store.lease()
    store.double.sessions[-1].send(b"what?\n")
    with pytest.raises(UnknownLease, match="ended with its session"):
        store.client.map(lease, first_block=0, block_count=1, state=False)


@pytest.mark.parametrize("count", [0, 4])
def test_a_map_that_ends_early_is_damage_and_what_came_before_is_good(store: Store, count: int) -> None:
    def early(request: pb.MapRequest, context: grpc.ServicerContext) -> Iterator[pb.MapReply]:
        if count:
            yield next(store.map(request, context))

    store.answer = early
    came = []
    with pytest.raises(DamagedBytes, match="ended early"):
        came.extend(store.client.map(store.lease(), first_block=0, block_count=BLOCKS, state=True))
    assert [item.payload for item in came] == PAYLOADS[:count]


def test_a_map_that_is_given_up_is_cancelled(store: Store) -> None:
    ended = threading.Event()

    def slow(request: pb.MapRequest, context: grpc.ServicerContext) -> Iterator[pb.MapReply]:
        context.add_callback(ended.set)
        yield next(store.map(request, context))
        ended.wait(10)

    store.answer = slow
    items = store.client.map(store.lease(), first_block=0, block_count=BLOCKS, state=False)
    assert next(items).payload == PAYLOADS[0]
    items.close()  # type: ignore[attr-defined]
    assert ended.wait(5)


def test_a_lease_that_ends_under_a_map_is_refused_by_name(store: Store) -> None:
    def late(request: pb.MapRequest, context: grpc.ServicerContext) -> Iterator[pb.MapReply]:
        yield next(store.map(request, context))
        refuse(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_LEASE", "the lease has ended")

    store.answer = late
    came = []
    with pytest.raises(UnknownLease):
        came.extend(store.client.map(store.lease(), first_block=0, block_count=BLOCKS, state=False))
    assert len(came) == 4
    assert store.fetched == []


# ---- processes ----------------------------------------------------------------------------------------------


def test_a_forked_child_reads_what_it_holds_and_maps_no_more(store: Store) -> None:
    items = store.all()
    lease = store.lease()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            held = all(item.copy_to(bytearray(5000)) for item in items)
            try:
                next(store.client.map(lease, first_block=0, block_count=1, state=False))
            except (InvalidArgument, UnknownLease):
                code = 0 if held else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    store.all()
