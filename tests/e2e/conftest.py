"""A service of its own per test file, raw calls to it, and a namespace per test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient
from tests.e2e.service_raw import Raw
from tests.support.service import ServiceProcess, running_service


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service(
        segment=8 << 20, staging=8 << 20, handoff=1 << 20, keys=10_000, sessions=20
    ) as process:
        yield process


@pytest.fixture
def raw(service: ServiceProcess) -> Iterator[Raw]:
    with Raw(service.directory) as made:
        yield made


@pytest.fixture
def namespace(raw: Raw, request: pytest.FixtureRequest) -> pb.Namespace:
    """One of its own for each test."""
    return raw.open(request.node.name[:128])


@pytest.fixture
def admin(service: ServiceProcess) -> Iterator[CacheClient]:
    """A second client of the test's service."""
    with CacheClient(service.directory, owner="test-admin") as client:
        yield client


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """Keeps the namespaces of tests apart."""
    return request.node.name[:100]
