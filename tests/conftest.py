"""Rules that hold for every test: what is required must not be skipped, and seeds can be set from outside."""

from __future__ import annotations

import os

# gRPC reads it when it is imported. Its own fork handlers crash the child of a process with an asynchronous channel over TCP
# now and then (grpcio 1.85); without them a child that leaves gRPC alone, as ours are made to, is safe.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Torch's threads read it. Threads that wait for each other by spinning take from each other what cores there are.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

SLOWEST = (
    *(
        "test_simulate_traces.py",
        "test_workers_pools.py",
        "test_across_hosts.py",
        "test_workers_processes.py",
    ),
    *("test_workers_engine.py", "test_schedules.py", "test_chaos_attacks.py", "test_cli_interrupts.py"),
    *("test_demo_session.py", "test_workers_failures.py", "test_workers_pipeline.py", "test_service_life.py"),
    *(
        "test_client.py",
        "test_store.py",
        "test_store_every_call.py",
        "test_service_full_disk.py",
        "test_selfcheck.py",
    ),
    *("test_service_writer.py", "test_simulate_rates.py", "test_client_old.py", "test_workers_policies.py"),
)
"""Files that take tens of seconds, first what takes longest: begun first, so that at the end no process waits long for another."""

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
    """Each file to one process, so that what a module starts for all its tests is started once; in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    # That order is by the number of tests in a file.
    config.option.loadscopereorder = False
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {name: rank for rank, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
