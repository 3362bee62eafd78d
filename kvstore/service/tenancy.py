"""What each tenant has on its way and has spent of its rates; past a limit it is refused by name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.errors import LimitExceeded
from kvstore.policy.limits import Bucket, TenantLimits, full, spend
from kvstore.service.tenants import NO_TENANTS_FILE, TenantsFile

NOBODY = ""
"""Of namespaces without a tenant salt: held to the default's limits as one tenant."""

BUCKETS_MAX = 16_384
"""Of tenants that nobody has named, the ones that have paused longest lose theirs, which were full."""


class Tenancy:
    """Limits of tenants, as the tenants' file says. The event loop's thread only."""

    def __init__(self, monotonic: Callable[[], float], counts: Counter[str]) -> None:
        self._monotonic = monotonic
        self._counts = counts
        self._file = NO_TENANTS_FILE
        self._is_limited = False
        self._in_flight: dict[str, int] = {}
        self._buckets: dict[tuple[str, str], Bucket] = {}

    def adopt(self, file: TenantsFile) -> None:
        """Other limits, from now on. What is under way stays counted."""
        self._file = file
        self._is_limited = file != NO_TENANTS_FILE
        self._buckets.clear()

    def limits(self, tenant: str) -> TenantLimits:
        return self._file.of(tenant)

    def quota(self, tenant: str) -> int | None:
        return self._file.of(tenant).quota

    @property
    def has_quotas(self) -> bool:
        """Whether any tenant may have one."""
        file = self._file
        return self._is_limited and any(
            each.quota is not None for each in (file.default, *file.limits.values())
        )

    def in_flight(self, tenant: str) -> int:
        return self._in_flight.get(tenant, 0)

    # ---- calls --------------------------------------------------------------------------------------------------

    def begin(self, tenant: str, *, length: int = 0) -> None:
        """A call of the tenant's begins; it is going to move so many bytes. LimitExceeded past one of its rates."""
        if not self._is_limited:
            return
        limits, now = self._file.of(tenant), self._monotonic()
        if limits.calls_per_second is not None:
            self._spend(tenant, "calls_per_second", 1.0, limits.calls_per_second, now)
        if limits.bytes_per_second is not None and length:
            self._spend(tenant, "bytes_per_second", float(length), limits.bytes_per_second, now)

    def spend_bytes(self, tenant: str, length: int) -> None:
        """As `begin` for a call that has begun."""
        if self._is_limited and (rate := self._file.of(tenant).bytes_per_second) is not None and length:
            self._spend(tenant, "bytes_per_second", float(length), rate, self._monotonic())

    def _spend(self, tenant: str, name: str, amount: float, rate: float, now: float) -> None:
        bucket = self._buckets.pop((tenant, name), None) or full(rate, now)
        bucket, wait = spend(bucket, amount, rate=rate, now=now)
        # Those that were used last stand last.
        self._buckets[tenant, name] = bucket
        if len(self._buckets) > BUCKETS_MAX:
            del self._buckets[next(iter(self._buckets))]
        if wait:
            self._counts["tenant_rate_refused_total"] += 1
            raise LimitExceeded(
                f"the tenant's rate is used up for now; come back in {_seconds(wait)} s",
                field=f"tenant.{name}",
                value=f"{amount:g}",
                allowed=f"{rate:g} a second",
            )

    # ---- bytes on their way -------------------------------------------------------------------------------------

    def take(self, tenant: str, length: int) -> None:
        """Count bytes on their way until `give_back`. LimitExceeded past the limit; what is larger than all of it is for who has
        nothing else on its way."""
        held = self._in_flight.get(tenant, 0)
        limit = self._file.of(tenant).in_flight if self._is_limited else None
        if limit is not None and held and held + length > limit:
            self._counts["tenant_in_flight_refused_total"] += 1
            raise LimitExceeded(
                "too many bytes of the tenant's are on their way; end or commit what is under way, or try again later",
                field="tenant.in_flight",
                value=held + length,
                allowed=f"{limit} bytes, or one item alone",
            )
        self._in_flight[tenant] = held + length

    def give_back(self, tenant: str, length: int) -> None:
        left = self._in_flight.get(tenant, 0) - length
        assert left >= 0, f"{length} bytes given back, {-left} more than were on their way"
        if left:
            self._in_flight[tenant] = left
        else:
            self._in_flight.pop(tenant, None)

    @contextmanager
    def moving(self, tenant: str, length: int) -> Iterator[None]:
        """So many bytes are on their way inside."""
        self.take(tenant, length)
        try:
            yield
        finally:
            self.give_back(tenant, length)

    # ---- the disk -----------------------------------------------------------------------------------------------

    def refuse_quota(self, tenant: str, wanted: int) -> LimitExceeded:
        """The error for what does not fit the tenant's quota though all of its own that may go has gone."""
        self._counts["tenant_quota_refused_total"] += 1
        quota = self.quota(tenant) or 0
        return LimitExceeded(
            "the tenant's quota of the disk does not hold this beside what it leases and writes; end leases, store less, "
            "or have the quota raised"
            if quota
            else "the tenant has no quota of the disk: nothing of it is stored",
            field="tenant.quota",
            value=wanted,
            allowed=f"{quota} bytes",
        )


def _seconds(wait: float) -> str:
    return f"{math.ceil(wait * 1000) / 1000:g}"
