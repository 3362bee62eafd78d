from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.core import Core, LoadReport, describe
from kvstore.errors import PolicyTooLarge
from kvstore.pool import StatePool
from kvstore.prefix import NamespaceIdentity, block_keys
from kvstore.store.base import Found, Place, RecordKind
from kvstore.types import BlockKey, Lineage, NamespaceDigest
from tests.support.core import EAGER, TINY, B, checks_of, identity

NOW = 1_800_000_000.0


class Disk:
    """Records as recovery would find them, in the order of their writing."""

    def __init__(self) -> None:
        self.records: list[Found] = []

    def add(
        self,
        kind: RecordKind,
        namespace: NamespaceDigest,
        key: bytes,
        parent: bytes,
        *,
        position: int,
        length: int,
        last_use: float = NOW,
        lineage: Lineage = Lineage.EXACT,
        payload: bytes = b"",
    ) -> Found:
        number = len(self.records)
        place = Place(1 + number // 16, 4096 * (1 + number % 16), length)
        found = Found(
            kind,
            namespace,
            BlockKey(key),
            BlockKey(parent),
            position,
            lineage,
            checks_of(key),
            place,
            number,
            last_use,
            payload,
        )
        self.records.append(found)
        return found

    def namespace(
        self, what: NamespaceIdentity, name: str = "main", policy: str = "endpoints"
    ) -> NamespaceDigest:
        digest = what.digest()
        payload = describe(what, name, policy)
        self.add(
            RecordKind.NAMESPACE, digest, digest, bytes(32), position=0, length=len(payload), payload=payload
        )
        return digest

    def chain(
        self, digest: NamespaceDigest, tokens: range, *, last_use: float = NOW, states: tuple[int, ...] = ()
    ) -> list[BlockKey]:
        keys = block_keys(digest, tokens, block_tokens=B)
        parent: bytes = digest
        for i, key in enumerate(keys):
            self.add(
                RecordKind.BLOCK,
                digest,
                key,
                parent,
                position=(i + 1) * B,
                length=TINY.block_bytes,
                last_use=last_use,
            )
            parent = key
        for at in states:
            key = keys[at // B - 1]
            self.add(
                RecordKind.STATE,
                digest,
                key,
                bytes(32),
                position=at,
                length=TINY.state_bytes,
                last_use=last_use,
            )
        return keys

    def load(
        self, records: list[Found] | None = None, policies: dict[NamespaceDigest, str] | None = None
    ) -> tuple[Core, LoadReport]:
        core = Core(pool=StatePool(1 << 20, 600.0))
        report = core.load(self.records if records is None else records, policies or {}, now_wall=NOW)
        core.check_integrity()
        return core, report


def blocks_found(core: Core, digest: NamespaceDigest, keys: list[BlockKey]) -> tuple[int, tuple[int, ...]]:
    result = core.lookup(
        digest,
        keys,
        prompt_tokens=len(keys) * B + 1,
        costs=EAGER,
        session="r",
        now_mono=0.0,
        now_wall=NOW,
        lease=False,
    )
    return result.coverage.blocks, result.coverage.checkpoints


@pytest.mark.parametrize("seed", range(6))
def test_everything_is_found_again_in_any_order_of_records(seed: int) -> None:
    disk = Disk()
    one, two = disk.namespace(identity()), disk.namespace(identity(adapter="a"), "two", "zero")
    chains = [
        (one, disk.chain(one, range(6 * B), states=(2 * B, 6 * B))),
        (two, disk.chain(two, range(6 * B), states=(4 * B,))),
        (one, disk.chain(one, range(9000, 9000 + 3 * B))),
    ]
    records = list(disk.records)
    if seed:
        random.Random(seed).shuffle(records)
    core, report = disk.load(records, {one: f"periodic:{2 * B}"})
    assert (report.namespaces, report.blocks, report.states, list(report.discard)) == (2, 15, 3, []), (
        f"seed {seed}"
    )
    assert [blocks_found(core, digest, keys) for digest, keys in chains] == [
        (6, (2 * B, 6 * B)),
        (6, (4 * B,)),
        (3, ()),
    ]
    assert {info.name: str(info.policy) for info in core.namespaces()} == {
        "main": f"periodic:{2 * B}",
        "two": "zero",
    }
    assert not core.open_namespace("two", identity(adapter="a")).is_new


def test_blocks_without_their_chain_and_states_without_their_block_are_left_out() -> None:
    disk = Disk()
    digest = disk.namespace(identity())
    keys = disk.chain(digest, range(6 * B), states=(2 * B, 5 * B))
    lost = next(found for found in disk.records if found.key == keys[3])
    core, report = disk.load([found for found in disk.records if found is not lost])
    assert blocks_found(core, digest, keys) == (3, (2 * B,))
    orphans = {found.place for found in disk.records if found.position > 4 * B}
    assert set(report.discard) == orphans
    assert report.blocks == 3


def test_rows_of_either_length_are_found_again_and_others_are_left_out() -> None:
    disk = Disk()
    digest = disk.namespace(identity())
    keys = disk.chain(digest, range(4 * B), states=(2 * B,))

    def rows(number: int, key: bytes, length: int, **more: float) -> Found:
        return disk.add(RecordKind.ROWS, digest, key, key, position=(number + 1) * B, length=length, **more)  # type: ignore[arg-type]

    good = [rows(0, keys[0], TINY.rows_overlap_block_bytes), rows(1, keys[1], TINY.rows_block_bytes)]
    wrong = [
        rows(2, keys[2], TINY.state_bytes),
        rows(2, keys[3], TINY.rows_block_bytes),
        rows(2, b"?" * 32, TINY.rows_block_bytes),
        rows(1, keys[1], TINY.rows_overlap_block_bytes),
    ]
    core, report = disk.load()
    assert set(report.discard) == {found.place for found in wrong}
    assert (report.states, core.statistics().rows) == (3, 2)
    coverage = core.lookup(
        digest,
        keys,
        prompt_tokens=4 * B + 1,
        costs=EAGER,
        session="r",
        now_mono=0.0,
        now_wall=NOW,
        lease=False,
    ).coverage
    assert (coverage.rows, coverage.rows_overlap, coverage.checkpoints) == ((2 * B,), (B,), (2 * B,))
    gone = core.states_over_share(0)
    assert {each.place for each in gone} >= {found.place for found in good}


def test_a_policy_that_the_share_does_not_hold_any_more_is_kept_at_a_start() -> None:
    disk = Disk()
    digest = disk.namespace(identity(), policy="full")
    core = Core(pool=StatePool(1 << 20, 600.0), states_share_bytes=TINY.rows_block_bytes)
    assert core.load(disk.records, {}, now_wall=NOW).namespaces == 1
    info = core.namespace(digest)
    assert (str(info.policy), core.share_tokens(info)) == ("full", B)
    with pytest.raises(PolicyTooLarge, match="full"):
        core.check_share(info)
    assert str(core.open_namespace("main", identity()).policy) == "full", "it is known, and opens"
    with pytest.raises(PolicyTooLarge):
        core.set_policy(digest, "full+overlap")
    assert str(core.set_policy(digest, "zero").policy) == "zero"


def test_records_that_do_not_fit_their_namespace_are_left_out() -> None:
    disk = Disk()
    digest = disk.namespace(identity())
    keys = disk.chain(digest, range(2 * B), states=(2 * B,))
    fits = list(disk.records)
    good = fits[2]
    wrong = [
        replace(good, key=BlockKey(b"p" * 32), position=3 * B),
        replace(good, key=BlockKey(b"l" * 32), place=Place(9, 0, TINY.block_bytes + 1)),
        replace(
            good,
            key=BlockKey(b"n" * 32),
            namespace=NamespaceDigest(b"?" * 32),
            place=Place(9, 1, TINY.block_bytes),
        ),
        replace(
            good, key=BlockKey(b"c" * 32), parent=BlockKey(b"c" * 32), place=Place(9, 2, TINY.block_bytes)
        ),
        replace(good, place=Place(9, 3, TINY.block_bytes)),
        replace(fits[3], position=B, place=Place(9, 4, TINY.state_bytes)),
        replace(fits[3], place=Place(9, 5, TINY.block_bytes)),
    ]
    core, report = disk.load([*fits, *wrong])
    assert blocks_found(core, digest, keys) == (2, (2 * B,))
    assert sorted(place.offset for place in report.discard if place.segment_id == 9) == [0, 1, 2, 3, 4, 5]
    assert len(report.discard) == len(wrong)


def test_a_namespace_that_cannot_be_read_takes_its_items_along() -> None:
    disk = Disk()
    digest = disk.namespace(identity())
    disk.chain(digest, range(2 * B))
    broken = replace(disk.records[0], payload=b"{}")
    misplaced = replace(disk.records[0], namespace=NamespaceDigest(b"?" * 32))
    for record in (broken, misplaced):
        core, report = disk.load([record, *disk.records[1:]])
        assert (report.namespaces, report.blocks, len(report.discard)) == (0, 0, 3)
        assert core.statistics().totals["unreadable_namespaces_total"] == (1 if record is broken else 0)


def test_the_latest_description_of_a_namespace_counts() -> None:
    disk = Disk()
    digest = disk.namespace(identity(), policy="zero")
    disk.namespace(identity(), policy=f"periodic:{B}")
    core, _ = disk.load()
    assert [str(info.policy) for info in core.namespaces()] == [f"periodic:{B}"]
    core, _ = disk.load(policies={digest: "endpoints"})
    assert [str(info.policy) for info in core.namespaces()] == ["endpoints"]


def test_recency_is_kept_and_ancestors_are_as_recent_as_their_children() -> None:
    disk = Disk()
    digest = disk.namespace(identity())
    old = disk.chain(digest, range(2 * B), last_use=NOW - 50)
    disk.chain(digest, range(5000, 5000 + 2 * B), last_use=NOW - 30)
    # The tail of the old chain was written late: so was, by law, every block before it used.
    tail = block_keys(digest, range(3 * B), block_tokens=B)[2]
    disk.add(
        RecordKind.BLOCK, digest, tail, old[1], position=3 * B, length=TINY.block_bytes, last_use=NOW - 10
    )
    core, _ = disk.load()
    order = [gone.item.key for gone in core.plan_eviction(1 << 30, prefer_states=False, now_wall=NOW)]
    assert order[2:] == [tail, old[1], old[0]]


def test_among_equal_uses_the_chain_that_lies_first_in_the_log_goes_first_and_whole() -> None:
    disk = Disk()
    digest = disk.namespace(identity())
    first = disk.chain(digest, range(4 * B))
    second = disk.chain(digest, range(9000, 9000 + 2 * B))
    third = disk.chain(digest, range(70_000, 70_000 + 3 * B))
    core, _ = disk.load()
    order = [gone.item.key for gone in core.plan_eviction(1 << 30, prefer_states=False, now_wall=NOW)]
    assert order == [*reversed(first), *reversed(second), *reversed(third)]


def test_states_are_ranked_by_their_last_use() -> None:
    disk = Disk()
    digest = disk.namespace(identity())
    new = disk.chain(digest, range(B), last_use=NOW - 10, states=(B,))
    old = disk.chain(digest, range(5000, 5000 + B), last_use=NOW - 20, states=(B,))
    core, _ = disk.load()
    assert [gone.item.key for gone in core.states_over_share(0)] == [old[0], new[0]]


def test_a_last_use_in_the_future_counts_as_now() -> None:
    disk = Disk()
    digest = disk.namespace(identity())
    disk.chain(digest, range(B), last_use=NOW + 10_000_000)
    core, _ = disk.load()
    assert len(core.expire_blocks(NOW + 72 * 3600)) == 1


def test_age_is_counted_across_a_restart() -> None:
    disk = Disk()
    digest = disk.namespace(identity())
    keys = disk.chain(digest, range(2 * B), last_use=NOW - 71 * 3600)
    core, _ = disk.load()
    assert core.expire_blocks(NOW) == []
    assert [gone.item.key for gone in core.expire_blocks(NOW + 3600)] == keys[::-1]


def test_writing_goes_on_where_it_stopped() -> None:
    disk = Disk()
    digest = disk.namespace(identity())
    disk.chain(digest, range(3 * B))
    core, _ = disk.load()
    from kvstore.core import ReserveItem, Written
    from kvstore.types import Checks, ItemKind

    keys = block_keys(digest, range(5 * B), block_tokens=B)
    items = [
        ReserveItem(key, ItemKind.BLOCK, keys[i - 1] if i else digest, (i + 1) * B, TINY.block_bytes)
        for i, key in enumerate(keys)
    ]
    made = core.reserve("w", digest, items, now_mono=0.0, now_wall=NOW)
    assert [each.outcome.name for each in made.outcomes] == ["HELD"] * 3 + ["GRANTED"] * 2
    assert made.reservation_id is not None
    core.commit_list(made.reservation_id, "w")
    written = {
        item.item_id: Written(Checks(1), Place(50, i, TINY.block_bytes)) for i, item in enumerate(items[3:])
    }
    assert len(core.committed(made.reservation_id, "w", written, now_mono=0.0, now_wall=NOW).visible) == 2
    assert blocks_found(core, digest, keys) == (5, ())
    core.check_integrity()


def test_nothing_at_all_is_a_start_too() -> None:
    core, report = Disk().load()
    assert (report.namespaces, report.blocks, report.states, list(report.discard)) == (0, 0, 0, [])
    assert core.open_namespace("first", identity()).is_new


@pytest.mark.parametrize("seed", range(10))
def test_any_tree_with_any_losses_loads_to_exactly_its_whole_chains(seed: int) -> None:
    rng = random.Random(seed)
    disk = Disk()
    digest = disk.namespace(identity())
    nodes: list[tuple[bytes, int, bytes]] = []
    for number in range(120):
        parent, depth = (digest, 0) if not nodes or rng.random() < 0.1 else rng.choice(nodes)[:2]
        key = number.to_bytes(4, "big") * 8
        nodes.append((key, depth + 1, parent))
        disk.add(
            RecordKind.BLOCK,
            digest,
            key,
            parent,
            position=(depth + 1) * B,
            length=TINY.block_bytes,
            last_use=NOW - rng.randrange(1000),
        )
    lost = {key for key, _, _ in rng.sample(nodes, 12)}
    whole: set[bytes] = {digest}
    for key, _, parent in nodes:
        if key not in lost and parent in whole:
            whole.add(key)
    records = [found for found in disk.records if found.key not in lost]
    rng.shuffle(records)
    core, report = disk.load(records)
    assert report.blocks == len(whole) - 1, f"seed {seed}"
    assert len(report.discard) == len(records) - 1 - report.blocks
    gone = core.plan_eviction(1 << 40, prefer_states=False, now_wall=NOW)
    assert {each.item.key for each in gone} == whole - {digest}
    core.check_integrity()
