"""The tier as vLLM calls it, over a real service; vLLM itself is a double here, and the real one in tests/engines."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from kvstore.errors import ConfigError, InvalidArgument
from kvstore.profile.registry import get_profile
from kvstore_client import CacheClient
from kvstore_vllm.figures import FIGURES, metric_of
from kvstore_vllm.register import register
from tests.support.docks import pool_file
from tests.support.remote import make_secrets, port_of, write_private
from tests.support.service import ServiceProcess, running_service
from tests.support.vllm_double import (
    ROW,
    ROWS,
    Medium,
    Request,
    Scheduler,
    SecondaryTierFactory,
    spec,
    steps,
    vllm_double,
)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as made:
        yield made


@pytest.fixture(autouse=True)
def tier_module() -> Iterator[Any]:
    with vllm_double() as module:
        yield module


@pytest.fixture(params=["own memory", "a file"])
def pools(request: pytest.FixtureRequest) -> str:
    """What engines' pools are made of: of a file the service moves rows by itself, where it is on this machine."""
    return str(request.param)


@contextmanager
def pool_of(kind: str, size: int) -> Iterator[Any]:
    if kind == "a file":
        with pool_file(size) as (_, memory):
            yield memory
    else:
        yield bytearray(size)


@contextmanager
def engine(
    module: Any,
    address: Path | str,
    *,
    changed: dict[str, Any] | None = None,
    rows: int = ROWS,
    row: int = ROW,
    pool: str = "own memory",
    **own: Any,
) -> Iterator[Scheduler]:
    with pool_of(pool, rows * row) as memory, memoryview(memory).cast("B", (rows, row)) as view:
        tier = module.KvstoreTier(
            offloading_spec=spec(**changed or {}),
            primary_kv_view=view,
            tier_type="kvstore",
            backpressure_detector=None,
            address=str(address),
            **own,
        )
        scheduler = Scheduler(tier, memory, row=row)
        try:
            yield scheduler
        finally:
            tier.shutdown()
            scheduler.pool.release()


def request(name: str, count: int = 8, groups: int = 1) -> Request:
    keys = [
        b"%s-%d" % (name.encode(), number) + group.to_bytes(4, "big")
        for group in range(groups)
        for number in range(count)
    ]
    places = {key: (at % count + 1) * 32 for at, key in enumerate(keys)}
    return Request(name, keys, places)


def computed(key: bytes) -> bytes:
    return (key * ROW)[:ROW]


def counts(scheduler: Scheduler) -> dict[str, float]:
    stats = scheduler.tier.get_stats()
    return {} if stats is None else {name.rpartition("_kvstore_")[2]: n for name, n in stats.counters.items()}


def test_what_one_engine_computed_another_loads(
    tier_module: Any, service: ServiceProcess, pools: str
) -> None:
    asked = request(f"shared {pools}", groups=2)
    with engine(tier_module, service.directory, pool=pools) as first:
        assert first.run(asked, computed) == 0
        first.settle()
        assert counts(first) == {"keys_asked": 16, "rows_stored": 16}
    with engine(tier_module, service.directory, pool=pools) as second:
        assert second.run(asked, computed) == 16
        assert [second.bytes_of(key) for key in asked.keys] == list(map(computed, asked.keys))
        with CacheClient(service.directory, owner="admin") as admin:
            moved = admin.stats()
        assert (moved["dock_fetched_bytes_total"] > 0) is (pools == "a file")
        assert (moved["dock_written_bytes_total"] > 0) is (pools == "a file")
        longer = Request("longer", [*asked.keys, b"more " + pools.encode() + bytes(4)])
        assert second.run(longer, computed) == 0, "what the pool holds is not asked for"
        second.settle()
        assert counts(second)["rows_loaded"] == 16


def test_who_does_not_lend_its_pool_has_its_rows_copied(tier_module: Any, service: ServiceProcess) -> None:
    asked = request("not lent", 4)
    with CacheClient(service.directory, owner="admin") as admin:
        before = admin.stats()
        for expected in (0, 4):
            with engine(tier_module, service.directory, pool="a file", pool_file=False) as scheduler:
                assert scheduler.run(asked, computed) == expected
                scheduler.settle()
        after = admin.stats()
    for name in ("dock_written_bytes_total", "dock_fetched_bytes_total"):
        assert after[name] == before[name]


