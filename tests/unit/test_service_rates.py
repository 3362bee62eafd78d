"""The rates that plans are priced with: what a caller knows, what others of the namespace said, what was measured."""

from __future__ import annotations

import pytest

from kvstore.plan.base import Costs
from kvstore.service.rates import KEPT_BYTES, NAMESPACES, UNKNOWN, Rates, ReadRate
from kvstore.types import NamespaceDigest

ONE, TWO = NamespaceDigest(b"1" * 32), NamespaceDigest(b"2" * 32)
DEFAULT = Costs()


def costs(**known: float) -> Costs:
    return Costs(**{**dict.fromkeys(UNKNOWN.__slots__, 0.0), **known})


def test_nothing_known_is_the_defaults() -> None:
    assert Rates(ReadRate()).complete(ONE, UNKNOWN) == DEFAULT


def test_a_callers_own_rates_come_first_then_those_reported_in_its_namespace() -> None:
    rates = Rates(ReadRate())
    rates.report(ONE, costs(seconds_per_layer_token=3.0, seconds_per_fetch=4.0))
    rates.report(ONE, costs(seconds_per_layer_token=5.0))
    known = rates.complete(ONE, costs(seconds_per_memory_byte=7.0))
    assert (known.seconds_per_layer_token, known.seconds_per_fetch, known.seconds_per_memory_byte) == (
        5.0,
        4.0,
        7.0,
    )
    assert known.seconds_per_ssd_byte == DEFAULT.seconds_per_ssd_byte
    assert rates.complete(ONE, costs(seconds_per_layer_token=1.0)).seconds_per_layer_token == 1.0
    assert rates.complete(TWO, UNKNOWN) == DEFAULT


def test_a_report_of_nothing_takes_nothing_back() -> None:
    rates = Rates(ReadRate())
    rates.report(ONE, costs(seconds_per_fetch=4.0))
    rates.report(ONE, UNKNOWN)
    assert rates.complete(ONE, UNKNOWN).seconds_per_fetch == 4.0


def test_the_services_own_reads_price_ssd_bytes_and_no_cheaper_than_those_from_memory() -> None:
    rates = Rates(ReadRate())
    rates.reads.note(KEPT_BYTES, 5e-4 * KEPT_BYTES)
    assert rates.complete(ONE, UNKNOWN).seconds_per_ssd_byte == pytest.approx(5e-4)
    slow = rates.complete(ONE, costs(seconds_per_memory_byte=1.0))
    assert slow.seconds_per_ssd_byte == 1.0
    rates.report(ONE, costs(seconds_per_ssd_byte=9.0))
    assert rates.complete(ONE, UNKNOWN).seconds_per_ssd_byte == 9.0, (
        "what a worker measured is all of the way"
    )


def test_the_read_rate_follows_what_was_read_last() -> None:
    rate = ReadRate()
    assert rate.seconds_per_byte == 0.0
    rate.note(KEPT_BYTES, 1.0)
    rate.note(KEPT_BYTES // 2, 3.0)
    assert rate.seconds_per_byte == pytest.approx(3.5 / KEPT_BYTES)
    for _ in range(8):
        rate.note(KEPT_BYTES // 2, 1.0)
    assert rate.seconds_per_byte == pytest.approx(2.0 / KEPT_BYTES, rel=0.02)


def test_a_few_slow_reads_of_little_do_not_price_all_reads() -> None:
    rate = ReadRate()
    rate.note(6_656, 0.004)
    assert rate.seconds_per_byte == pytest.approx(DEFAULT.seconds_per_ssd_byte, rel=0.05)


def test_reports_of_namespaces_that_are_long_silent_are_forgotten() -> None:
    rates = Rates(ReadRate())
    for number in range(NAMESPACES + 1):
        rates.report(NamespaceDigest(number.to_bytes(32, "little")), costs(seconds_per_fetch=4.0))
    assert rates.complete(NamespaceDigest(bytes(32)), UNKNOWN) == DEFAULT
    last = NamespaceDigest(NAMESPACES.to_bytes(32, "little"))
    assert rates.complete(last, UNKNOWN).seconds_per_fetch == 4.0
