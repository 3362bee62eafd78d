"""What goes first changes while the service runs: nothing is lost by it, and the next start has its configuration again."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import grpc
import pytest

from kvstore.policy import EVICTION_POLICIES
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, error_of
from tests.support.service import running_service


def eviction(raw: Raw, policy: str = "") -> str:
    answer: pb.Eviction = raw.admin.SetEviction(pb.SetEvictionRequest(policy=policy), timeout=20)
    assert list(answer.policies) == list(EVICTION_POLICIES)
    return answer.policy


def test_every_policy_takes_over_what_is_held_and_the_store_goes_on_within_its_budget() -> None:
    with running_service(disk=8 << 20, segment=1 << 20) as service, Raw(service.directory) as raw:
        assert eviction(raw) == "lru"
        namespace = raw.open("switched")
        kept = Chain(namespace, 9, seed=1)
        raw.store(kept)
        seed = 2
        for name in [*EVICTION_POLICIES, "lru"]:
            before = raw.stats()["blocks"]
            assert eviction(raw, name) == name
            assert raw.stats()["blocks"] == before, "a switch takes nothing"
            for _ in range(4):
                raw.store(Chain(namespace, 100, seed=seed))
                seed += 1
                found = raw.lookup(kept)
                raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id))
                # A policy may have taken any tail of it.
                if found.blocks_held < 9:
                    raw.store(kept, first=found.blocks_held)
                    found = raw.lookup(kept)
                    raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id))
                assert found.blocks_held == 9
        assert raw.stats()["evicted_blocks_total"] > 0, "room was wanted"
        assert eviction(raw) == "lru"
        with pytest.raises(grpc.RpcError) as refused:
            eviction(raw, "best")
        assert error_of(refused.value) == "INVALID_ARGUMENT"


def test_the_command_line_shows_and_changes_it_and_a_start_has_what_it_is_told() -> None:
    def kvstore(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvstore.cli.main", *args]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False
        )

    with running_service(eviction="arc") as service:
        at = ("--dir", str(service.directory))
        told = kvstore("policy", "eviction", *at, "--json", "-")
        assert json.loads(told.stdout)["eviction"] == "arc", told
        assert kvstore("policy", "eviction", "s3fifo", *at).stdout.startswith("s3fifo (of lru, ")
        wrong = kvstore("policy", "eviction", "best", *at)
        assert (wrong.returncode, wrong.stdout) == (1, "")
        assert "best" in wrong.stderr
        assert "sieve" in wrong.stderr