def test_engines_that_differ_in_what_bytes_depend_on_share_nothing(
    tier_module: Any, service: ServiceProcess
) -> None:
    asked = request("apart", 3)
    with engine(tier_module, service.directory, salt="a") as first:
        first.run(asked, computed)
        first.settle()
    others: list[dict[str, Any]] = [
        {"salt": "../a"},
        {"salt": "a", "revision": "2"},
        {"salt": "a", "changed": {"model": SimpleNamespace(name="tiny", dtype="bfloat16")}},
        {"salt": "a", "changed": {"kv_cache_layout": "BLHNC"}},
        {"salt": "a", "changed": {"kv_cache_layout": "BLHNC", "canonical_layout": True}},
    ]
    for other in others:
        with engine(tier_module, service.directory, **other) as scheduler:
            assert scheduler.run(asked, computed) == 0
    with engine(tier_module, service.directory, salt="a") as again:
        assert again.run(asked, computed) == 3


def test_without_a_service_all_is_a_miss_until_it_comes_and_again_after_it_has_gone(
    tier_module: Any, service: ServiceProcess, pools: str
) -> None:
    with ExitStack() as stack:
        service.stop()
        scheduler = stack.enter_context(engine(tier_module, service.directory, pool=pools, rows=512))
        assert scheduler.run(request("absent"), computed) == 0
        scheduler.settle()
        assert not any(result.success for result in scheduler.results)
        service.start()
        stored = until_stored(scheduler, "there")
        service.kill()
        assert scheduler.run(request("killed"), computed) == 0
        scheduler.settle()
        service.start()
        until_stored(scheduler, "back")
        other = stack.enter_context(engine(tier_module, service.directory, pool=pools))
        assert other.run(stored, computed) == len(stored.keys)
        assert counts(scheduler)["calls_failed"] > 0


def test_a_service_that_stands_still_holds_no_request_up_for_long(
    tier_module: Any, service: ServiceProcess, pools: str
) -> None:
    with engine(tier_module, service.directory, pool=pools) as scheduler:
        asked = request(f"still {pools}", 4)
        scheduler.run(asked, computed)
        scheduler.settle()
        with service.suspended():
            begin = time.monotonic()
            for number in range(3):
                assert scheduler.run(request(f"{pools} {number}", 4), computed) == 0
            took = time.monotonic() - begin
        # Each waits for the answer as long as it was told to, and the last one's step may be late on a busy machine.
        assert took < 3 * 1.0 + 10.0
        assert counts(scheduler)["calls_failed"] > 0
        scheduler.settle()
        until_stored(scheduler, "again")


def until_stored(scheduler: Scheduler, name: str) -> Request:
    """Requests until one is stored: after a failure the client does not call for a moment."""
    for number, _ in enumerate(steps()):
        asked = request(f"{name}{number}", 1)
        scheduler.results.clear()
        scheduler.run(asked, computed)
        scheduler.settle()
        if all(result.success for result in scheduler.results):
            return asked
    raise AssertionError("not reached: steps have an end of their own")


def test_what_is_lost_between_lookup_and_load_is_computed(
    tier_module: Any, service: ServiceProcess, pools: str
) -> None:
    asked = request(f"lost {pools}", 6)
    with engine(tier_module, service.directory, pool=pools, salt="lost") as first:
        first.run(asked, computed)
        first.settle()
    with (
        engine(tier_module, service.directory, pool=pools, salt="lost") as second,
        CacheClient(service.directory, owner="admin") as admin,
    ):
        submit = second.tier.submit_load

        def lose(job: Any) -> None:
            admin.clear(second.tier._tier._store.digest)
            submit(job)

        second.tier.submit_load = lose
        assert second.run(asked, computed) == 0
        assert [second.bytes_of(key) for key in asked.keys] == list(map(computed, asked.keys))
        second.settle()
        assert counts(second)["rows_load_failed"] == 6


V4_ROW = 1_003_520
"""A block of 1,002,240 bytes, which is what vLLM moves of DeepSeek V4 for any of its groups, in whole pages."""
V4_GROUPS = {0: (64, 2), 1: (64, 2), 2: (256, 0), 3: (4, 2), 4: (8, 16)}
"""Of each: tokens of a block, and how many blocks before a boundary a resume needs; 0: all of them."""


