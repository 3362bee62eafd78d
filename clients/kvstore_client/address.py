"""Where a service is, and what lets a client in: a directory on this machine, a host and a port, or this process."""

from __future__ import annotations

import os
import re
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import grpc

from kvstore.errors import InvalidArgument
from kvstore_client.certificates import ClientPair, check_client_pair

SOCKET_PATH_BYTES_MAX = 107
TOKEN_CHARACTERS_MAX = 4096
CA_BYTES_MAX = 16 << 20
AUTHORIZATION_ENTRY = "authorization"
_SCHEME = "tcp://"
_ALLOWED = "tcp://host:port, an IPv6 address in brackets, or a directory"
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[\w.-]+):([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """The service's sockets lie in `directory`."""

    directory: Path

    @property
    def session_path(self) -> Path:
        return self.directory / "session.sock"

    @property
    def target(self) -> str:
        return f"unix:{quote(str(self.directory / 'kvstore.sock'))}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def __str__(self) -> str:
        return str(self.directory)


@dataclass(frozen=True, slots=True)
class RemoteAddress:
    """`host`: a name or an address, IPv6 in brackets. `token` empty: none. `ca`: certificates in PEM that the service's
    must come from, None for the system's. `insecure`: no TLS; whoever is on the way reads and changes everything. `pair`: the
    client's own certificate, None where it shows none. `admin`: the token is one for administration."""

    host: str
    port: int
    token: str = field(default="", repr=False)
    ca: bytes | None = field(default=None, repr=False)
    insecure: bool = False
    pair: ClientPair | None = None
    admin: bool = False

    @property
    def target(self) -> str:
        return f"dns:{self.host}:{self.port}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with each call."""
        return ((AUTHORIZATION_ENTRY, f"Bearer {self.token}"),) if self.token else ()

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None where the channel is to have none."""
        if self.insecure:
            return None
        if self.pair is None:
            return grpc.ssl_channel_credentials(root_certificates=self.ca)
        return grpc.ssl_channel_credentials(self.ca, self.pair.key, self.pair.certificate)

    def __str__(self) -> str:
        return f"{_SCHEME}{self.host}:{self.port}"


class ServiceHere(Protocol):
    """A service of this process, as kvstore.service.inprocess.InProcessService is one."""

    def open_session(self) -> Future[Any]:
        """A session as kvstore_client.link_base.SessionLike; KvstoreError where there is none."""

    def channel(self) -> Any:
        """As much of grpc.Channel as generated stubs use."""

    def async_channel(self) -> Any:
        """The same of grpc.aio.Channel."""


@dataclass(frozen=True, slots=True)
class InProcessAddress:
    """Calls go to `service` without sockets and without being serialised."""

    service: ServiceHere

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def __str__(self) -> str:
        return "in-process"


Address = LocalAddress | RemoteAddress | InProcessAddress


def parse_address(
    text: str | Path | Address,
    *,
    token: str | Path | None = None,
    ca: str | Path | None = None,
    insecure: bool = False,
    cert: str | Path | None = None,
    key: str | Path | None = None,
    admin: bool = False,
) -> Address:
    """The address that `text` names, or is. `token`: the text, or a Path of a file that holds it; `ca`: of a PEM file; `cert`, `key`:
    of PEM files of the client's own certificate with its chain, and its key. `admin`: the token is one for administration. Files
    are read now. InvalidArgument names what is wrong, and never shows a token."""
    if isinstance(text, str) and text.startswith(_SCHEME):
        host, port = _host_and_port(text)
        if insecure and ca is not None:
            raise InvalidArgument(
                "certificates are checked with TLS only", field="ca", value=ca, allowed="none with insecure"
            )
        pem = None if ca is None else _pem(Path(ca))
        pair = _pair(cert, key, insecure=insecure)
        return RemoteAddress(host, port, "" if token is None else _token(token), pem, insecure, pair, admin)
    given = (token, ca, insecure or None, cert, key)
    if isinstance(text, RemoteAddress) and not any(each is not None for each in given):
        return text
    if isinstance(text, RemoteAddress):
        raise InvalidArgument(
            "this address says how it is reached", field="address", value=text, allowed="without token and ca"
        )
    if isinstance(text, str) and "://" in text:
        raise InvalidArgument("not an address", field="address", value=text, allowed=_ALLOWED)
    for name, value in zip(("token", "ca", "insecure", "cert", "key"), given, strict=True):
        if value is not None:
            raise InvalidArgument(
                "only TCP needs it",
                field=name,
                value="given",
                allowed=f"with an address {_SCHEME}host:port only",
            )
    return text if isinstance(text, LocalAddress | InProcessAddress) else _local(Path(text).absolute())


def _local(directory: Path) -> LocalAddress:
    address = LocalAddress(directory)
    longest = len(os.fsencode(address.session_path))
    if longest > SOCKET_PATH_BYTES_MAX:
        raise InvalidArgument(
            "the path of a socket is too long; use a directory with a shorter path",
            field="directory",
            value=directory,
            allowed=f"at most {SOCKET_PATH_BYTES_MAX} bytes with /session.sock, this has {longest}",
        )
    return address


def _host_and_port(text: str) -> tuple[str, int]:
    found = _HOST_AND_PORT.fullmatch(text.removeprefix(_SCHEME))
    if found is None or not 0 < int(found[2]) < 65_536:
        raise InvalidArgument("not an address", field="address", value=text, allowed=_ALLOWED)
    return found[1], int(found[2])


def _token(token: str | Path) -> str:
    text = token
    if isinstance(text, Path):
        text = _read(text, "token", TOKEN_CHARACTERS_MAX + 2).decode("ascii", "replace").strip()
    if not (0 < len(text) <= TOKEN_CHARACTERS_MAX and all("!" <= c <= "~" for c in text)):
        raise InvalidArgument(
            "not a token",
            field="token",
            value=token if isinstance(token, Path) else f"{len(text)} characters",
            allowed=f"1 to {TOKEN_CHARACTERS_MAX} printable ASCII characters without spaces",
        )
    return text


def _pem(path: Path) -> bytes:
    pem = _read(path, "ca", CA_BYTES_MAX + 1)
    if len(pem) > CA_BYTES_MAX or b"-----BEGIN CERTIFICATE-----" not in pem:
        raise InvalidArgument(
            "no certificates in this file",
            field="ca",
            value=path,
            allowed=f"PEM, at most {CA_BYTES_MAX} bytes",
        )
    return pem


def _pair(cert: str | Path | None, key: str | Path | None, *, insecure: bool) -> ClientPair | None:
    if cert is None and key is None:
        return None
    if cert is None or key is None or insecure:
        raise InvalidArgument(
            "a client's certificate goes with its key, and with TLS",
            field="cert" if cert is not None else "key",
            value=cert if cert is not None else key,
            allowed="cert and key together, without insecure",
        )
    pair = ClientPair(_read(Path(cert), "cert", CA_BYTES_MAX), _read(Path(key), "key", CA_BYTES_MAX))
    check_client_pair(Path(cert), Path(key))
    return pair


def _read(path: Path, field_name: str, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise InvalidArgument(
            f"this file cannot be read: {error.strerror}", field=field_name, value=path
        ) from error
