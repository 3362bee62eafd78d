"""Where a service is, as a caller says it: taken as it is meant, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument
from kvstore_client import CacheClient
from kvstore_client.address import LocalAddress, RemoteAddress, parse_address

PEM = "-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    ("text", "host", "port", "target"),
    [
        ("tcp://cache.local:7001", "cache.local", 7001, "dns:cache.local:7001"),
        ("tcp://10.0.0.1:1", "10.0.0.1", 1, "dns:10.0.0.1:1"),
        ("tcp://[::1]:65535", "[::1]", 65535, "dns:[::1]:65535"),
        ("tcp://[fe80::1%eth0]:80", "[fe80::1%eth0]", 80, "dns:[fe80::1%eth0]:80"),
    ],
)
def test_an_address_names_host_and_port(text: str, host: str, port: int, target: str) -> None:
    address = parse_address(text, token="t")
    assert isinstance(address, RemoteAddress)
    assert (address.host, address.port, address.target, str(address)) == (host, port, target, text)
    assert address.metadata == (("authorization", "Bearer t"),)
    assert address.credentials() is not None
    assert parse_address(text, insecure=True).metadata == ()


@pytest.mark.parametrize(
    "text",
    [
        "tcp://", "tcp://host", "tcp://host:", "tcp://host:0", "tcp://host:65536", "tcp://::1:80", "tcp://:80",
        "tcp://host:80/path", "tcp://user@host:80", "tcp://ho st:80", "http://host:80", "unix://d", "tcp://[::1:80",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_what_is_one(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"address=.*tcp://host:port") as caught:
        parse_address(text)
    assert (caught.value.field, caught.value.value) == ("address", text)


def test_a_directory_is_a_local_address(tmp_path: Path) -> None:
    for given in (tmp_path, str(tmp_path)):
        assert parse_address(given) == LocalAddress(tmp_path)
    for name, value in (("token", "t"), ("ca", "c"), ("insecure", True)):
        with pytest.raises(InvalidArgument, match=name):
            parse_address(tmp_path, **{name: value})  # type: ignore[arg-type]


def test_a_token_comes_as_text_or_from_a_file_and_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    for token in ("s3cret", tmp_path / "token"):
        address = parse_address("tcp://h:1", token=token)
        assert address.metadata == (("authorization", "Bearer s3cret"),)
        assert "s3cret" not in repr(address) + str(address)
        assert "s3cret" not in repr(CacheClient("tcp://h:1", owner="t", token=token))
    for bad in ("", "two words", "naïve", "x" * 5000, "s3cret\n"):
        with pytest.raises(InvalidArgument, match="token") as caught:
            parse_address("tcp://h:1", token=bad)
        assert not bad or bad not in str(caught.value)
    with pytest.raises(InvalidArgument, match=r"token=.*none"):
        parse_address("tcp://h:1", token=tmp_path / "none")


def test_certificates_are_read_when_the_address_is(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text(PEM)
    (tmp_path / "empty.pem").write_text("")
    assert parse_address("tcp://h:1", ca=tmp_path / "ca.pem") == RemoteAddress("h", 1, ca=PEM.encode())
    for ca in (tmp_path / "empty.pem", tmp_path / "none.pem", tmp_path):
        with pytest.raises(InvalidArgument, match="ca="):
            parse_address("tcp://h:1", ca=ca)
    with pytest.raises(InvalidArgument, match="none with insecure"):
        parse_address("tcp://h:1", ca=tmp_path / "ca.pem", insecure=True)