def v4_prompt(tokens: int) -> Request:
    """The keys that a resume at the end of `tokens` tokens needs, group by group."""
    keys, places = [], {}
    for group, (size, window) in V4_GROUPS.items():
        last = tokens // size
        for number in range(last - window if window else 0, last):
            key = b"v4-%d" % number + group.to_bytes(4, "big")
            keys.append(key)
            places[key] = (number + 1) * size
    return Request(f"v4-{tokens}", keys, places)


def test_the_five_groups_of_deepseek_v4_at_full_size(
    tier_module: Any, service: ServiceProcess, pools: str
) -> None:
    groups = tuple(
        SimpleNamespace(tokens_per_block=size, layer_names=(f"g{group}",), group_id=group)
        for group, (size, _) in V4_GROUPS.items()
    )
    size = {"changed": {"groups": groups}, "rows": 32, "row": V4_ROW}

    def made(key: bytes) -> bytes:
        return key.ljust(1024, b".") * (V4_ROW // 1024)

    asked = v4_prompt(1024)
    size["salt"] = pools
    with (
        engine(tier_module, service.directory, pool=pools, **size) as first,
        CacheClient(service.directory, owner="admin") as admin,
    ):
        before = admin.stats()
        first.run(asked, made)
        first.settle()
        after = admin.stats()
    stored = after["committed_bytes_total"] - before["committed_bytes_total"]
    entries = 4 * V4_ROW
    boundary = 22 * V4_ROW
    assert stored == entries + boundary
    assert boundary == 22_077_440
    assert 6 < boundary / get_profile("deepseek-v4-flash").state_bytes < 6.2
    with engine(tier_module, service.directory, pool=pools, **size) as second:
        assert second.run(asked, made) == len(asked.keys) == 26
        assert all(second.bytes_of(key) == made(key) for key in asked.keys)
        second.settle()


def test_what_was_stored_is_told_to_subscribers(tier_module: Any, service: ServiceProcess) -> None:
    asked = request("events", 4)
    with engine(tier_module, service.directory, enable_kv_events=True, locality="LOCAL") as scheduler:
        assert list(scheduler.tier.take_events()) == []
        scheduler.run(asked, computed)
        scheduler.settle()
        [event] = scheduler.tier.take_events()
        assert (event.keys, event.medium, event.removed) == (asked.keys, Medium.STORAGE, False)
        assert event.locality.name == "LOCAL"
        assert list(scheduler.tier.take_events()) == []


def test_drain_leaves_every_job_with_a_result(tier_module: Any, service: ServiceProcess, pools: str) -> None:
    with engine(tier_module, service.directory, pool=pools, rows=256) as scheduler:
        for number in range(4):
            scheduler.run(request(f"drain {pools} {number}", 16), computed)
        scheduler.tier.drain_jobs()
        scheduler._poll()
        assert scheduler.jobs == {}
        assert not scheduler.tier.has_pending_work()


def test_wrong_configuration_is_refused_at_the_start(tier_module: Any, service: ServiceProcess) -> None:
    for own, error in (
        ({"colour": "red"}, ConfigError),
        ({"store_rows": -1}, ConfigError),
        ({"token_file": "/no/such"}, InvalidArgument),
        ({"locality": "NOWHERE"}, ValueError),
    ):
        with pytest.raises(error), engine(tier_module, service.directory, **own):
            pass


@pytest.mark.parametrize("version", ["0.31.1", "0.34.0", "1.0", "0.3", "0.320.0", "unknown"])
def test_another_engine_version_is_refused_by_name(version: str, service: ServiceProcess) -> None:
    with (
        vllm_double(version) as module,
        pytest.raises(ConfigError, match=r"0\.32 and 0\.33"),
        engine(module, service.directory),
    ):
        pass


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.33.0+cpu", "0.33.1.dev5"])
def test_supported_versions_are_known_by_their_numbers(version: str, service: ServiceProcess) -> None:
    with vllm_double(version) as module, engine(module, service.directory):
        pass


def test_every_count_is_a_metric(tier_module: Any) -> None:
    made = tier_module.KvstoreTier.build_metric_definitions({})
    assert set(made) == {metric_of(name) for name in FIGURES}


def test_the_entry_point_makes_a_short_name_known_and_never_raises() -> None:
    with vllm_double():
        register()
        register()
        assert SecondaryTierFactory.registered == {"kvstore": ("kvstore_vllm.tier", "KvstoreTier")}


def test_without_the_engine_all_but_its_adapter_can_be_imported() -> None:
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "import kvstore_vllm.rows, kvstore_vllm.settings, kvstore_vllm.identity, kvstore_vllm.register as r\n"
        "r.register()\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "False"]


# ---- who is not let in, or may take no more ---------------------------------------------------------------------------


def all_missed(scheduler: Scheduler) -> dict[str, float]:
    """Two requests: nothing is loaded, nothing is stored, all of it within seconds."""
    begin = time.monotonic()
    for name in ("first", "second"):
        assert scheduler.run(request(name, 4), computed) == 0
        scheduler.settle()
    assert time.monotonic() - begin < 30.0
    assert not any(result.success for result in scheduler.results)
    return counts(scheduler)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServiceProcess, Path]]:
    """A service over TCP that asks for certificates, and the folder with its files and clients' certificates."""
    secrets = make_secrets(tmp_path_factory.mktemp("tls"))
    folder = secrets.folder
    ours, foreign = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(folder / "clients.pem")
    past = dt.datetime.now(dt.UTC) - dt.timedelta(days=2)
    for name, cert in {
        "good": ours.issue_cert("engine.example"),
        "expired": ours.issue_cert("engine.example", not_before=past - dt.timedelta(days=1), not_after=past),
        "foreign": foreign.issue_cert("engine.example"),
    }.items():
        (folder / f"{name}.pem").write_bytes(b"".join(part.bytes() for part in cert.cert_chain_pems))
        write_private(folder / f"{name}.key", cert.private_key_pem.bytes())
    text = '[tenant.acme]\ncertificates = ["engine.example"]\n[tenant."../x"]\nquota = 0\ncertificates = ["engine.example"]\n'
    write_private(folder / "tenants.toml", text.encode())
    write_private(folder / "wrong", b"a-token-that-nobody-knows")
    with running_service(
        **secrets.options, tls_client_ca=str(folder / "clients.pem"), tenants=str(folder / "tenants.toml")
    ) as made:
        yield made, folder


