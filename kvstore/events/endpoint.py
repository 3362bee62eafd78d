"""Where events are sent from."""

from __future__ import annotations

import ipaddress
import re

from kvstore.errors import ConfigError

_ALLOWED = "tcp://HOST:PORT, as in tcp://127.0.0.1:5557, or ipc:///PATH"


def check_endpoint(text: str, *, field: str, may_be_public: bool) -> None:
    """Raise ConfigError unless `text` is an address to listen on that this machine alone can reach, or any, with `may_be_public`."""
    if re.fullmatch(r"ipc:///.+", text):
        return
    match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):([0-9]{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ConfigError("not an address to send events from", field=field, value=text, allowed=_ALLOWED)
    if not may_be_public and not is_loopback(match[1].strip("[]")):
        raise ConfigError(
            "other machines could reach it, and events ask nobody who they are; listen on 127.0.0.1, or say --unsafe-public-events",
            field=field,
            value=text,
            allowed=_ALLOWED,
        )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine for certain."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
