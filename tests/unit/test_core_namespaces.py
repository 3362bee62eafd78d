from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvstore.core import Core, Limits, describe, parse_description
from kvstore.errors import (
    FormatTooNew,
    GeometryMismatch,
    InvalidArgument,
    LimitExceeded,
    PolicyTooLarge,
    UnknownNamespace,
)
from kvstore.pool import StatePool
from kvstore.prefix import NamespaceIdentity
from kvstore.profile.registry import PROFILES
from tests.support.core import TINY, B, CoreRig, identity


@pytest.fixture
def rig() -> CoreRig:
    return CoreRig()


def test_opening_again_with_the_same_identity_is_the_same_namespace(rig: CoreRig) -> None:
    again = rig.core.open_namespace("main", identity())
    assert (again.digest, again.is_new, str(again.policy)) == (rig.main, False, "endpoints")
    new = rig.core.open_namespace("other", identity(adapter="o"), "zero")
    assert (new.is_new, str(new.policy)) == (True, "zero")
    assert not rig.core.open_namespace("other", identity(adapter="o"), f"periodic:{B}").is_new
    assert str(rig.core.namespace(new.digest).policy) == "zero", "a known namespace keeps its policy"


def test_one_namespace_may_have_two_names(rig: CoreRig) -> None:
    alias = rig.core.open_namespace("alias", identity())
    assert (alias.digest, alias.name, alias.is_new) == (rig.main, "main", False)
    with pytest.raises(GeometryMismatch):
        rig.core.open_namespace("alias", identity(adapter="x"))


@pytest.mark.parametrize(
    ("field", "changed", "value", "allowed"),
    [
        ("adapter", identity(adapter="x"), "x", "(none)"),
        ("numerics", identity(numerics="n2"), "n2", "n1"),
        ("profile", NamespaceIdentity(replace(TINY, name="tiny2"), "w1", "n1"), "tiny2", "tiny"),
    ],
    ids=["adapter", "numerics", "profile"],
)
def test_a_name_with_another_identity_is_refused_with_what_differs(
    rig: CoreRig, field: str, changed: NamespaceIdentity, value: str, allowed: str
) -> None:
    with pytest.raises(GeometryMismatch) as caught:
        rig.core.open_namespace("main", changed)
    assert (caught.value.field, caught.value.value, caught.value.allowed) == (field, value, allowed)
    assert len(rig.core.namespaces()) == 1


def test_what_one_tenant_calls_its_own_keeps_no_other_from_the_name_and_is_not_told(rig: CoreRig) -> None:
    opened = {
        tenant: rig.core.open_namespace("main", identity(tenant_salt=tenant, adapter=tenant))
        for tenant in ("a", "b")
    }
    assert len({rig.main, *(each.digest for each in opened.values())}) == 3
    assert [each.name for each in rig.core.namespaces()] == ["main"] * 3
    with pytest.raises(GeometryMismatch, match="adapter=x; allowed: b"):
        rig.core.open_namespace("main", identity(tenant_salt="b", adapter="x"))
    rig.core.withdraw_namespace(opened["a"].digest)
    assert not rig.core.open_namespace("main", identity(tenant_salt="b", adapter="b")).is_new
    assert rig.core.open_namespace("main", identity(tenant_salt="a", adapter="x")).is_new
    rig.core.check_integrity()


def test_another_geometry_is_refused_by_name(rig: CoreRig) -> None:
    with pytest.raises(GeometryMismatch) as caught:
        rig.core.open_namespace("main", NamespaceIdentity(replace(TINY, block_tokens=64), "w1", "n1"))
    assert caught.value.field == "geometry"
    assert '"block_tokens":64' in str(caught.value.value)
    assert '"block_tokens":32' in caught.value.allowed


@pytest.mark.parametrize("name", ["", "x" * 129, "two\nlines", "\ud800"])
def test_bad_names_are_refused(rig: CoreRig, name: str) -> None:
    with pytest.raises(InvalidArgument, match="name"):
        rig.core.open_namespace(name, identity(adapter="x"))


def test_a_bad_policy_makes_no_namespace(rig: CoreRig) -> None:
    with pytest.raises(InvalidArgument, match="policy"):
        rig.core.open_namespace("new", identity(adapter="x"), "periodic:31")
    with pytest.raises(UnknownNamespace):
        rig.core.namespace(identity(adapter="x").digest())
    assert rig.core.open_namespace("new", identity(adapter="x")).is_new


def test_a_policy_changes_at_run_time(rig: CoreRig) -> None:
    rig.store(range(4 * B))
    for text, ssd in (("zero", ()), ("endpoints", (7 * B,)), (f"periodic:{2 * B}", (6 * B, 8 * B))):
        assert str(rig.core.set_policy(rig.main, text).policy) == text
        saves = rig.lookup(rig.keys(range(4 * B)), 8 * B, lease=False).plan.save_states
        assert [edge for edge in saves.ssd if edge > 4 * B] == list(ssd)
    with pytest.raises(InvalidArgument):
        rig.core.set_policy(rig.main, "everything")
    with pytest.raises(UnknownNamespace):
        rig.core.set_policy(bytes(32), "zero")


