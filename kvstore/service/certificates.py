"""The certificate that the service shows over TCP, looked at before anybody connects."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.handshake import KeyIsLocked, no_password, why_refused

PEM_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM texts: the certificate with its chain, and its key."""

    certificate: bytes
    key: bytes


def read_pair(cert_file: str, key_file: str, *, known: Pair | None = None) -> Pair:
    """ConfigError where a file cannot be read, the two do not belong together, or a client would refuse the certificate for
    its dates or its purpose. Whether a client trusts who issued it, and for which name, is not known here. `known`: a pair that is
    in use already, and is taken for what it is."""
    pair = Pair(_read(cert_file, "tls_cert"), _read(key_file, "tls_key"))
    if pair == known:
        return pair
    why = why_refused(_server_side(cert_file, key_file), _client_side(cert_file), subject="the certificate")
    if why:
        raise ConfigError(why, field="tls_cert", value=cert_file, allowed="one that clients can accept")
    return pair


def read_client_ca(file: str) -> bytes:
    """PEM of certificates that issue clients'. ConfigError where the file cannot be read or holds none."""
    data = _read(file, "tls_client_ca")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            "no certificates in this file", field="tls_client_ca", value=file, allowed="PEM"
        ) from error
    return data


def _read(file: str, field: str) -> bytes:
    try:
        with Path(file).open("rb") as opened:
            data = opened.read(PEM_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=field, value=file) from error
    if len(data) > PEM_BYTES_MAX:
        raise ConfigError("too large", field=field, value=file, allowed=f"{PEM_BYTES_MAX} bytes")
    return data


def _server_side(cert_file: str, key_file: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert_file, key_file, password=no_password)
    except KeyIsLocked as error:
        raise ConfigError(
            "the key is locked with a password", field="tls_key", value=key_file, allowed="a key without one"
        ) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                "the key is not the certificate's", field="tls_key", value=key_file, allowed=f"{cert_file}'s"
            ) from error
        raise ConfigError(
            f"not a certificate with its key in PEM: {error.reason or 'PEM'}",
            field="tls_cert, tls_key",
            value=f"{cert_file}, {key_file}",
            allowed="PEM files, the server's certificate before those that issued it",
        ) from error
    return context


def _client_side(cert_file: str) -> ssl.SSLContext:
    """A client that trusts this one certificate, and looks at all the rest."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert_file)
    return context
