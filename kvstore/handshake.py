"""A TLS handshake in memory: would two sides take each other, before anybody connects."""

from __future__ import annotations

import ssl

_STEPS_MAX = 20
_REASONS = {9: "is not valid yet", 10: "has expired"}
"""OpenSSL's own numbers of what a check of a chain finds."""


class KeyIsLocked(Exception):
    """The key wants a password."""


def no_password() -> str:
    """In place of a password, for `load_cert_chain`, which would ask a terminal for one. Raises KeyIsLocked."""
    raise KeyIsLocked


def why_refused(server: ssl.SSLContext, client: ssl.SSLContext, *, subject: str) -> str:
    """Why there would be no connection between these two, for people; empty where there would be one. `subject` is what the
    certificate that one of them looks at is called."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    try:
        for _ in range(_STEPS_MAX):
            # Each takes its step, whether or not the other one waits for it.
            done = [_is_done(end) for end in ends]
            if all(done):
                return ""
    except ssl.SSLCertVerificationError as error:
        what = _REASONS.get(error.verify_code, f"would be refused: {error.verify_message}")
        return f"{subject} {what}"
    except ssl.SSLError as error:
        return f"no connection can be made with {subject}: {error.reason}"
    return f"no connection can be made with {subject}"


def _is_done(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
