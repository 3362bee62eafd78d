"""Window rows, exactness, policies and rates over the wire."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable

import pytest

from kvstore.profile.layout import rows_needed, state_layout
from kvstore.profile.registry import get_profile
from kvstore.service.encode import COVERAGE_EDGES
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, put_handoff
from tests.support.service import running_service

TINY, FLASH = get_profile("tiny"), get_profile("flash-slim")


def wait_for(read: Callable[[], bool], seconds: float = 10.0) -> None:
    """Ask again until it is so; the question itself takes a while, so this needs no pause."""
    end = time.monotonic() + seconds
    while not read():
        assert time.monotonic() < end, "it did not come to be"


# ---- rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_a_resume_from_rows_is_planned_fetched_and_outlives_a_kill(overlap: bool) -> None:
    with running_service(segment=32 << 20, prompt_tokens=4096) as service:
        with Raw(service.directory) as raw:
            policy = "full+overlap" if overlap else "full"
            namespace = raw.open("rows", profile="flash-slim", policy=policy)
            chain = Chain(namespace, 4, seed=1)
            items = [chain.block(i) for i in range(4)] + [chain.rows(i, overlap=overlap) for i in range(4)]
            assert raw.store_items(namespace, items).items == 8
            assert raw.reserve(namespace, [chain.rows(3, overlap=overlap)]).outcomes == [pb.HELD]
            saves = raw.lookup(chain, lease=False).plan.save_states
            assert (saves.rows, saves.rows_overlap, list(saves.ssd)) == (True, overlap, [])
        for again in (False, True):
            if again:
                service.restart()
            with Raw(service.directory) as raw:
                found = raw.lookup(chain)
                chosen = found.plan.chosen
                needed = rows_needed(FLASH, 512, overlap=overlap)
                assert (chosen.state_source, chosen.compute_from) == (pb.ROWS, 512)
                assert (chosen.state_at, chosen.replay_from) == (needed.state_at, needed.state_at)
                edges = (list(found.coverage.rows), list(found.coverage.rows_overlap))
                assert edges == (([], [512]) if overlap else ([512], []))
                fetched = raw.fetch(found.lease_id, first=3, count=1, state=True)
                assert [(header.kind, header.index) for header, _ in fetched] == [
                    (pb.BLOCK, 3),
                    *((pb.WINDOW_ROWS, i) for i in range(needed.first_block, 4)),
                ]
                assert all(chain.is_right(header, data) for header, data in fetched)
                values = raw.stats()
                assert (values["rows_ssd"], values["states_ssd"]) == (4, 4)
                assert values["rows_ssd_bytes"] == sum(item.length for item in items[4:])
                dropped = raw.admin.DropStates(pb.DropStatesRequest(tier=pb.STATE_TIER_SSD), timeout=10)
                assert dropped.kept == needed.blocks
                if again:
                    assert (dropped.dropped, raw.stats()["rows_ssd"]) == (4 - needed.blocks, needed.blocks)
                else:
                    missing = [chain.rows(i, overlap=overlap) for i in range(needed.first_block)]
                    raw.store_items(namespace, missing)


def test_a_clear_is_of_rows_too_also_after_a_restart() -> None:
    with running_service() as service:
        with Raw(service.directory) as raw:
            namespace = raw.open("cleared")
            chain = Chain(namespace, 2, seed=2)
            raw.store_items(namespace, [chain.block(0), chain.rows(0), chain.block(1), chain.rows(1)])
            cleared = raw.admin.Clear(pb.ClearRequest(namespace=namespace.digest), timeout=10)
            assert (cleared.blocks, cleared.states) == (2, 2)
            raw.store_items(namespace, [chain.block(0)])
        service.restart()
        with Raw(service.directory) as raw:
            found = raw.lookup(chain, lease=False)
            assert (found.coverage.blocks, list(found.coverage.rows)) == (1, [])
            assert raw.stats()["rows_ssd"] == 0


def test_rows_hold_to_the_share_of_states() -> None:
    share = (12 * TINY.rows_block_bytes + 0.5) / (64 << 20)
    with (
        running_service(disk=64 << 20, segment=1 << 20, states_share=share, prompt_tokens=400) as service,
        Raw(service.directory) as raw,
    ):
        namespace = raw.open("share", policy="full")
        assert namespace.states_share_tokens == 12 * 32
        chains = [Chain(namespace, 12, seed=seed) for seed in (30, 31, 32)]
        for chain in chains:
            for i in range(12):
                raw.store_items(namespace, [chain.block(i), chain.rows(i)])
        values = raw.stats()
        assert (values["blocks"], values["rows_ssd"], values["evicted_states_total"]) == (36, 12, 24)
        assert values["states_ssd_bytes"] <= values["states_ssd_budget_bytes"]
        edges = [list(raw.lookup(chain, lease=False).coverage.rows) for chain in chains]
        assert edges == [[], [], [12 * 32]]


# ---- exactness ----------------------------------------------------------------------------------------------


def test_approximate_bytes_are_for_those_who_ask_for_them(raw: Raw, namespace: pb.Namespace) -> None:
    chain = Chain(namespace, 6, seed=4)
    bounded = [chain.block(i, lineage=pb.LINEAGE_BOUNDED) for i in range(2, 6)]
    raw.store_items(namespace, [chain.block(0), chain.block(1), *bounded])
    held = {
        exactness: raw.lookup(chain, lease=False, exactness=exactness).plan
        for exactness in (pb.EXACTNESS_UNSPECIFIED, pb.EXACT, pb.BOUNDED)
    }
    assert {name: plan.chosen.compute_from for name, plan in held.items()} == {
        pb.EXACTNESS_UNSPECIFIED: 64,
        pb.EXACT: 64,
        pb.BOUNDED: 192,
    }
    assert [plan.exactness for plan in held.values()] == [pb.EXACT, pb.EXACT, pb.BOUNDED]
    # The exact turn stores what it computed, and the next exact one hits.
    raw.store_items(namespace, [chain.block(i) for i in range(2, 6)])
    again = raw.lookup(chain, lease=False).plan
    assert (again.chosen.compute_from, again.exactness) == (192, pb.EXACT)


def test_a_model_that_was_trained_for_it_gets_bounded_plans_unless_it_asks_for_exact_ones(raw: Raw) -> None:
    profile = get_profile("deepseek-v4.1-flash")
    assert profile.bounded_is_trained
    namespace = raw.call(
        "OpenNamespace",
        pb.OpenNamespaceRequest(
            name="trained",
            profile=pb.Profile(name=profile.name, geometry=profile.geometry()),
            tenant_salt="trained",
        ),
    )
    chain = Chain(namespace, 40, seed=5)
    for i in range(40):
        raw.store_items(namespace, [chain.block(i)])
    for exactness, source in (
        (pb.EXACTNESS_UNSPECIFIED, pb.BOUNDED),
        (pb.BOUNDED, pb.BOUNDED),
        (pb.EXACT, pb.EXACT),
    ):
        plan = raw.lookup(chain, lease=False, exactness=exactness).plan
        assert (plan.chosen.state_source, plan.exactness) == (pb.REPLAY, source)


# ---- policies and rates -------------------------------------------------------------------------------------


def test_a_namespace_tells_of_how_many_tokens_the_share_holds_the_states() -> None:
    with running_service(disk=1 << 30, states_share=0.25, prompt_tokens=4096) as service:
        with Raw(service.directory) as raw:
            namespace = raw.open("told")
            share = 1 << 28
            wanted = {
                "zero": 0,
                "full": share // TINY.rows_block_bytes * 32,
                "full+overlap": share // TINY.rows_overlap_block_bytes * 32,
                "periodic:64": share // TINY.state_bytes * 64,
            }
            for policy, tokens in wanted.items():
                changed = raw.admin.SetPolicy(
                    pb.SetPolicyRequest(namespace=namespace.digest, policy=policy), timeout=10
                )
                assert (changed.policy, changed.states_share_tokens) == (policy, tokens)
            assert raw.open("told").states_share_tokens == wanted["periodic:64"]
        # A smaller share refuses the policy to others, and leaves it where it is.
        service.options["states_share"] = 1e-4
        service.restart()
        with Raw(service.directory) as raw:
            assert raw.open("told").policy == "periodic:64"
            assert "'told' keeps its policy" in service.log


def test_rates_that_one_caller_reports_price_the_plans_of_those_who_know_none(
    raw: Raw, namespace: pb.Namespace
) -> None:
    chain = Chain(namespace, 8, seed=6)
    raw.store(chain)
    nothing = pb.Costs()
    first = raw.lookup(chain, lease=False, costs=nothing).costs
    assert first.seconds_per_layer_token == pytest.approx(2e-5)
    reported = pb.Costs(seconds_per_layer_token=0.5, seconds_per_index_entry=1e-7)
    probed = raw.lookup(chain, lease=False, costs=reported).costs
    assert (probed.seconds_per_layer_token, probed.seconds_per_index_entry) == (0.5, 1e-7)
    assert raw.lookup(chain, lease=False, costs=nothing).costs == first, "a probe is not remembered"
    found = raw.lookup(chain, costs=reported)
    later = raw.lookup(chain, lease=False, costs=nothing).costs
    assert (later.seconds_per_layer_token, later.seconds_per_index_entry) == (0.5, 1e-7)
    raw.fetch(found.lease_id, count=8)
    measured = raw.stats()["ssd_read_seconds_per_byte"]
    assert measured > 0
    last = raw.lookup(chain, lease=False, costs=nothing).costs
    assert last.seconds_per_ssd_byte == pytest.approx(max(measured, last.seconds_per_memory_byte))


def test_a_reply_names_the_deepest_edges_of_a_long_prompt() -> None:
    with running_service() as service, Raw(service.directory) as raw:
        namespace = raw.open("long")
        chain = Chain(namespace, COVERAGE_EDGES + 10, seed=7)
        raw.store(chain, states=range(len(chain.keys)))
        found = raw.lookup(chain, lease=False)
        edges = [32 * (i + 1) for i in range(len(chain.keys))]
        assert list(found.coverage.checkpoints) == edges[-COVERAGE_EDGES:]
        assert (found.coverage.blocks, found.blocks_held) == (len(edges), len(edges))


# ---- handoffs -----------------------------------------------------------------------------------------------


def test_a_take_lasts_longer_than_a_lease_and_comes_back_if_its_bytes_were_not_taken() -> None:
    size = state_layout(FLASH, 200).total_bytes
    payload = os.urandom(size)
    with running_service(lease=0.2, handoff=16 << 20) as service, Raw(service.directory) as raw:
        namespace = raw.open("takes", profile="flash-slim")
        header = {"position": 200, "crc32": zlib.crc32(payload), "seconds": 60.0}
        with Raw(service.directory) as slow:
            ticket = put_handoff(raw, namespace, payload, **header).ticket
            request = pb.TakeHandoffRequest(namespace=namespace.digest, ticket=ticket)
            stream = slow.cache.TakeHandoff(request, timeout=20, metadata=slow.metadata)
            next(stream)
            stream.cancel()
            wait_for(lambda: raw.stats()["handoff_takes_out"] == 0)
            [take_id] = [
                frame.header.take_id
                for frame in slow.call("TakeHandoff", request)
                if frame.HasField("header")
            ]
            chain = Chain(namespace, 1, seed=8)
            raw.store(chain)
            assert raw.lookup(chain, prompt_tokens=129).lease_id
            wait_for(lambda: raw.stats()["expired_leases_total"] >= 1)
            assert raw.stats()["handoff_takes_out"] == 1, "decoding takes longer than a lease lasts"
            assert slow.call("ConfirmHandoff", pb.ConfirmHandoffRequest(take_id=take_id)).was_out
