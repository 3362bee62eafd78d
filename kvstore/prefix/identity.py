"""What decides whether two runs may share bytes, and its digest."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from kvstore.errors import InvalidArgument
from kvstore.profile.base import Profile
from kvstore.types import NamespaceDigest

# A domain tag keeps a digest made for one purpose from ever being one made for another.
NAMESPACE_DOMAIN = b"kvstore.namespace.v1"

MAX_FIELD_BYTES = 4096

TEXT_FIELDS = ("weights_revision", "numerics", "adapter", "tenant_salt")


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """Everything beside the tokens that the cached bytes depend on, and whose they are.

    A text field that is absent, None or empty is one and the same: no value. InvalidArgument for text that is not
    valid Unicode or longer than MAX_FIELD_BYTES in UTF-8.
    """

    profile: Profile
    weights_revision: str
    numerics: str
    adapter: str = ""
    tenant_salt: str = ""

    def __post_init__(self) -> None:
        for field in TEXT_FIELDS:
            value = getattr(self, field)
            if value is None:
                object.__setattr__(self, field, "")
            else:
                _utf8(field, value)

    def fields(self) -> tuple[tuple[str, bytes], ...]:
        """(tag, value) in a fixed order. The geometry holds the layer schedule and all numeric formats."""
        return (
            ("profile", _utf8("profile", self.profile.name)),
            ("geometry", self.profile.geometry()),
            *((field, _utf8(field, getattr(self, field))) for field in TEXT_FIELDS),
        )

    def digest(self) -> NamespaceDigest:
        """32 bytes: SHA-256 over the domain tag and, per field, length and bytes of its tag and of its value."""
        hasher = hashlib.sha256(NAMESPACE_DOMAIN)
        for tag, value in self.fields():
            for part in (tag.encode(), value):
                hasher.update(struct.pack("<I", len(part)))
                hasher.update(part)
        return NamespaceDigest(hasher.digest())


def _utf8(field: str, value: object) -> bytes:
    allowed = f"text of at most {MAX_FIELD_BYTES} bytes in UTF-8, or none"
    if not isinstance(value, str):
        raise InvalidArgument(f"{field} is text", field=field, value=repr(value), allowed=allowed)
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"{field} is not valid Unicode", field=field, value=ascii(value), allowed=allowed
        ) from None
    if len(encoded) > MAX_FIELD_BYTES and field != "profile":
        raise InvalidArgument(
            f"{field} is too long", field=field, value=f"{len(encoded)} bytes", allowed=allowed
        )
    return encoded
