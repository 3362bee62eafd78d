"""The keys of the tier's own configuration, read once and refused by name when wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore_client.address import Address, parse_address

_SECONDS_MAX = 3600.0
_COUNT_MAX = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """address: of the service, a directory or `tcp://host:port`; token_file, ca, insecure, cert, key as CacheClient takes them. revision,
    salt: see kvstore_vllm.identity. owner: this engine's name in the service's log. enable_kv_events: tell the engine's
    subscribers what was stored. pool_file: let a service on this machine read and write the pool's file by itself.

    lookup_seconds: how long a request waits for the service to say what it holds; after that it is a miss. lookup_keys: keys
    that may be known at once. load_rows, store_rows: rows that may wait to be loaded and stored; past them a load fails,
    which is a miss, and a store is refused. load_threads: that load at once. batch_bytes: of rows that are stored in one
    go. shutdown_seconds: how long the engine's end waits for what is being stored.
    """

    address: str
    token_file: str = ""
    ca: str = ""
    insecure: bool = False
    cert: str = ""
    key: str = ""
    revision: str = ""
    salt: str = ""
    owner: str = "vllm"
    enable_kv_events: bool = False
    pool_file: bool = True
    lookup_seconds: float = 1.0
    lookup_keys: int = 65_536
    load_rows: int = 16_384
    store_rows: int = 4_096
    load_threads: int = 2
    batch_bytes: int = 16 << 20
    shutdown_seconds: float = 5.0

    def where(self) -> Address:
        """ConfigError for an address, token file or certificates that cannot be used."""
        return parse_address(
            self.address,
            token=Path(self.token_file) if self.token_file else None,
            ca=self.ca or None,
            insecure=self.insecure,
            cert=self.cert or None,
            key=self.key or None,
        )


def read_settings(given: Mapping[str, Any]) -> TierSettings:
    """ConfigError for a key that is unknown or missing, and for a value that is not allowed."""
    known = {each.name: each for each in fields(TierSettings)}
    for name in given:
        if name not in known:
            raise ConfigError(
                "unknown key of the kvstore tier", field=name, value=given[name], allowed=", ".join(known)
            )
    if not given.get("address"):
        raise ConfigError(
            "the kvstore tier needs a service",
            field="address",
            value=given.get("address", ""),
            allowed="the service's directory, or tcp://host:port",
        )
    for name, value in given.items():
        _check(name, value, str(known[name].type))
    return TierSettings(**given)


def _check(name: str, value: Any, kind: str) -> None:
    if kind == "str":
        good, allowed = isinstance(value, str), "a text"
    elif kind == "bool":
        good, allowed = isinstance(value, bool), "true or false"
    elif kind == "int":
        good = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _COUNT_MAX
        allowed = f"a whole number from 1 to {_COUNT_MAX}"
    else:
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _SECONDS_MAX
        allowed = f"more than 0, up to {_SECONDS_MAX:g} seconds"
    if not good:
        raise ConfigError("not allowed for the kvstore tier", field=name, value=value, allowed=allowed)
