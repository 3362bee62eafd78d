from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.core import Contained, Core, Limits, ReserveItem, ReserveOutcome
from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.policy.registry import EVICTION_POLICIES, make_policy
from kvstore.pool import StatePool
from kvstore.prefix import JoinedKeys, NamespaceIdentity
from kvstore.prefix.opaque import OpaqueKey, store_key
from kvstore.profile.keyed import KeyedProfile
from kvstore.types import BlockKey, ItemId, ItemKind, NamespaceDigest
from tests.support.core import CoreRig

ROWS = KeyedProfile(name="m", payload_bytes=4096, dtype="f32")


class KeyedRig(CoreRig):
    """A keyed namespace `rows` is open beside the prompts' one."""

    def __init__(self, *, limits: Limits | None = None) -> None:
        super().__init__(limits=limits)
        self.rows = self.core.open_namespace("rows", NamespaceIdentity(ROWS, "w1", "")).digest

    def names(self, *texts: str) -> list[BlockKey]:
        return [store_key(NamespaceDigest(self.rows), OpaqueKey(text.encode())) for text in texts]

    def items(self, names: Sequence[BlockKey]) -> list[ReserveItem]:
        return [ReserveItem(name, ItemKind.BLOCK, self.rows, 1, ROWS.block_bytes) for name in names]

    def keep(self, *texts: str) -> list[BlockKey]:
        """As a client does: what comes last goes first."""
        names = self.names(*texts)
        self.write(self.items(names[::-1]), namespace=self.rows)
        return names

    def contains(
        self, names: Sequence[BlockKey], *, use: bool = False, lease: bool = False, session: str = "r"
    ) -> Contained:
        keys = JoinedKeys(b"".join(names))
        return self.core.contains(self.rows, keys, session=session, use=use, lease=lease, **self.now)

    def evict_rows(self, count: int) -> list[BlockKey]:
        gone = self.core.plan_eviction(
            count * ROWS.block_bytes, prefer_states=True, now_wall=self.clock.wall()
        )
        return [each.item.key for each in gone]


@pytest.fixture
def rig() -> KeyedRig:
    return KeyedRig()


def test_each_key_has_an_answer_of_its_own(rig: KeyedRig) -> None:
    rig.keep("a", "b", "d")
    assert rig.contains(rig.names("a", "b", "c", "d", "a")) == Contained(b"\1\1\0\1\1", None)
    assert rig.contains([]) == Contained(b"", None)


def test_a_lease_covers_what_is_held_in_the_order_asked(rig: KeyedRig) -> None:
    names = rig.keep("a", "b", "c")
    found = rig.contains(rig.names("c", "x", "a"), lease=True)
    assert found.held == b"\1\0\1"
    assert found.lease_id is not None
    lease = rig.core.lease(found.lease_id, "r", rig.clock.monotonic())
    items = rig.core.fetch_list(lease, first_block=0, block_count=2, want_state=False)
    assert [item.item.key for item in items if item] == [names[2], names[0]]
    assert len(rig.core.fetch_places(lease, first_block=0, block_count=2)) == 2
    with pytest.raises(InvalidArgument, match="covers no state"):
        rig.core.fetch_list(lease, first_block=0, block_count=0, want_state=True)
    rig.core.check_integrity()


def test_nothing_that_a_lease_covers_is_evicted_until_it_ends(rig: KeyedRig) -> None:
    a, b, c = rig.keep("a", "b", "c")
    found = rig.contains([a, c], lease=True)
    assert found.lease_id is not None
    assert rig.evict_rows(3) == [b]
    rig.core.check_integrity()
    assert rig.core.release(found.lease_id, "r", rig.clock.monotonic())
    assert sorted(rig.evict_rows(3)) == sorted([a, c])
    rig.core.check_integrity()


def test_a_leased_block_that_is_lost_takes_no_other_with_it(rig: KeyedRig) -> None:
    a, b, c = rig.keep("a", "b", "c")
    found = rig.contains([a, b, c, b], lease=True)
    assert found.lease_id is not None
    rig.core.forget(rig.rows, ItemId(b, ItemKind.BLOCK))
    # Its slot may be another's by then.
    rig.keep("d")
    rig.core.check_integrity()
    lease = rig.core.lease(found.lease_id, "r", rig.clock.monotonic())
    items = rig.core.fetch_list(lease, first_block=0, block_count=4, want_state=False)
    assert [item and item.item.key for item in items] == [a, None, c, None]
    assert len(rig.core.fetch_places(lease, first_block=0, block_count=4)) == 1
    assert len(rig.core.fetch_places(lease, first_block=2, block_count=1)) == 1
    assert rig.core.end_session("r", rig.clock.monotonic()).leases == 1
    rig.core.check_integrity()


def test_what_one_request_brought_goes_from_its_end_on(rig: KeyedRig) -> None:
    a, b, c = rig.keep("a", "b", "c")
    rig.clock.advance(10)
    d, e = rig.keep("d", "e")
    assert rig.evict_rows(5) == [c, b, a, e, d]


