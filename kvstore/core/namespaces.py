"""Namespaces: their identity, their names, and the description that the log keeps of each."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, replace

from kvstore.errors import (
    FormatTooNew,
    GeometryMismatch,
    InvalidArgument,
    LimitExceeded,
    ProfileError,
    UnknownNamespace,
)
from kvstore.plan.figures import Figures, figures_of
from kvstore.policy.window import WindowPolicy, check_share, share_tokens
from kvstore.prefix.identity import TEXT_FIELDS, NamespaceIdentity
from kvstore.profile.base import Profile
from kvstore.profile.keyed import profile_of
from kvstore.types import ItemKind, NamespaceDigest

DESCRIPTION_VERSION = 1

MAX_NAME = 128

KEYED_POLICY = "zero"
"""The only one of a keyed namespace, which has no states."""

NAMES_PER_NAMESPACE = 16
"""So that nobody uses up what others could name theirs by."""


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

    @property
    def tenant(self) -> str:
        """Whose it is: the tenant salt, empty where there is none."""
        return self.identity.tenant_salt

    def check_prefix(self) -> None:
        """Raise InvalidArgument unless it holds prompts' blocks."""
        if self.profile.is_keyed:
            raise InvalidArgument(
                "a keyed namespace has no prompts, plans and states",
                field="namespace",
                value=self.name,
                allowed="Contains, Reserve of blocks, and Fetch or Map of whole blocks",
            )

    def check_keyed(self) -> None:
        """Raise InvalidArgument unless its keys stand for themselves."""
        if not self.profile.is_keyed:
            raise InvalidArgument(
                "the blocks of a prefix namespace count with those before them only",
                field="namespace",
                value=self.name,
                allowed="Lookup, or a keyed namespace",
            )

    def lengths(self, kind: ItemKind) -> tuple[int, ...]:
        """The payload lengths that an item of this kind may have."""
        if kind is ItemKind.ROWS:
            return self.figures.rows_block_bytes, self.figures.rows_overlap_block_bytes
        return (self.figures.block_bytes if kind is ItemKind.BLOCK else self.figures.state_bytes,)


@dataclass(frozen=True, slots=True)
class StatesShare:
    """What the disk has for states, in bytes, and the longest prompt whose states must fit into it, in tokens."""

    share_bytes: int
    longest_tokens: int

    def check(self, policy: WindowPolicy, profile: Profile) -> None:
        """Raise PolicyTooLarge where the policy keeps more for one such prompt."""
        check_share(policy, profile, share_bytes=self.share_bytes, longest_tokens=self.longest_tokens)

    def tokens(self, policy: WindowPolicy, profile: Profile) -> int:
        """Of how many tokens it holds the states; 0 where the policy keeps none."""
        return share_tokens(policy, profile, share_bytes=self.share_bytes, longest_tokens=self.longest_tokens)


