"""The certificate that a client shows, looked at before anybody connects."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.errors import InvalidArgument
from kvstore.handshake import KeyIsLocked, no_password, why_refused


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
            side.load_cert_chain(cert, key, password=no_password)
        server.load_verify_locations(cert)
    except KeyIsLocked as error:
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
    # The certificate stands for the service's, too, at which nobody looks.
    if why := why_refused(server, client, subject="the client's certificate"):
        raise _wrong(why, cert, "one that a service can accept")


def _wrong(what: str, value: object, allowed: str) -> InvalidArgument:
    return InvalidArgument(what, field="cert", value=value, allowed=allowed)
