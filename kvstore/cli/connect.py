"""What every command that talks to a running service needs: where it is, and which namespace is meant."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvstore.config import environment
from kvstore.errors import ConfigError, InvalidArgument, UnknownNamespace
from kvstore_client import CacheClient
from kvstore_client.address import parse_address
from kvstore_client.values import OpenedNamespace

DIGITS_SHOWN = 16
"""Of a digest, where people are to tell namespaces apart."""


def add_directory_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", default=None, help="the service's directory (or KVSTORE_DIR)")


def add_remote_flags(parser: argparse.ArgumentParser) -> None:
    """For a service of another machine that serves administration over TCP."""
    parser.add_argument(
        "--address", default=None, metavar="tcp://HOST:PORT", help="a service over TCP, instead of --dir"
    )
    for names, what in (
        (("--token-file",), "file of a token for administration"),
        (
            ("--ca",),
            "PEM file of the certificates that the service's must come from (default: the system's)",
        ),
        # The second names are those of the release before.
        (
            ("--cert", "--tls-cert"),
            "PEM file of our own certificate with its chain, for a service that asks for one",
        ),
        (("--key", "--tls-key"), "PEM file of its key"),
    ):
        parser.add_argument(*names, default=None, metavar="FILE", help=f"with --address: {what}")


def connect(args: argparse.Namespace) -> CacheClient:
    address = getattr(args, "address", None)
    if address:
        token = Path(args.token_file) if args.token_file else None
        remote = parse_address(address, token=token, ca=args.ca, cert=args.cert, key=args.key, admin=True)
        return CacheClient(remote, owner="kvstore-cli")
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
    """The namespace with that name, or whose digest begins so. UnknownNamespace lists those that there are; InvalidArgument where
    several tenants have one of that name."""
    known = client.namespaces()
    found = [ns for ns in known if ns.name == name]
    if not found and len(name) >= DIGITS_SHOWN:
        found = [ns for ns in known if ns.digest.hex().startswith(name.lower())]
    if not found:
        names = ", ".join(dict.fromkeys(ns.name for ns in known))
        raise UnknownNamespace(
            "no such namespace", field="namespace", value=name, allowed=names or "none is open yet"
        )
    if len(found) > 1:
        raise InvalidArgument(
            "several tenants have a namespace of that name",
            field="namespace",
            value=name,
            allowed=f"the beginning of its digest, as policy show has it: {', '.join(map(digits, found))}",
        )
    return found[0]


def digits(namespace: OpenedNamespace) -> str:
    """The beginning of its digest, which no other has."""
    return namespace.digest.hex()[:DIGITS_SHOWN]