class NamespaceTable:
    """Namespaces by digest. Names are labels of a tenant's own: each names one namespace of it, and a namespace may have several."""

    def __init__(self, *, default_policy: str, most: int, share: StatesShare) -> None:
        self._default_policy = default_policy
        self._most = most
        self._share = share
        self._by_digest: dict[NamespaceDigest, NamespaceInfo] = {}
        self._by_number: dict[int, NamespaceInfo] = {}
        self._by_name: dict[tuple[str, str], NamespaceDigest] = {}
        """By tenant and name: what others call theirs keeps nobody from a name, and is told nobody."""
        self._names: Counter[NamespaceDigest] = Counter()
        """How many each has."""
        self._numbers: dict[str, set[int]] = {}
        """Of each tenant's namespaces."""

    def __len__(self) -> int:
        return len(self._by_digest)

    def open(
        self, name: str, identity: NamespaceIdentity, policy: str | None, *, is_found: bool = False
    ) -> NamespaceInfo:
        """Make it known, or confirm it. The policy counts for a new one only; a known one keeps its own. `is_found`: it
        was here before the start, and keeps its policy whatever the share holds now.

        PolicyTooLarge when a new one's policy keeps more than the share holds.
        GeometryMismatch when the tenant has `name` with another identity: the first field that differs, both values.
        """
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            raise InvalidArgument(
                "a namespace has a name",
                field="name",
                value=ascii(name),
                allowed=f"1 to {MAX_NAME} printable characters",
            )
        digest = identity.digest()
        label = identity.tenant_salt, name
        named = self._by_name.get(label)
        if named is not None and named != digest:
            self._refuse(name, self._by_digest[named].identity, identity)
        known = self._by_digest.get(digest)
        if known is not None:
            if named is None:
                if self._names[digest] >= NAMES_PER_NAMESPACE:
                    raise LimitExceeded(
                        "too many names of one namespace",
                        field="names",
                        value=self._names[digest] + 1,
                        allowed=f"{NAMES_PER_NAMESPACE}",
                    )
                self._call(label, digest)
            return known
        if len(self._by_digest) >= self._most:
            raise LimitExceeded(
                "too many namespaces",
                field="namespaces",
                value=len(self._by_digest) + 1,
                allowed=f"{self._most}",
            )
        profile = identity.profile
        text = policy or (KEYED_POLICY if profile.is_keyed else self._default_policy)
        chosen = WindowPolicy.parse(text, profile) if is_found else self.policy_for(profile, text)
        number = next(number for number in range(len(self._by_number) + 1) if number not in self._by_number)
        made = NamespaceInfo(digest, name, identity, chosen, number, figures_of(identity.profile))
        self._by_digest[digest] = self._by_number[number] = made
        self._call(label, digest)
        self._numbers.setdefault(made.tenant, set()).add(number)
        return replace(made, is_new=True)

    def _call(self, label: tuple[str, str], digest: NamespaceDigest) -> None:
        self._by_name[label] = digest
        self._names[digest] += 1

    def get(self, digest: bytes) -> NamespaceInfo:
        found = self._by_digest.get(NamespaceDigest(digest))
        if found is None:
            raise unknown_namespace(digest)
        return found

    def find(self, digest: bytes) -> NamespaceInfo | None:
        return self._by_digest.get(NamespaceDigest(digest))

    def by_number(self, number: int) -> NamespaceInfo:
        return self._by_number[number]

    def policy_for(self, profile: Profile, text: str) -> WindowPolicy:
        """Raises InvalidArgument for what is no policy of the profile, PolicyTooLarge for what the share does not hold."""
        policy = WindowPolicy.parse(text, profile)
        if profile.is_keyed and text != KEYED_POLICY:
            raise InvalidArgument(
                "a keyed namespace has no states to keep", field="policy", value=text, allowed=KEYED_POLICY
            )
        self._share.check(policy, profile)
        return policy

    def share_tokens(self, info: NamespaceInfo) -> int:
        """Of how many tokens the share holds the states under the namespace's policy; 0 where it keeps none."""
        return self._share.tokens(info.policy, info.profile)

    def share_states(self, info: NamespaceInfo) -> int:
        """How many whole states of the namespace the share holds; 0 where there are none."""
        size = info.figures.state_bytes
        return self._share.share_bytes // size if size else 0

    def check_share(self, info: NamespaceInfo) -> None:
        """Raise PolicyTooLarge where a namespace that was found keeps more than the share holds."""
        self._share.check(info.policy, info.profile)

    def set_policy(self, digest: bytes, text: str) -> NamespaceInfo:
        """As `policy_for` has allowed it, or as it was found."""
        info = self.get(digest)
        changed = replace(info, policy=WindowPolicy.parse(text, info.profile))
        self._by_digest[info.digest] = self._by_number[info.number] = changed
        return changed

    def remove(self, digest: bytes) -> NamespaceInfo:
        info = self.get(digest)
        del self._by_digest[info.digest]
        del self._by_number[info.number]
        self._numbers[info.tenant].remove(info.number)
        if not self._numbers[info.tenant]:
            del self._numbers[info.tenant]
        self._by_name = {label: each for label, each in self._by_name.items() if each != info.digest}
        del self._names[info.digest]
        return info

    def tenants(self) -> list[str]:
        """Those that have a namespace."""
        return list(self._numbers)

    def numbers_of(self, tenant: str) -> Set[int]:
        """Of the tenant's namespaces."""
        return self._numbers.get(tenant, frozenset())

    def all(self) -> list[NamespaceInfo]:
        """In the order in which they were opened."""
        return list(self._by_digest.values())

    def _refuse(self, name: str, known: NamespaceIdentity, given: NamespaceIdentity) -> None:
        for (field, before), (_, value) in zip(known.fields(), given.fields(), strict=True):
            if before != value:
                raise GeometryMismatch(
                    f"namespace {name!r} was opened with another {field}",
                    field=field,
                    value=value.decode(),
                    allowed=before.decode() or "(none)",
                )


def unknown_namespace(digest: bytes) -> UnknownNamespace:
    """The refusal of one that is not there, and of one that is not the caller's."""
    return UnknownNamespace(
        "no such namespace; open it first",
        field="namespace",
        value=digest,
        allowed="the digest of an open namespace",
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
        if isinstance(version, int) and version > DESCRIPTION_VERSION:
            raise FormatTooNew(
                "a namespace's description is newer than this program reads; start it with the release that wrote it, or a later one",
                field="description_version",
                value=version,
                allowed=f"at most {DESCRIPTION_VERSION}",
            )
        name, policy = fields.pop("name"), fields.pop("policy")
        profile = profile_of(fields.pop("profile"), fields.pop("geometry").encode())
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
