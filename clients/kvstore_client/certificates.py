"""The certificate that a client shows, looked at before anybody connects."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import InvalidArgument

_STEPS_MAX = 20
_REASONS = {9: "is not valid yet", 10: "has expired"}
"""OpenSSL's own numbers of what a check of a chain finds."""


@dataclass(frozen=True, slots=True)
class ClientPair:
    """PEM texts: the certificate with its chain, and its key."""

    certificate: bytes
    key: bytes = field(repr=False)


def check_client_pair(cert: Path, key: Path) -> None:
    """InvalidArgument unless the two belong together and a service could take the certificate for its dates and its purpose.
    Whether the service knows who issued it is not known here."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    server.verify_mode = ssl.CERT_REQUIRED
    server.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        for side in (server, client):
            side.load_cert_chain(cert, key, password=_no_password)
        server.load_verify_locations(cert)
    except _Locked as error:
        raise _wrong("the key is locked with a password", key, "a key without one") from error
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or "PEM"
        what = (
            "the key is not the certificate's"
            if reason == "KEY_VALUES_MISMATCH"
            else "not a certificate with its key"
        )
        raise _wrong(
            f"{what} ({reason})", f"{cert}, {key}", "PEM files of one certificate and its key"
        ) from error
    _shake_hands(server, client, cert)


class _Locked(Exception):
    """The key wants a password."""


def _no_password() -> str:
    raise _Locked


def _shake_hands(server_side: ssl.SSLContext, client_side: ssl.SSLContext, cert: Path) -> None:
    """In memory; the certificate stands for the service's, too, at which nobody looks."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_side.wrap_bio(up, down, server_side=True)
    client = client_side.wrap_bio(down, up)
    try:
        for _ in range(_STEPS_MAX):
            if all([_is_done(client), _is_done(server)]):
                return
    except ssl.SSLCertVerificationError as error:
        what = _REASONS.get(error.verify_code, f"would be refused: {error.verify_message}")
        raise _wrong(f"the client's certificate {what}", cert, "one that a service can accept") from error
    except ssl.SSLError as error:
        raise _wrong(
            f"no connection can be made with the certificate: {error.reason}", cert, "another one"
        ) from error
    raise _wrong("no connection can be made with the certificate", cert, "another one")


def _is_done(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _wrong(what: str, value: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(what, field="cert", value=value, allowed=allowed)
