"""The closed set of errors. Each says what was wrong, with which value, what is allowed, and what to do.

A miss is not an error, and neither is damage found on a read (it is a counted miss).
"""

from __future__ import annotations


class KvstoreError(Exception):
    """Base of all. `code` is the name that crosses the wire; `field` and `value` say what was wrong."""

    code = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", value: object = "", allowed: str = "") -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        parts = [message]
        if field:
            parts.append(f"{field}={_short(value)}")
        if allowed:
            parts.append(f"allowed: {allowed}")
        super().__init__(one_line("; ".join(parts)))


def _short(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(text: str) -> str:
    """On a terminal and in a log, whatever a client, a file or an argument was named."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class InvalidArgument(KvstoreError):
    """The request itself is wrong and will be wrong again."""

    code = "INVALID_ARGUMENT"


class MemoryUnavailable(KvstoreError):
    """The service has no memory that this session could map; the same bytes come by Fetch."""

    code = "MEMORY_UNAVAILABLE"


class UnknownNamespace(KvstoreError):
    code = "UNKNOWN_NAMESPACE"


class UnknownLease(KvstoreError):
    """No such lease here: never given, given before a restart, ended, or past its deadline."""

    code = "UNKNOWN_LEASE"


class UnknownReservation(KvstoreError):
    code = "UNKNOWN_RESERVATION"


class UnknownTicket(KvstoreError):
    code = "UNKNOWN_TICKET"


class UnknownSession(KvstoreError):
    """The nonce names no open session: the session ended or the service has started again."""

    code = "UNKNOWN_SESSION"


class Unauthenticated(KvstoreError):
    """The call came over TCP without a token that the service knows."""

    code = "UNAUTHENTICATED"


class Forbidden(KvstoreError):
    """The call's token, or certificate, is known, and not good for this tenant."""

    code = "FORBIDDEN"


class GeometryMismatch(KvstoreError):
    """The namespace was opened with another geometry or identity."""

    code = "GEOMETRY_MISMATCH"


class ParentMissing(KvstoreError):
    """A block may be kept only while its parent is."""

    code = "PARENT_MISSING"


class DamagedBytes(KvstoreError):
    """Bytes that arrived do not have the checksum that came with them."""

    code = "DAMAGED_BYTES"


class LimitExceeded(KvstoreError):
    """A named limit was reached; the request may succeed later or smaller."""

    code = "LIMIT_EXCEEDED"


class PolicyTooLarge(KvstoreError):
    """A window-state policy whose states of one prompt do not fit the disk's share for states."""

    code = "POLICY_TOO_LARGE"


class NoSpace(KvstoreError):
    """The disk or its budget holds no more, and nothing may be evicted now."""

    code = "NO_SPACE"


class DeviceError(KvstoreError):
    """The device failed a read or a write. Reads of other records go on."""

    code = "DEVICE_ERROR"


class Draining(KvstoreError):
    code = "DRAINING"


class Unavailable(KvstoreError):
    """The service could not be reached, or went away during the call."""

    code = "UNAVAILABLE"


class DirectoryInUse(KvstoreError):
    code = "DIRECTORY_IN_USE"


class FormatTooNew(KvstoreError):
    code = "FORMAT_TOO_NEW"


class StoreDamaged(KvstoreError):
    """The directory holds something that is neither ours nor empty, or its identity file is unreadable."""

    code = "STORE_DAMAGED"


class ConfigError(KvstoreError):
    code = "CONFIG"


class ProfileError(KvstoreError):
    code = "PROFILE"


ALL_ERRORS: dict[str, type[KvstoreError]] = {
    cls.code: cls
    for cls in (
        KvstoreError,
        InvalidArgument,
        MemoryUnavailable,
        UnknownNamespace,
        UnknownLease,
        UnknownReservation,
        UnknownTicket,
        UnknownSession,
        Unauthenticated,
        Forbidden,
        GeometryMismatch,
        ParentMissing,
        DamagedBytes,
        LimitExceeded,
        PolicyTooLarge,
        NoSpace,
        DeviceError,
        Draining,
        Unavailable,
        DirectoryInUse,
        FormatTooNew,
        StoreDamaged,
        ConfigError,
        ProfileError,
    )
}
