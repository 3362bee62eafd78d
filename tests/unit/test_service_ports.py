"""What a service is not to begin with: an address that is another's, and nothing made before that is known."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import ConfigError, PolicyTooLarge
from kvstore.service.ports import why_not_free
from kvstore_client import CacheClient
from tests.support.chains import identity_of
from tests.support.inprocess import ServiceHere, running_here


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens at."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield int(other.getsockname()[1])


def test_an_address_is_free_or_it_is_said_why_not(taken: int) -> None:
    assert why_not_free("127.0.0.1", 0) == ""
    assert why_not_free("127.0.0.1", taken) == "Address already in use"
    assert why_not_free("192.0.2.1", 0) == "Cannot assign requested address"
    assert why_not_free("no-such-host.invalid", 1)


@pytest.mark.parametrize("option", ["metrics", "events"])
def test_a_service_that_could_not_listen_makes_nothing(tmp_path: Path, taken: int, option: str) -> None:
    address = f"127.0.0.1:{taken}"
    value = f"tcp://{address}" if option == "events" else address
    with (
        pytest.raises(ConfigError, match=f"cannot listen there: Address already in use; {option}={value}"),
        ServiceHere(tmp_path / "new", **{option: value}),
    ):
        pass
    assert not (tmp_path / "new").exists()


def test_a_policy_that_the_disk_cannot_hold_is_told_where_it_was_chosen(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        running_here(policy="full", disk=256 << 20) as service,
        CacheClient(service.address, owner="test") as client,
    ):
        for _ in range(3):
            with pytest.raises(PolicyTooLarge):
                client.open_namespace(identity_of("tiny"), name="chat")
    [told] = [record.getMessage() for record in caplog.records if "refused to open" in record.getMessage()]
    assert "namespace 'chat'" in told
    assert "the share is" in told
