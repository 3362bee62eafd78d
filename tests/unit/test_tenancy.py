"""Rates, bytes on their way, and callers: what a tenant may take, and what a call may name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvstore.errors import LimitExceeded
from kvstore.policy.limits import TenantLimits, full, spend
from kvstore.service.callers import Access, Caller, both
from kvstore.service.tenancy import Tenancy
from kvstore.service.tenants import TenantsFile
from kvstore.service.tokens import Tokens


class Rig:
    def __init__(self, **limits: float) -> None:
        self.now = 100.0
        self.counts: Counter[str] = Counter()
        self.tenancy = Tenancy(lambda: self.now, self.counts)
        self.tenancy.adopt(TenantsFile(limits={"t": TenantLimits(**limits)}))  # type: ignore[arg-type]


def test_a_bucket_holds_its_rate_in_the_long_run_whatever_is_asked() -> None:
    bucket, spent, now = full(10.0, 0.0), 0.0, 0.0
    for step in range(4000):
        now += 0.01
        bucket, wait = spend(bucket, 1 + step % 7, rate=10.0, now=now)
        spent += 0 if wait else 1 + step % 7
    assert 10.0 * 39 <= spent <= 10.0 * 41


def test_a_bucket_says_when_to_come_back() -> None:
    bucket, wait = spend(full(10.0, 0.0), 30.0, rate=10.0, now=0.0)
    assert (bucket.level, wait) == (-20.0, 0.0)
    bucket, wait = spend(bucket, 1.0, rate=10.0, now=1.0)
    assert wait == pytest.approx(1.1)
    assert spend(bucket, 1.0, rate=10.0, now=2.2)[1] == 0.0


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket, _ = spend(full(1.0, 50.0), 1.0, rate=1.0, now=50.0)
    assert spend(bucket, 1.0, rate=1.0, now=40.0)[1] > 0


def test_calls_past_a_tenants_rate_are_refused_by_name_and_others_are_not() -> None:
    rig = Rig(calls_per_second=2.0)
    for _ in range(2):
        rig.tenancy.begin("t")
    with pytest.raises(LimitExceeded, match=r"tenant\.calls_per_second=.*allowed: 2 a second"):
        rig.tenancy.begin("t")
    rig.tenancy.begin("other")
    rig.now += 0.6
    rig.tenancy.begin("t")
    assert rig.counts["tenant_rate_refused_total"] == 1


def test_bytes_on_their_way_are_bounded_and_one_large_item_passes_alone() -> None:
    rig = Rig(in_flight=100)
    with rig.tenancy.moving("t", 1000):
        with pytest.raises(LimitExceeded, match=r"tenant\.in_flight=1001"):
            rig.tenancy.take("t", 1)
        rig.tenancy.take("other", 1000)
    rig.tenancy.take("t", 60)
    rig.tenancy.take("t", 40)
    with pytest.raises(LimitExceeded):
        rig.tenancy.take("t", 1)
    rig.tenancy.give_back("t", 60)
    rig.tenancy.take("t", 1)
    assert (rig.tenancy.in_flight("t"), rig.counts["tenant_in_flight_refused_total"]) == (41, 2)


def test_bytes_stay_counted_while_limits_come_and_go() -> None:
    rig = Rig(in_flight=100)
    rig.tenancy.take("t", 90)
    rig.tenancy.adopt(TenantsFile())
    rig.tenancy.take("t", 900)
    rig.tenancy.adopt(TenantsFile(limits={"t": TenantLimits(in_flight=100)}))
    with pytest.raises(LimitExceeded):
        rig.tenancy.take("t", 1)
    rig.tenancy.give_back("t", 990)
    assert rig.tenancy.in_flight("t") == 0


def test_a_token_and_a_certificate_are_good_for_what_both_are_good_for() -> None:
    everybody, one = Caller("token 1"), Caller("token of a", frozenset({"a"}))
    two = Caller("certificate c", frozenset({"a", "b"}))
    for token, certificate, tenants in (
        (everybody, two, {"a", "b"}),
        (one, two, {"a"}),
        (one, Caller("certificate d", frozenset({"b"})), set()),
        (None, two, {"a", "b"}),
    ):
        made = both(token, certificate)
        assert made is not None
        assert made.tenants == tenants


def test_certificates_that_a_tenants_file_does_not_name_let_nobody_in() -> None:
    named = Access(named={"c": Caller("certificate c", frozenset({"a"}))}, has_certificates=True)
    assert named.by_certificate(["x"]) is None
    assert named.by_certificate([]) is None
    found = named.by_certificate(["x", "c"])
    assert found is not None
    assert found.tenants == {"a"}
    without = Access(has_certificates=True).by_certificate(["x"])
    assert without is not None
    assert without.tenants is None


def test_a_token_for_administration_has_no_part_in_the_cache() -> None:
    access = Access(
        Tokens(["a-common-token-of-all"]), [Caller("token 1")], admin=Tokens(["an-admin-token-alone"])
    )
    admin = access.by_token(["Bearer an-admin-token-alone"])
    assert admin is not None
    assert (admin.is_admin, admin.may_use("a")) == (True, False)
    common = access.by_token(["Bearer a-common-token-of-all"])
    assert common is not None
    assert not common.is_admin
    assert access.by_token(["Bearer neither"]) is None
    assert access.by_token(["Bearer a-common-token-of-all"] * 2) is None


def access_of(*tokens: str, tenants: str = "a", admin: str = "an-admin-token-alone", **more: Any) -> Access:
    callers = [Caller(f"token of {tenants}", frozenset(tenants)) for _ in tokens]
    return Access(Tokens(tokens), callers, admin=Tokens([admin]), **more)


def test_who_was_let_in_is_good_for_as_long_as_he_would_be_let_in_for_the_same_tenants() -> None:
    before = access_of("a-token-of-mine-first", "a-token-of-mine-second")
    first = before.by_token(["Bearer a-token-of-mine-first"])
    admin = before.by_token(["Bearer an-admin-token-alone"])
    assert first is not None
    assert admin is not None
    assert "first" not in repr(first)
    for access, good in (
        (before, (True, True)),
        # Its number may be another one.
        (access_of("a-token-that-is-new-here", "a-token-of-mine-first"), (True, True)),
        (access_of("a-token-of-mine-second"), (False, True)),
        (access_of("a-token-of-mine-first", tenants="ab"), (False, True)),
        (access_of("a-token-of-mine-first", admin="another-admin-token"), (True, False)),
        (access_of("an-admin-token-alone", admin="another-admin-token"), (False, False)),
    ):
        assert (access.is_good(first), access.is_good(admin)) == good


def test_a_certificate_is_good_while_its_names_are_good_for_the_same_tenants() -> None:
    def access(**named: str) -> Access:
        callers = {name: Caller(f"certificate {name}", frozenset(of)) for name, of in named.items()}
        return Access(named=callers, has_certificates=True, needs_token=False)

    caller = access(c="a", d="b").by_certificate(["x", "c"])
    assert caller is not None
    assert access(c="a").is_good(caller)
    assert not access(c="ab").is_good(caller)
    assert not access(d="a").is_good(caller)
    assert not access_of("a-token-of-mine-first").is_good(caller), "where a token is needed it has none"
