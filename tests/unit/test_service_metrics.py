"""The metrics port: by which names it may be asked, and who has to go when its connections are used up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstore.errors import ConfigError
from kvstore.service.metrics import CONNECTIONS_MAX, MetricsPage, is_ours, split_hosts

LIMIT_SECONDS = 4.0
"""Less than a silent connection may stay by itself."""


@pytest.fixture
async def page() -> AsyncIterator[MetricsPage]:
    made = MetricsPage(lambda: {"blocks": 7}, lambda: {"blocks": 7}, hosts=split_hosts("store.example.com"))
    await made.start("127.0.0.1:0")
    yield made
    await made.stop()


async def asked(page: MetricsPage, *lines: str) -> str:
    """The answer to GET of /metrics with these header lines."""
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
    writer.write("\r\n".join(["GET /metrics HTTP/1.1", *lines, "", ""]).encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:9464", True),
        ("[::1]:9464", True),
        ("10.1.2.3", True),
        ("localhost:9464", True),
        ("kvstore", True),
        ("kvstore-0.kv.default.svc.cluster.local:9464", True),
        ("Store.Example.com:9464", True),
        ("store.example.com.", True),
        ("evil.example.com", False),
        ("example.com:9464", False),
        ("127.0.0.1.example.com", False),
        ("localhost.example.com", False),
        ("svc", True),
        ("a.svc.example", False),
        ("", False),
        (":9464", False),
    ],
)
def test_addresses_private_names_and_known_ones_may_ask(host: str, allowed: bool) -> None:
    assert is_ours(host, split_hosts("store.example.com, other.example.com")) is allowed


@pytest.mark.parametrize("text", ["a b", "http://x", "x:80", ",".join(f"h{n}" for n in range(65))])
def test_host_names_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="metrics_hosts"):
        split_hosts(text)


async def test_a_public_name_that_is_not_known_is_told_nothing(page: MetricsPage) -> None:
    for lines in (["Host: 127.0.0.1"], ["host: store.example.com:9464"], []):
        assert "kvstore_blocks 7.0" in await asked(page, *lines)
    for lines in (["Host: evil.example.com"], ["Host: 127.0.0.1", "Host: evil.example.com"]):
        answer = await asked(page, *lines)
        assert answer.startswith("HTTP/1.1 421 ")
        assert "kvstore_blocks" not in answer


async def test_who_asks_is_answered_while_silent_connections_take_all_places(page: MetricsPage) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        silent = [await asyncio.open_connection("127.0.0.1", page.port) for _ in range(CONNECTIONS_MAX)]
        # One that is half way is silent too.
        silent[-1][1].write(b"GET /metrics HTTP/1.1\r\n")
        assert "kvstore_blocks 7.0" in await asked(page, "Host: 127.0.0.1")
        # The one that has been silent for longest has gone, and no other.
        assert await silent[0][0].read() == b""
        silent[1][1].write(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert b"kvstore_blocks 7.0" in await silent[1][0].read()
    for _, writer in silent:
        writer.close()
