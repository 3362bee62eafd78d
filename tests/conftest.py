"""Rules that hold for every test: what is required must not be skipped, and seeds can be set from outside."""

from __future__ import annotations

import os

# gRPC reads it when it is imported. Its own fork handlers crash the child of a process with an asynchronous channel over TCP
# now and then (grpcio 1.85); without them a child that leaves gRPC alone, as ours are made to, is safe.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each file to one process, so that what a module starts for all its tests is started once; but for long tests that share
    nothing, which fill up whichever process is free."""
    for item in items:
        if item.get_closest_marker("apart") is None:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
