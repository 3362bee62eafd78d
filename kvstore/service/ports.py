"""Whether addresses are free, asked before anything is made for a service that could not listen there."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from kvstore.config import ServiceConfig
from kvstore.errors import ConfigError
from kvstore.events.endpoint import is_loopback
from kvstore.service.metrics import split_address
from kvstore.store.identity import IDENTITY_NAME


def check_ports(config: ServiceConfig, directory: Path) -> None:
    """ConfigError where the service would make its directory, and then find that it cannot listen where it is to. In a directory that
    holds a store, what is wrong is told by who listens: another service may run there, which says more."""
    if (directory / IDENTITY_NAME).exists():
        return
    for field, address, host, port in _wanted(config):
        if why := why_not_free(host, port):
            raise ConfigError(
                f"cannot listen there: {why}",
                field=field,
                value=address,
                allowed="HOST:PORT of this machine that is free",
            )


def _wanted(config: ServiceConfig) -> Iterator[tuple[str, str, str, int]]:
    """(Option, its value, host, port)."""
    for field in ("listen", "health", "metrics"):
        if address := getattr(config, field):
            yield field, address, *split_address(address, field=field)
    for field in ("events", "events_replay"):
        address = getattr(config, field)
        if address.startswith("tcp://"):
            host, port = split_address(address.removeprefix("tcp://"), field=field)
            # ZMQ takes names of interfaces and `*` too.
            if is_loopback(host):
                yield field, address, host, port


def why_not_free(host: str, port: int) -> str:
    """Why nothing could listen at any address of the host; empty where something could, now."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"{error.strerror}"
    why = os.strerror(errno.EADDRNOTAVAIL)
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as tried:
                # As those do that are to listen: what a connection has left behind is no hindrance.
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(address)
                return ""
        except OSError as error:
            why = error.strerror or str(error)
    return why
