"""A client lives in other people's environments: grpcio, protobuf and the standard library are all that it needs."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib

from kvstore_client import checks

_LOADED = """
import json, sys
for name in {hidden!r}:
    sys.modules[name] = None
import kvstore_client
from kvstore_client import checks
made = checks.make_checks(b"abc")
print(json.dumps([sorted(sys.modules), made.crc32, made.has_xxh3]))
"""

_FOREIGN = (
    "torch",
    "numpy",
    "lmdb",
    "msgpack",
    "uvloop",
    "prometheus_client",
    "google_crc32c",
    "kvstore.service",
    "kvstore.store",
    "kvstore.core",
    "kvstore.cli",
    "kvstore.plan",
    "kvstore.pool",
    "kvstore.policy",
    "kvstore.config",
)


def loaded(*, hidden: tuple[str, ...] = ()) -> tuple[set[str], int, bool]:
    run = subprocess.run(
        [sys.executable, "-c", _LOADED.format(hidden=hidden)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    modules, crc32, has_xxh3 = json.loads(run.stdout)
    return set(modules), crc32, has_xxh3


def test_importing_the_client_loads_nothing_of_the_service_or_of_a_framework() -> None:
    modules, _, _ = loaded()
    assert modules & set(_FOREIGN) == set()
    assert {"grpc", "google.protobuf", "kvstore.prefix.keys"} <= modules


def test_without_the_faster_checksums_the_standard_librarys_is_used() -> None:
    _, crc32, has_xxh3 = loaded(hidden=("xxhash", "isal", "isal.isal_zlib"))
    assert (crc32, has_xxh3) == (zlib.crc32(b"abc"), False)


def test_all_ways_to_a_crc_agree() -> None:
    for payload in (b"", b"a", bytes(range(256)) * 77, bytearray(b"xyz"), memoryview(b"0123456789")[3:7]):
        assert checks.crc32(payload) == zlib.crc32(payload)
        made = checks.make_checks(payload)
        assert checks.matches(payload, made)
        assert not checks.matches(bytes(payload) + b"x", made)
