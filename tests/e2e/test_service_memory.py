"""What the block cache and the pool may take changes while the service runs, and nothing that anybody reads goes."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from kvstore.memory import why_not_mapped
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, error_of
from tests.support.mapping import Mapped, header_of
from tests.support.polling import wait_for
from tests.support.service import ServiceProcess, running_service

pytestmark = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "it is mapped")

CACHE = 256 << 20


@pytest.fixture
def service() -> Iterator[ServiceProcess]:
    with running_service(memory=1 << 30, cache=CACHE, pool=16 << 20) as service:
        yield service


def memory(raw: Raw, **sizes: int) -> pb.Memory:
    answer: pb.Memory = raw.admin.SetMemory(pb.SetMemoryRequest(**sizes), timeout=20)
    return answer


def test_without_sizes_it_only_tells(service: ServiceProcess) -> None:
    with Raw(service.directory) as raw:
        told = memory(raw)
        assert (told.cache_budget, told.pool_budget) == (CACHE, 16 << 20)
        assert (told.cache_allocated, told.pool_held) == (0, 0)


def test_the_cache_shrinks_around_what_a_session_maps_and_follows_when_it_ends(
    service: ServiceProcess,
) -> None:
    with Raw(service.directory) as raw:
        chain = Chain(raw.open("shrinking"), 9, seed=1)
        raw.store(chain)
        with Raw(service.directory) as reader:
            mapped = Mapped(reader)
            found = reader.lookup(chain)
            shown = mapped.map(found.lease_id, count=9)
            told = memory(raw, cache=0)
            assert told.cache_budget == 0
            assert told.cache_allocated > 0, "who maps it keeps it"
            assert all(mapped.is_current(each) for each in shown)
            assert all(chain.is_right(header_of(each), mapped.payload(each)) for each in shown)
            mapped.close()
        wait_for(lambda: memory(raw).cache_allocated == 0)
        found = raw.lookup(chain)
        assert len(raw.fetch(found.lease_id, count=9)) == 9, "without a cache it is read from the disk"
        assert memory(raw, cache=CACHE).cache_budget == CACHE
        raw.fetch(found.lease_id, count=9)
        assert 0 < memory(raw).cache_allocated <= CACHE


def test_a_smaller_pool_lets_states_go(service: ServiceProcess) -> None:
    with Raw(service.directory) as raw:
        chain = Chain(raw.open("pooled"), 9, seed=1)
        raw.store(chain)
        raw.store_items(chain.namespace, [chain.state(8, pool=True, ssd=False)])
        assert memory(raw).pool_held == chain.namespace.state_bytes
        assert memory(raw, pool=0).pool_held == 0
        assert memory(raw, pool=16 << 20).pool_budget == 16 << 20


def test_more_than_the_machine_has_is_refused_and_changes_nothing(service: ServiceProcess) -> None:
    with Raw(service.directory) as raw, pytest.raises(grpc.RpcError) as caught:
        memory(raw, cache=1 << 59, pool=1)
    assert error_of(caught.value) == "LIMIT_EXCEEDED"
    with Raw(service.directory) as raw:
        assert memory(raw).pool_budget == 16 << 20
