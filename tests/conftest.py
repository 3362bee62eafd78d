"""Rules that hold for every test: what is required must not be skipped, and seeds can be set from outside."""

from __future__ import annotations

import os

import pytest

REQUIRED = frozenset(filter(None, os.environ.get("KVSTORE_REQUIRE", "").split(",")))


@pytest.fixture
def require():
    """require(name, present, why): skip with `why` unless `present`; fail where KVSTORE_REQUIRE names it."""

    def check(name: str, present: bool, why: str) -> None:
        if present:
            return
        if name in REQUIRED:
            pytest.fail(f"{name} is required by KVSTORE_REQUIRE but missing: {why}")
        pytest.skip(f"{name}: {why}")

    return check
