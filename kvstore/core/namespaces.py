"""Namespaces: their identity, their names, and the description that the log keeps of each."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from kvstore.errors import GeometryMismatch, InvalidArgument, LimitExceeded, ProfileError, UnknownNamespace
from kvstore.plan.figures import Figures, figures_of
from kvstore.policy.window import WindowPolicy
from kvstore.prefix.identity import TEXT_FIELDS, NamespaceIdentity
from kvstore.profile.base import Profile
from kvstore.types import NamespaceDigest

DESCRIPTION_VERSION = 1

MAX_NAME = 128

NAMES_PER_NAMESPACE = 4

SECRET_FIELDS = frozenset({"tenant_salt"})


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """A namespace as it is now. `number` is the index's own name for it; `is_new`: this very call made it."""

    digest: NamespaceDigest
    name: str
    identity: NamespaceIdentity
    policy: WindowPolicy
    number: int
    figures: Figures
    is_new: bool = False

    @property
    def profile(self) -> Profile:
        return self.identity.profile


class NamespaceTable:
    """Namespaces by digest. Names are labels: each names one namespace, and a namespace may have several."""

    def __init__(self, *, default_policy: str, most: int) -> None:
        self._default_policy = default_policy
        self._most = most
        self._by_digest: dict[NamespaceDigest, NamespaceInfo] = {}
        self._by_number: dict[int, NamespaceInfo] = {}
        self._by_name: dict[str, NamespaceDigest] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def open(self, name: str, identity: NamespaceIdentity, policy: str | None) -> NamespaceInfo:
        """Make it known, or confirm it. The policy counts for a new one only; a known one keeps its own.

        GeometryMismatch when `name` is known with another identity: the first field that differs, both values.
        """
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            raise InvalidArgument(
                "a namespace has a name",
                field="name",
                value=ascii(name),
                allowed=f"1 to {MAX_NAME} printable characters",
            )
        digest = identity.digest()
        named = self._by_name.get(name)
        if named is not None and named != digest:
            self._refuse(name, self._by_digest[named].identity, identity)
        known = self._by_digest.get(digest)
        if known is not None:
            if named is None and len(self._by_name) >= NAMES_PER_NAMESPACE * self._most:
                raise LimitExceeded(
                    "too many names of namespaces",
                    field="names",
                    value=len(self._by_name) + 1,
                    allowed=f"{NAMES_PER_NAMESPACE * self._most}",
                )
            self._by_name[name] = digest
            return known
        if len(self._by_digest) >= self._most:
            raise LimitExceeded(
                "too many namespaces",
                field="namespaces",
                value=len(self._by_digest) + 1,
                allowed=f"{self._most}",
            )
        number = next(number for number in range(len(self._by_number) + 1) if number not in self._by_number)
        chosen = WindowPolicy.parse(policy or self._default_policy, identity.profile)
        made = NamespaceInfo(digest, name, identity, chosen, number, figures_of(identity.profile))
        self._by_digest[digest] = self._by_number[number] = made
        self._by_name[name] = digest
        return replace(made, is_new=True)

    def get(self, digest: bytes) -> NamespaceInfo:
        found = self._by_digest.get(NamespaceDigest(digest))
        if found is None:
            raise UnknownNamespace(
                "no such namespace; open it first",
                field="namespace",
                value=digest,
                allowed="the digest of an open namespace",
            )
        return found

    def find(self, digest: bytes) -> NamespaceInfo | None:
        return self._by_digest.get(NamespaceDigest(digest))

    def by_number(self, number: int) -> NamespaceInfo:
        return self._by_number[number]

    def set_policy(self, digest: bytes, text: str) -> NamespaceInfo:
        info = self.get(digest)
        changed = replace(info, policy=WindowPolicy.parse(text, info.profile))
        self._by_digest[info.digest] = self._by_number[info.number] = changed
        return changed

    def remove(self, digest: bytes) -> NamespaceInfo:
        info = self.get(digest)
        del self._by_digest[info.digest]
        del self._by_number[info.number]
        self._by_name = {name: each for name, each in self._by_name.items() if each != info.digest}
        return info

    def all(self) -> list[NamespaceInfo]:
        """In the order in which they were opened."""
        return list(self._by_digest.values())

    def _refuse(self, name: str, known: NamespaceIdentity, given: NamespaceIdentity) -> None:
        for (field, before), (_, value) in zip(known.fields(), given.fields(), strict=True):
            if before != value:
                hidden = field in SECRET_FIELDS
                raise GeometryMismatch(
                    f"namespace {name!r} was opened with another {field}",
                    field=field,
                    value="(hidden)" if hidden else value.decode(),
                    allowed="the one it was opened with" if hidden else before.decode() or "(none)",
                )


def describe(identity: NamespaceIdentity, name: str, policy: str) -> bytes:
    """The payload of a NAMESPACE record: canonical JSON, equal namespaces equal bytes."""
    fields = {
        "version": DESCRIPTION_VERSION,
        "name": name,
        "policy": policy,
        "profile": identity.profile.name,
        "geometry": identity.profile.geometry().decode(),
        **{field: getattr(identity, field) for field in TEXT_FIELDS},
    }
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def parse_description(payload: bytes) -> tuple[NamespaceIdentity, str, str]:
    """(identity, name, policy). Raises InvalidArgument for anything that `describe` would not have written."""
    try:
        fields = json.loads(payload)
        version = fields.pop("version")
        name, policy = fields.pop("name"), fields.pop("policy")
        profile = Profile.from_geometry(fields.pop("profile"), fields.pop("geometry").encode())
        identity = NamespaceIdentity(profile, **fields)
        valid = version == DESCRIPTION_VERSION and isinstance(name, str) and isinstance(policy, str)
        valid = valid and describe(identity, name, policy) == payload
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ProfileError) as error:
        raise InvalidArgument(
            "not a namespace description",
            field="description",
            value=str(error),
            allowed="what describe() writes",
        ) from error
    if not valid:
        raise InvalidArgument(
            "not a namespace description in canonical form",
            field="description",
            value=payload[:40],
            allowed=f"what describe() writes, version {DESCRIPTION_VERSION}",
        )
    return identity, name, policy