def test_a_policy_must_leave_room_for_the_states_of_the_longest_prompt() -> None:
    longest = 8 * B
    share = 8 * TINY.rows_block_bytes
    core = Core(pool=StatePool(0, 600.0), limits=Limits(prompt_tokens=longest), states_share_bytes=share)
    full = core.open_namespace("full", identity(adapter="f"), "full")
    assert core.share_tokens(full) == longest
    with pytest.raises(PolicyTooLarge):
        core.open_namespace("new", identity(adapter="x"), "full+overlap")
    with pytest.raises(UnknownNamespace):
        core.namespace(identity(adapter="x").digest())
    with pytest.raises(PolicyTooLarge):
        core.set_policy(full.digest, "full+overlap")
    with pytest.raises(PolicyTooLarge, match=f"{share:,} B"):
        core.check_policy(full.digest, "full+overlap")
    assert str(core.namespace(full.digest).policy) == "full"
    zero = core.set_policy(full.digest, "zero")
    assert core.share_tokens(zero) == 0


def test_a_default_policy_that_does_not_fit_is_refused_where_it_would_be_used() -> None:
    core = Core(pool=StatePool(0, 600.0), default_policy="endpoints", states_share_bytes=TINY.state_bytes)
    with pytest.raises(PolicyTooLarge, match="endpoints"):
        core.open_namespace("main", identity())
    assert core.open_namespace("main", identity(), "zero").is_new


def test_a_withdrawn_namespace_is_unknown_and_its_number_is_free(rig: CoreRig) -> None:
    new = rig.core.open_namespace("new", identity(adapter="x"))
    keys = rig.store(range(3 * B), ssd=[2 * B], namespace=new.digest)
    result = rig.lookup(keys, 3 * B + 1, namespace=new.digest)
    cleared = rig.core.withdraw_namespace(new.digest)
    assert (cleared.blocks, cleared.states) == (3, 1)
    with pytest.raises(UnknownNamespace):
        rig.core.namespace(new.digest)
    assert result.lease_id is not None
    lease = rig.core.lease(result.lease_id, "r", rig.clock.monotonic())
    assert rig.core.fetch_list(lease, first_block=0, block_count=3, want_state=True) == [None] * 4
    rig.core.release(result.lease_id, "r", rig.clock.monotonic())
    again = rig.core.open_namespace("new", identity(adapter="y"))
    assert again.is_new
    assert rig.lookup(keys, 3 * B + 1, namespace=again.digest).coverage.blocks == 0
    rig.core.check_integrity()


def test_namespaces_and_names_are_limited() -> None:
    rig = CoreRig(limits=Limits(namespaces=2))
    rig.core.open_namespace("b", identity(adapter="b"))
    with pytest.raises(LimitExceeded, match="namespaces"):
        rig.core.open_namespace("c", identity(adapter="c"))
    for number in range(15):
        assert not rig.core.open_namespace(f"alias{number}", identity()).is_new
    with pytest.raises(LimitExceeded, match="names"):
        rig.core.open_namespace("alias15", identity())
    assert not rig.core.open_namespace("alias", identity(adapter="b")).is_new, "others have their own"


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
def test_a_description_reads_back(profile) -> None:
    original = NamespaceIdentity(profile, "révision", "cpu/f32", adapter="名", tenant_salt="\0")
    assert parse_description(describe(original, 'na"me', "zero")) == (original, 'na"me', "zero")


def test_every_damaged_description_is_refused() -> None:
    payload = describe(identity(adapter="a"), "name", "zero")
    fields = json.loads(payload)
    broken = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        payload[:-1],
        payload + b" ",
        payload.replace(b'"version":1', b'"version":0'),
        json.dumps({**fields, "more": 1}, sort_keys=True, separators=(",", ":")).encode(),
        json.dumps({**fields, "name": 5}, sort_keys=True, separators=(",", ":")).encode(),
        json.dumps({**fields, "geometry": "{}"}, sort_keys=True, separators=(",", ":")).encode(),
        json.dumps(fields, sort_keys=True).encode(),
        b"[" * 100_000,
        *(
            json.dumps(
                {k: v for k, v in fields.items() if k != gone}, sort_keys=True, separators=(",", ":")
            ).encode()
            for gone in fields
        ),
    ]
    for each in broken:
        with pytest.raises(InvalidArgument):
            parse_description(each)


def test_a_description_of_a_later_release_is_refused_by_name() -> None:
    payload = describe(identity(), "name", "zero").replace(b'"version":1', b'"version":2')
    with pytest.raises(FormatTooNew, match="description_version=2"):
        parse_description(payload)
