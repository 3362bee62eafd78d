"""A service is upgraded beneath its clients: those of earlier releases are served, and those that run ride through its restart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import KvstoreError
from kvstore_client import CacheClient
from kvstore_client.hello import PROTOCOL
from tests.golden import clients as golden
from tests.support.calls import GONE, look, within
from tests.support.chains import Chain, identity_of
from tests.support.remote import TOKENS, make_secrets, port_of
from tests.support.service import ServiceProcess, running_service, short_directory
from tests.support.vllm_double import ROW, ROWS, Request, Scheduler, spec, steps, vllm_double

FROZEN = sorted(golden.FOLDER.glob("protocol-*.tar.xz"))


class NewerService(ServiceProcess):
    """A release after the next: it speaks protocols that its clients do not know, and still theirs."""

    program = ServiceProcess.program.replace(
        "sys.exit(",
        "import kvstore.service.session as session, kvstore.service.session_calls as calls\n"
        "session.PROTOCOL = calls.PROTOCOL = 3\n"
        "import kvstore.service.figures as figures\n"
        "figures.VERSION = '9.9.9'\n"
        "sys.exit(",
    )


class NextButOneService(NewerService):
    """It has stopped serving this client's protocol."""

    program = NewerService.program.replace(
        "session.PROTOCOL =", "session.OLDEST_PROTOCOL = calls.OLDEST_PROTOCOL = 2\nsession.PROTOCOL ="
    )


def test_the_client_of_todays_protocol_is_frozen() -> None:
    """Where this fails, the protocol was raised: `python ops/dev.py golden`."""
    assert golden.FOLDER / f"protocol-{PROTOCOL}.tar.xz" in FROZEN


@pytest.mark.slow
@pytest.mark.parametrize("archive", FROZEN, ids=lambda path: path.name.partition(".")[0])
def test_clients_of_earlier_releases_are_served_on_every_way(archive: Path, tmp_path: Path) -> None:
    golden.thaw(archive, tmp_path / "client")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    with running_service(handoff=16 << 20, pool=16 << 20, **make_secrets(secrets).options) as service:
        told = {
            "salt": "frozen",
            "local": str(service.directory),
            "remote": f"tcp://localhost:{port_of(service)}",
            "token": TOKENS[0],
            "ca": str(secrets / "issuer.pem"),
        }
        root = tmp_path / "client"
        run = subprocess.run(
            [sys.executable, "-I", str(root / golden.PROGRAM), str(root), json.dumps(told)],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout)["done"] == [
        f"{kind} {way}" for kind in ("sync", "async") for way in ("memory", "unix", "tcp")
    ]


def test_a_client_rides_through_the_stop_and_the_start_of_a_newer_service() -> None:
    with short_directory() as directory, ExitStack() as ends:
        old = ends.enter_context(ServiceProcess(directory))
        client = ends.enter_context(CacheClient(directory, owner="engine"))
        space = client.open_namespace(identity_of(salt="ride"), name="ride")
        chain, later = Chain.of(space, 12, seed=1), Chain.of(space, 12, seed=2)
        chain.store(client, states=[11])
        before = client.boot
        with ExitStack() as lease:
            found = look(client, chain)
            assert found.lease is not None
            lease.enter_context(found.lease)
            assert old.stop() == 0
        with pytest.raises(KvstoreError) as away:
            look(client, chain)
        assert isinstance(away.value, GONE)
        newer = ends.enter_context(NewerService(directory))
        found = within(30, lambda: look(client, chain))
        assert client.boot != before
        assert found.blocks_held == 12
        assert all(item.payload is not None for item in chain.fetch(client, found))
        later.store(client, states=[11])
        assert look(client, later, lease=False).blocks_held == 12
        assert newer.stop() == 0
        # And back: nothing that the newer one wrote is of another format.
        ends.enter_context(ServiceProcess(directory))
        assert within(30, lambda: look(client, later, lease=False)).blocks_held == 12


def test_a_service_that_has_stopped_serving_a_client_says_what_to_do() -> None:
    with (
        short_directory() as directory,
        NextButOneService(directory),
        CacheClient(directory, owner="t") as client,
        pytest.raises(KvstoreError, match="use a client of its release"),
    ):
        client.open_namespace(identity_of(), name="n")


# ---- an engine ----------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler_of() -> Iterator[Callable[[Path], Scheduler]]:
    """Makes an engine's scheduler with the tier on a service's directory."""
    with vllm_double() as module, ExitStack() as ends:

        def make(address: Path) -> Scheduler:
            pool = bytearray(ROWS * ROW)
            view = memoryview(pool).cast("B", (ROWS, ROW))
            ends.callback(view.release)
            tier: Any = module.KvstoreTier(
                offloading_spec=spec(),
                primary_kv_view=view,
                tier_type="kvstore",
                backpressure_detector=None,
                address=str(address),
            )
            ends.callback(tier.shutdown)
            return Scheduler(tier, pool, row=ROW)

        yield make


def computed(key: bytes) -> bytes:
    return (key * ROW)[:ROW]


def request(name: str, count: int = 8) -> Request:
    keys = [b"%s-%d\0\0\0\0" % (name.encode(), number) for number in range(count)]
    return Request(name, keys, {key: (at + 1) * 32 for at, key in enumerate(keys)})


def until_stored(engine: Scheduler, name: str) -> None:
    """New requests until one is stored: after a failure the client does not call for a moment."""
    for number, _ in enumerate(steps()):
        engine.results.clear()
        engine.run(request(f"{name}{number}", 1), computed)
        engine.settle()
        if all(result.success for result in engine.results):
            return


def test_an_engine_rides_through_and_finds_its_rows_again(scheduler_of: Callable[[Path], Scheduler]) -> None:
    with short_directory() as directory, ExitStack() as ends:
        old = ends.enter_context(ServiceProcess(directory))
        engine = scheduler_of(directory)
        asked = request("asked")
        assert engine.run(asked, computed) == 0
        engine.settle()
        assert all(result.success for result in engine.results)
        assert old.stop() == 0
        # Nothing is there, and nobody waits for it.
        assert engine.run(request("away", 2), computed) == 0
        engine.settle()
        ends.enter_context(NewerService(directory))
        until_stored(engine, "back")
        # The engine's pool has given up what it held; its tier is the one that ran all the time.
        emptied = Scheduler(engine.tier, engine.pool, row=ROW)
        assert emptied.run(asked, computed) == 8
        assert [emptied.bytes_of(key) for key in asked.keys] == list(map(computed, asked.keys))