@pytest.mark.parametrize("lease", [False, True])
def test_what_is_used_together_ages_together(rig: KeyedRig, lease: bool) -> None:
    a, b, c = rig.keep("a", "b", "c")
    rig.clock.advance(10)
    rig.keep("d")
    rig.clock.advance(10)
    found = rig.contains([a, b], use=True, lease=lease)
    if found.lease_id:
        rig.core.release(found.lease_id, "r", rig.clock.monotonic())
    assert rig.evict_rows(4) == [c, *rig.names("d"), b, a]


def test_a_look_uses_nothing(rig: KeyedRig) -> None:
    a, b = rig.keep("a", "b")
    rig.clock.advance(10)
    rig.contains([b])
    assert rig.evict_rows(2) == [b, a]


def test_what_is_past_its_retention_is_not_held(rig: KeyedRig) -> None:
    names = rig.keep("a")
    rig.clock.advance(72 * 3600)
    assert rig.contains(names, lease=True) == Contained(b"\0", None)


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_every_eviction_policy_ranks_keys_that_stand_for_themselves(policy: str) -> None:
    rig = KeyedRig()
    rig.core = Core(pool=StatePool(1 << 20, 600.0), ranks=make_policy(policy))
    rig.rows = rig.core.open_namespace("rows", NamespaceIdentity(ROWS, "w1", "")).digest
    names = rig.keep(*"abcdefgh")
    rig.contains(names[:4], use=True)
    rig.contains(names[2:6], use=True)
    rig.core.check_integrity()
    assert sorted(rig.evict_rows(8)) == sorted(names)
    rig.core.check_integrity()


def test_a_block_of_a_keyed_namespace_stands_for_itself(rig: KeyedRig) -> None:
    a, b = rig.names("a", "b")
    for item, field in (
        (ReserveItem(b, ItemKind.BLOCK, a, 2, ROWS.block_bytes), "position"),
        (ReserveItem(b, ItemKind.BLOCK, a, 1, ROWS.block_bytes), "parent"),
        (ReserveItem(b, ItemKind.STATE, b"", 1, 0), "kind"),
        (ReserveItem(b, ItemKind.ROWS, b"", 1, 0), "kind"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            rig.reserve([item], namespace=rig.rows)
    rig.keep("a")
    made = rig.reserve(rig.items([a, b]), namespace=rig.rows)
    assert [each.outcome for each in made.outcomes] == [ReserveOutcome.HELD, ReserveOutcome.GRANTED]
    again = rig.reserve(rig.items([b]), namespace=rig.rows, session="other")
    assert again.outcomes[0].outcome is ReserveOutcome.IN_FLIGHT


def test_each_kind_of_namespace_refuses_the_others_questions(rig: KeyedRig) -> None:
    with pytest.raises(InvalidArgument, match="keyed namespace has no prompts"):
        rig.lookup([], 10, namespace=NamespaceDigest(rig.rows))
    with pytest.raises(InvalidArgument, match="allowed: Lookup, or a keyed namespace"):
        rig.core.contains(rig.main, JoinedKeys(b""), session="r", use=False, lease=False, **rig.now)


def test_a_keyed_namespace_keeps_no_states(rig: KeyedRig) -> None:
    info = rig.core.namespace(rig.rows)
    assert str(info.policy) == "zero"
    assert (rig.core.share_states(info), rig.core.share_tokens(info)) == (0, 0)
    for policy in ("endpoints", "full"):
        with pytest.raises(InvalidArgument, match="no states to keep"):
            rig.core.set_policy(rig.rows, policy)
        with pytest.raises(InvalidArgument, match="no states to keep"):
            rig.core.open_namespace("new", NamespaceIdentity(ROWS, "w2", ""), policy)
    assert str(rig.core.set_policy(rig.rows, "zero").policy) == "zero"


def test_past_the_limits_a_call_is_refused_and_nothing_is_leased() -> None:
    rig = KeyedRig(limits=Limits(contained_keys=2, leased_blocks=1))
    names = rig.keep("a", "b")
    with pytest.raises(LimitExceeded, match="keys=3"):
        rig.contains(rig.names("a", "b", "c"))
    with pytest.raises(LimitExceeded, match="leased_blocks"):
        rig.contains(names, lease=True)
    assert rig.core.open_work == 0
    rig.core.check_integrity()


def test_clearing_one_namespace_leaves_the_other(rig: KeyedRig) -> None:
    names, kept = rig.keep("a", "b"), rig.store(range(64))
    found = rig.contains(names, lease=True)
    cleared, _ = rig.core.clear(rig.rows)
    assert cleared.blocks == 2
    assert rig.contains(names).held == b"\0\0"
    assert rig.lookup(kept, 64, lease=False).coverage.blocks == 2
    assert found.lease_id is not None
    rig.core.check_integrity()