def reached(
    guarded: tuple[ServiceProcess, Path], cert: str, token: str = "tokens", **own: Any
) -> dict[str, Any]:
    service, folder = guarded
    (folder / "one").write_text((folder / token).read_text().splitlines()[0])
    return {
        "address": f"tcp://localhost:{port_of(service)}",
        "ca": str(folder / "issuer.pem"),
        "cert": str(folder / f"{cert}.pem"),
        "key": str(folder / f"{cert}.key"),
        "token_file": str(folder / "one"),
        **own,
    }


def test_a_tenants_certificate_and_token_let_an_engine_in(
    tier_module: Any, guarded: tuple[ServiceProcess, Path]
) -> None:
    for expected in (0, 4):
        with engine(tier_module, **reached(guarded, "good", salt="acme")) as scheduler:
            assert scheduler.run(request("let-in", 4), computed) == expected
            scheduler.settle()


@pytest.mark.parametrize(
    ("cert", "own"),
    [
        ("good", {"token": "wrong", "salt": "acme"}),
        ("foreign", {"salt": "acme"}),
        ("good", {"salt": "../x"}),
        ("good", {"salt": "somebody-elses"}),
    ],
    ids=["wrong token", "foreign certificate", "quota zero", "another tenant"],
)
def test_who_is_not_let_in_or_has_no_quota_misses_and_goes_on(
    tier_module: Any, guarded: tuple[ServiceProcess, Path], cert: str, own: dict[str, Any]
) -> None:
    with engine(tier_module, **reached(guarded, cert, **own)) as scheduler:
        found = all_missed(scheduler)
    assert found["calls_failed"] > 0
    assert found["rows_store_failed"] + found.get("rows_store_refused", 0) == 8
    assert "rows_loaded" not in found


def test_an_expired_certificate_is_refused_at_the_start(
    tier_module: Any, guarded: tuple[ServiceProcess, Path]
) -> None:
    with (
        pytest.raises((ConfigError, InvalidArgument), match="the client's certificate has expired"),
        engine(tier_module, **reached(guarded, "expired", salt="acme")),
    ):
        pass
