"""Sizes, times, and which source of an option wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.config import load_service_config, options, unknown_variables
from kvstore.errors import ConfigError
from kvstore.units import parse_size, parse_time, size_text, time_text


@pytest.mark.parametrize(
    ("text", "want"), [("64GiB", 64 << 30), ("4096", 4096), ("1.5MiB", 3 << 19), ("0", 0), ("7 KiB", 7168)]
)
def test_sizes(text: str, want: int) -> None:
    assert parse_size(text, name="--disk") == want


@pytest.mark.parametrize("text", ["64XiB", "", "-1", "1e9", "GiB", "64 G", "0.3B", "9999999TiB", "１"])
def test_a_bad_size_names_option_value_and_what_is_allowed(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, name="--disk")
    assert "--disk" in str(caught.value)
    assert "GiB" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "want"), [("72h", 259_200.0), ("500ms", 0.5), ("0", 0.0), ("1.5m", 90.0), ("3d", 259_200.0)]
)
def test_times(text: str, want: float) -> None:
    assert parse_time(text, name="--retention") == want


@pytest.mark.parametrize("text", ["72x", "", "-1s", "h", "1h30m", "72", "0.5"])
def test_a_bad_time_names_option_and_value(text: str) -> None:
    with pytest.raises(ConfigError, match="--retention"):
        parse_time(text, name="--retention")


@pytest.mark.parametrize("count", [1, 4096, 3 << 19, 64 << 30, 1 << 60])
def test_a_size_reads_back_as_it_is_shown(count: int) -> None:
    assert parse_size(size_text(count), name="x") == count


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.5, 1.0, 90.0, 600.0, 259_200.0])
def test_a_time_reads_back_as_it_is_shown(seconds: float) -> None:
    assert parse_time(time_text(seconds), name="x") == seconds


def test_a_value_out_of_range_is_answered_in_the_units_it_is_written_in() -> None:
    with pytest.raises(ConfigError, match=r"--disk=10; allowed: 4MiB to 1048576TiB"):
        load_service_config({"dir": "/d", "disk": "10"}, environ={})
    with pytest.raises(ConfigError, match=r"--lease=2h; allowed: 100ms to 1h"):
        load_service_config({"dir": "/d", "lease": "2h"}, environ={})


def test_every_option_tells_its_kind_and_its_default() -> None:
    shown = {option.name: (option.kind, option.default) for option in options()}
    assert shown["disk"] == ("SIZE", "32GiB")
    assert shown["retention"] == ("TIME", "72h")
    assert shown["states_share"] == ("SHARE", "0.3")
    assert shown["dir"] == ("TEXT", "")


def test_flags_go_before_environment_before_file_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('dir = "/from-file"\ndisk = "1GiB"\nsegment = "4MiB"\n')
    config = load_service_config(
        {"dir": None, "disk": None, "segment": "8MiB"},
        file=str(file),
        environ={"KVSTORE_DISK": "2GiB", "KVSTORE_SEGMENT": "1MiB"},
    )
    assert (config.dir, config.disk, config.segment, config.policy) == (
        "/from-file",
        2 << 30,
        8 << 20,
        "endpoints",
    )


def test_an_unknown_key_in_the_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "kvstore.toml"
    file.write_text('dir = "/d"\ndisc = "1GiB"\n')
    with pytest.raises(ConfigError, match="disc=1GiB"):
        load_service_config({}, file=str(file), environ={})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "--dir"),
        ({"dir": "/d", "disk": "1KiB"}, "--disk=1KiB"),
        ({"dir": "/d", "lease": "0s"}, "--lease=0s"),
        ({"dir": "/d", "sessions": "many"}, "--sessions=many"),
        ({"dir": "/d", "states_share": "1.5"}, "--states-share=1.5"),
    ],
)
def test_values_out_of_range_are_refused_not_corrected(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_service_config(flags, environ={})
    assert words in str(caught.value)


def test_all_options_are_listed_here_so_that_a_new_one_shows() -> None:
    assert [option.name for option in options()] == [
        "dir",
        "sockets",
        "disk",
        "segment",
        "memory",
        "pool",
        "pool_ttl",
        "handoff",
        "handoff_ttl",
        "take",
        "staging",
        "arenas",
        "cache",
        "retention",
        "states_share",
        "policy",
        "eviction",
        "prompt_tokens",
        "lease",
        "sessions",
        "leases",
        "keys",
        "commit_bytes",
        "commit_wait",
        "wear",
        "metrics",
        "metrics_hosts",
        "health",
        "log_format",
        "otlp",
        "listen",
        "tls_cert",
        "tls_key",
        "token_file",
        "tls_client_ca",
        "tenants",
        "admin_token_file",
        "events",
        "events_replay",
        "events_topic",
        "events_buffer",
        "events_blocks_only",
        "unsafe_plaintext_tcp",
        "unsafe_no_token",
        "unsafe_public_events",
    ]


def test_a_variable_that_is_no_option_is_told_of_with_the_one_that_may_have_been_meant() -> None:
    told = unknown_variables(
        {
            "KVSTORE_DISK": "1GiB",
            "KVSTORE_DIKS": "1GiB",
            "KVSTORE_XYZZY": "",
            "KVSTORE_CONFIG": "",
            "PATH": "",
            # What Kubernetes tells the pods beside Services called kvstore and kvstore-central.
            "KVSTORE_PORT": "tcp://10.0.0.1:7",
            "KVSTORE_PORT_7_TCP_ADDR": "10.0.0.1",
            "KVSTORE_SERVICE_HOST": "10.0.0.1",
            "KVSTORE_CENTRAL_SERVICE_PORT_GRPC": "7",
        }
    )
    assert told == ["KVSTORE_DIKS (KVSTORE_DISK?)", "KVSTORE_XYZZY"]


def test_a_check_of_others_is_told_where_the_value_came_from() -> None:
    seen = []
    load_service_config(
        {"dir": "/d", "policy": "full"},
        environ={"KVSTORE_EVICTION": "fifo"},
        checks={
            name: lambda value, source: seen.append((value, source))
            for name in ("policy", "eviction", "disk")
        },
    )
    assert sorted(seen) == [("fifo", "KVSTORE_EVICTION"), ("full", "--policy")]
