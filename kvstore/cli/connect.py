"""What every command that talks to a running service needs: where it is, and which namespace is meant."""

from __future__ import annotations

import argparse

from kvstore.config import environment
from kvstore.errors import ConfigError, UnknownNamespace
from kvstore_client import CacheClient
from kvstore_client.values import OpenedNamespace


def add_directory_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", default=None, help="the service's directory (or KVSTORE_DIR)")


def connect(args: argparse.Namespace) -> CacheClient:
    directory = args.dir or environment("KVSTORE_DIR")
    if not directory:
        raise ConfigError(
            "no directory given",
            field="--dir",
            value="",
            allowed="the directory that `kvstore serve` runs on",
        )
    return CacheClient(directory, owner="kvstore-cli")


def named(client: CacheClient, name: str) -> OpenedNamespace:
    """The namespace with that name; UnknownNamespace lists those that there are."""
    known = {ns.name: ns for ns in client.namespaces()}
    if name not in known:
        raise UnknownNamespace(
            "no such namespace", field="namespace", value=name, allowed=", ".join(known) or "none is open yet"
        )
    return known[name]
