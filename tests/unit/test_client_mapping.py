"""Items that lie in shared memory: where they may lie, and when what was read of them counts."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator

import pytest

from kvstore.errors import DamagedBytes, InvalidArgument
from kvstore.types import ItemKind, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import FetchedItem, MappedItem, checks
from kvstore_client import memory as client_memory
from kvstore_client.mapping import mapped_items, private_item
from kvstore_client.wanted import Place, Whole
from tests.support.extents import filled, map_reply, refill

PAYLOADS = [bytes([65 + number]) * (1000 + number) for number in range(4)]
WANTED = Whole(5, 3, (Place(ItemKind.STATE, 1024),))


class Shared:
    """The extents 1 and 2 with PAYLOADS in both, and the client's sight of them."""

    def __init__(self) -> None:
        self.extents = [filled(number, PAYLOADS) for number in (1, 2)]
        self.seen = {each.number: client_memory._extent(each.descriptor, each.bytes) for each in self.extents}

    def find(self, number: int) -> client_memory.Extent | None:
        return self.seen.get(number)

    def reply(self) -> pb.MapReply:
        """All that is wanted: blocks in both extents, and the state."""
        one, two = self.extents
        return map_reply([(1, 5, one, 0), (1, 6, two, 1), (1, 7, one, 2), (2, 1024, two, 3)])

    def items(self, reply: pb.MapReply | None = None, *, verify: bool = True) -> list[MappedItem]:
        found = mapped_items(reply or self.reply(), WANTED, 0, find=self.find, verify=verify)
        assert None not in found
        return list(found)  # type: ignore[arg-type]


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    for extent in made.extents:
        extent.close()


# ---- what a Map says -----------------------------------------------------------------------------------------


def test_items_come_as_they_were_asked_for_and_lie_where_the_service_keeps_them(shared: Shared) -> None:
    items = shared.items()
    assert [(item.kind, item.index) for item in items] == [
        (ItemKind.BLOCK, 5),
        (ItemKind.BLOCK, 6),
        (ItemKind.BLOCK, 7),
        (ItemKind.STATE, 1024),
    ]
    assert [item.payload for item in items] == PAYLOADS
    assert {item.lineage for item in items} == {Lineage.EXACT}
    assert all(item.payload is not None and item.payload.readonly for item in items)
    assert "BLOCK, index=5, 1000 bytes" in repr(items[0])


def test_a_map_may_come_in_any_number_of_messages(shared: Shared) -> None:
    whole = shared.reply()
    items = []
    for number in range(4):
        part = pb.MapReply()
        for field, values in whole.ListFields():
            getattr(part, field.name).append(values[number])
        items += mapped_items(part, WANTED, number, find=shared.find, verify=True)
    assert [item.payload for item in items if item] == PAYLOADS
    assert mapped_items(pb.MapReply(), WANTED, 4, find=shared.find, verify=True) == []


def test_what_is_not_mapped_is_left_to_fetch(shared: Shared) -> None:
    reply = shared.reply()
    for place in (0, 2):
        for field in ("extent", "offset", "length", "slot", "generation"):
            getattr(reply, field)[place] = 0
    reply.lineage[0] = pb.LINEAGE_UNSPECIFIED
    # And one whose extent has gone meanwhile.
    del shared.seen[2]
    found = mapped_items(reply, WANTED, 0, find=shared.find, verify=True)
    assert found == [None] * 4
    reply = shared.reply()
    found = mapped_items(reply, WANTED, 0, find=shared.find, verify=True)
    assert [item is not None and item.payload for item in found] == [PAYLOADS[0], False, PAYLOADS[2], False]


def put(field: str, value: int, place: int = 1) -> Callable[[pb.MapReply], None]:
    def change(reply: pb.MapReply) -> None:
        getattr(reply, field)[place] = value

    return change


def more(field: str) -> Callable[[pb.MapReply], None]:
    def change(reply: pb.MapReply) -> None:
        values = getattr(reply, field)
        values.append(values[0])

    return change


