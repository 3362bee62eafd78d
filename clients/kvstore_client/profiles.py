"""The profiles of namespaces: a client that reads rows or slices must know where they lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvstore.errors import GeometryMismatch, ProfileError, UnknownNamespace
from kvstore.profile.base import Profile
from kvstore.profile.keyed import profile_of
from kvstore_client.values import OpenedNamespace


class KnownProfiles:
    """By namespace digest; learned where a namespace is opened or listed. Any thread."""

    def __init__(self) -> None:
        self._known: dict[bytes, Profile] = {}
        self._lock = threading.Lock()

    def learn(self, namespace: bytes, profile: Profile) -> None:
        with self._lock:
            self._known[namespace] = profile

    def known(self, namespace: bytes) -> Profile | None:
        with self._lock:
            return self._known.get(namespace)

    def learn_from(self, listed: Iterable[OpenedNamespace], namespace: bytes) -> Profile:
        """UnknownNamespace where it is not among them; GeometryMismatch for a geometry of another version."""
        opened = next((each for each in listed if each.digest == namespace), None)
        if opened is None:
            raise UnknownNamespace("no such namespace", field="namespace", value=namespace)
        try:
            profile = profile_of(opened.profile_name, opened.geometry)
        except ProfileError as error:
            raise GeometryMismatch(
                f"the namespace's geometry is not understood; use a client and a service of one version: {error}",
                field="profile",
                value=opened.profile_name,
            ) from error
        self.learn(namespace, profile)
        return profile


class Profiles(KnownProfiles):
    """Those that are not known are asked for."""

    def __init__(self, ask: Callable[[], Iterable[OpenedNamespace]]) -> None:
        super().__init__()
        self._ask = ask

    def get(self, namespace: bytes) -> Profile:
        """Raises as learn_from."""
        found = self.known(namespace)
        return self.learn_from(self._ask(), namespace) if found is None else found
