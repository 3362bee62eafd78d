"""Rules that hold for every test: what is required must not be skipped, and seeds can be set from outside."""

from __future__ import annotations

import os
from pathlib import Path

# gRPC reads it when it is imported. Its own fork handlers crash the child of a process with an asynchronous channel over TCP
# now and then (grpcio 1.85); without them a child that leaves gRPC alone, as ours are made to, is safe.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Torch's threads read it. Threads that wait for each other by spinning take from each other what cores there are.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

APART = frozenset({"test_simulate_traces.py"})

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


class ByFile(LoadScopeScheduling):
    """Each file to one process, so that what a module starts for all its tests is started once; but for long tests that share
    nothing, which fill up whichever process is free."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return nodeid if Path(file).name in APART else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)
