"""Workers whose store is on another machine: the same tokens and bits, over TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument
from kvstore.types import StateSource
from kvstore_client import CacheClient, Deadlines
from kvstore_client.address import RemoteAddress
from kvstore_workers.runtime.options import WorkerOptions, cache_address, check_options
from tests.support.remote import TOKENS, Secrets, make_secrets, port_of
from tests.support.service import ServiceProcess, running_service
from tests.support.workers import RESTORING_PAYS, cold, decode, engine_on, prefill, request_of, tokens_of


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return make_secrets(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="module")
def service(secrets: Secrets) -> Iterator[ServiceProcess]:
    with running_service(prompt_tokens=16_384, **secrets.options) as service:
        yield service


def options(service: ServiceProcess, secrets: Secrets, folder: Path) -> WorkerOptions:
    token = folder / "token"
    token.write_text(TOKENS[0])
    return WorkerOptions(
        role="decode",
        listen=f"unix:{folder / 'd.sock'}",
        cache=f"tcp://localhost:{port_of(service)}",
        cache_token_file=str(token),
        cache_ca=str(secrets.folder / "issuer.pem"),
    )


@pytest.mark.parametrize("sliced_bytes", [0, 1 << 40], ids=["sliced", "whole"])
def test_a_turn_that_comes_back_over_the_network_has_the_bits_of_a_cold_run(
    service: ServiceProcess, secrets: Secrets, salt: str, tmp_path: Path, sliced_bytes: int
) -> None:
    prompt = tokens_of(100, seed=9)
    given = options(service, secrets, tmp_path)
    check_options(given)
    client = CacheClient(cache_address(given), owner="test", deadlines=Deadlines(connect=5.0, release=10.0))
    with engine_on(client, salt=salt, costs=RESTORING_PAYS, sliced_bytes=sliced_bytes) as engine:
        first = prefill(engine, request_of(prompt, 4))
        rest = decode(engine, request_of(prompt, 4), ticket=first.ticket, first_token=first.tokens[0])
        assert rest.report.handoff
        again = decode(engine, request_of(prompt, 4))
        assert again.report.state_source is not StateSource.NONE
    assert (again.tokens, again.logits) == (cold(prompt, 4).tokens, cold(prompt, 4).logits)
    assert rest.tokens[-3:] == again.tokens[-3:]


def test_a_store_that_cannot_be_meant_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    def given(cache: str, **more: str) -> WorkerOptions:
        return WorkerOptions(role="decode", listen=f"unix:{tmp_path / 'd.sock'}", cache=cache, **more)  # type: ignore[arg-type]

    for wrong, field in (
        (given("tcp://nowhere"), "address"),
        (given("tcp://h:1", cache_token_file=str(tmp_path / "none")), "token"),
        (given(str(tmp_path), cache_ca="x"), "ca"),
    ):
        with pytest.raises(InvalidArgument, match=f"{field}="):
            check_options(wrong)
    assert isinstance(cache_address(given("tcp://h:1")), RemoteAddress)