def less(field: str) -> Callable[[pb.MapReply], None]:
    def change(reply: pb.MapReply) -> None:
        del getattr(reply, field)[0]

    return change


FIELDS = [field.name for field in pb.MapReply.DESCRIPTOR.fields]
EXTENT_BYTES = 4096 + 4 * 4096
HOSTILE: dict[str, Callable[[pb.MapReply], None]] = {
    "another kind": put("kind", pb.STATE),
    "no kind": put("kind", 0),
    "another index": put("index", 7),
    "a state of another place": put("index", 1025, 3),
    "no lineage": put("lineage", 0),
    "an unknown lineage": put("lineage", 3),
    "behind the extent": put("offset", EXTENT_BYTES),
    "behind the extent's end": put("offset", EXTENT_BYTES - 1000),
    "far behind the extent": put("offset", (1 << 64) - 1),
    "one byte too long": put("length", EXTENT_BYTES - 8192 - 40 + 1),
    "of all bytes there are": put("length", (1 << 64) - 1),
    "in the generations": put("offset", 8),
    "at the extent's beginning": put("offset", 0),
    "a generation in the payloads": put("slot", 4096),
    "a generation behind the extent": put("slot", EXTENT_BYTES // 8),
    "a generation far away": put("slot", (1 << 32) - 1),
    **{f"one {field} more": more(field) for field in FIELDS},
    **{f"one {field} less": less(field) for field in FIELDS},
}


@pytest.mark.parametrize("what", sorted(HOSTILE))
def test_an_answer_that_cannot_be_is_damage(shared: Shared, what: str) -> None:
    reply = shared.reply()
    HOSTILE[what](reply)
    with pytest.raises(DamagedBytes):
        mapped_items(reply, WANTED, 0, find=shared.find, verify=True)


def test_more_items_than_were_asked_for_are_damage(shared: Shared) -> None:
    with pytest.raises(DamagedBytes, match="nobody asked for"):
        mapped_items(shared.reply(), WANTED, 1, find=shared.find, verify=True)


def test_a_payload_may_end_where_its_extent_ends(shared: Shared) -> None:
    reply = shared.reply()
    put("length", EXTENT_BYTES - 8192 - 40)(reply)
    payload = shared.items(reply)[1].payload
    assert payload is not None
    assert len(payload) == EXTENT_BYTES - 8192 - 40
    reply = shared.reply()
    put("offset", EXTENT_BYTES)(reply)
    put("length", 0)(reply)
    assert shared.items(reply)[1].payload == b""


def test_extents_may_differ_in_size(shared: Shared) -> None:
    large = filled(2, [bytes(60_000)] * 4)
    try:
        shared.seen[2] = client_memory._extent(large.descriptor, large.bytes)
        reply = shared.reply()
        put("offset", large.slots[3].offset)(reply)
        assert large.slots[3].offset > shared.extents[0].bytes
        assert shared.items(reply)[1].payload == bytes(1001)
        put("offset", large.bytes - 1000)(reply)
        with pytest.raises(DamagedBytes):
            shared.items(reply)
        # What the larger one has room for does not lie in the smaller one.
        reply = shared.reply()
        put("offset", shared.extents[0].bytes, 0)(reply)
        with pytest.raises(DamagedBytes):
            shared.items(reply)
    finally:
        large.close()


# ---- reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_a_right_item_is_copied_and_checked(
    shared: Shared, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:
        monkeypatch.setattr("kvstore_client.mapped.xxh3_64", None)
    for item, payload in zip(shared.items(), PAYLOADS, strict=True):
        target = bytearray(b"." * 1100)
        assert item.copy_to(target)
        assert target == payload + b"." * (1100 - len(payload))
        assert item.check()
        assert item.is_current()


@pytest.mark.parametrize("has_xxh3", [True, False])
def test_a_bent_byte_is_noticed_wherever_it_is(shared: Shared, has_xxh3: bool) -> None:
    reply = shared.reply()
    reply.has_xxh3[0] = has_xxh3
    if has_xxh3 and checks.xxh3_64 is None:
        pytest.skip("no xxhash here")
    item = shared.items(reply)[0]
    target = bytearray(1000)
    memory = shared.extents[0].slots[0].payload
    for place in (0, 499, 999):
        memory[place] ^= 4
        assert not item.check()
        assert not item.copy_to(target)
        # The slot is the item's still: it is its bytes that are wrong.
        assert item.is_current()
        memory[place] ^= 4
        assert item.check()
        assert item.copy_to(target)
    unchecked = shared.items(verify=False)[0]
    memory[0] ^= 4
    assert unchecked.check()
    assert unchecked.copy_to(target)


@pytest.mark.parametrize("verify", [True, False])
def test_what_another_was_put_in_its_place_does_not_count(shared: Shared, verify: bool) -> None:
    items = shared.items(verify=verify)
    target = bytearray(2000)
    # The very same bytes, of another item.
    refill(shared.extents[0], 0, PAYLOADS[0])
    assert not items[0].is_current()
    assert not items[0].check()
    assert not items[0].copy_to(target)
    # And while it changes.
    shared.extents[1].step(1)
    assert not items[1].check()
    assert not items[1].copy_to(target)
    assert items[2].check()
    assert items[3].copy_to(target)


def test_a_slot_that_changes_while_it_is_copied_does_not_count(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    item = shared.items()[0]
    right = checks.xxh3_64 or checks.crc32

    def in_the_middle(payload: memoryview) -> int:
        refill(shared.extents[0], 0, b"another's")
        return right(payload)

    for name in ("xxh3_64", "crc32"):
        monkeypatch.setattr(f"kvstore_client.mapped.{name}", in_the_middle)
    target = bytearray(1000)
    assert not item.copy_to(target)
    assert target == PAYLOADS[0]


def test_a_target_is_anything_that_can_be_written_and_has_room(shared: Shared) -> None:
    item = shared.items()[0]
    for target in (
        bytearray(1000),
        memoryview(bytearray(3000))[1000:2000],
        memoryview(array.array("I", [0] * 250)),
        memoryview(bytearray(1000)).cast("B", (10, 100)),
    ):
        assert item.copy_to(target)
        assert bytes(target) == PAYLOADS[0]


@pytest.mark.parametrize(
    "target",
    [
        bytearray(999),
        bytearray(),
        memoryview(bytes(1000)),
        memoryview(bytearray(2000))[::2],
        memoryview(bytearray(1000))[::-1],
    ],
    ids=["short", "empty", "read-only", "gaps", "backwards"],
)
def test_any_other_target_is_refused_by_name(shared: Shared, target: bytearray | memoryview) -> None:
    with pytest.raises(InvalidArgument, match=r"target.*1000 bytes"):
        shared.items()[0].copy_to(target)


def test_an_item_that_came_by_fetch_is_used_the_same_way() -> None:
    item = private_item(FetchedItem(kind=ItemKind.STATE, index=9, payload=b"bytes", lineage=Lineage.BOUNDED))
    target = bytearray(5)
    assert (item.kind, item.index, item.lineage) == (ItemKind.STATE, 9, Lineage.BOUNDED)
    assert item.payload == b"bytes"
    assert item.payload is not None
    assert item.payload.readonly
    assert item.is_current()
    assert item.check()
    assert item.copy_to(target)
    assert target == b"bytes"


def test_a_missing_item_is_a_miss_however_it_is_asked() -> None:
    item = private_item(FetchedItem(kind=ItemKind.BLOCK, index=3, payload=None, lineage=None))
    assert (item.payload, item.lineage, item.index) == (None, None, 3)
    assert not item.is_current()
    assert not item.check()
    assert not item.copy_to(bytearray(0))
    assert "missing" in repr(item)
