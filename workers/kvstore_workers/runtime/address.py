"""Addresses of workers and gateways: unix sockets, open to this user alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import grpc

from kvstore.errors import ConfigError
from kvstore.service.process import MAX_SOCKET_PATH_BYTES

MESSAGE_BYTES_MAX = 64 << 20

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # A peer on this machine that was started again is there at once; the library's own pause grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
)

_PREFIX = "unix:"


def socket_path(address: str, *, name: str) -> Path:
    """The socket's path in `unix:PATH`; ConfigError naming `name` for anything else."""
    allowed = f"unix:PATH, PATH of at most {MAX_SOCKET_PATH_BYTES} bytes"
    if not address.startswith(_PREFIX) or address == _PREFIX:
        raise ConfigError("not an address", field=name, value=address, allowed=allowed)
    # Absolute, because gRPC does not take a relative path after `unix:` in every form.
    path = Path(address.removeprefix(_PREFIX)).absolute()
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            "the socket's path is too long; choose a shorter directory",
            field=name,
            value=path,
            allowed=allowed,
        )
    return path


def claim(path: Path, *, name: str) -> None:
    """Make room for a new socket at `path`: its directory exists, and what a dead process left is removed.

    ConfigError when someone listens there, or when it is no socket.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the directory: {error.strerror}", field=name, value=path.parent
        ) from error
    if not path.exists() and not path.is_symlink():
        return
    if not path.is_socket():
        raise ConfigError(
            "something else is there", field=name, value=path, allowed="a path of nothing, or of a socket"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise ConfigError("another process listens there", field=name, value=path, allowed="a path of its own")


def open_channel(path: Path) -> grpc.Channel:
    """A channel to the process that listens at `path`; dialled at the first call."""
    return grpc.insecure_channel(f"{_PREFIX}{path}", options=CHANNEL_OPTIONS)
