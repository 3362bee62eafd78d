"""The profiles of namespaces: a client that reads rows or slices must know where they lie."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvstore.errors import GeometryMismatch, ProfileError, UnknownNamespace
from kvstore.profile.base import Profile
from kvstore_client.values import OpenedNamespace


class Profiles:
    """By namespace digest; learned where a namespace is opened or listed, asked for when one is not known. Any thread."""

    def __init__(self, ask: Callable[[], Iterable[OpenedNamespace]]) -> None:
        self._ask = ask
        self._known: dict[bytes, Profile] = {}
        self._lock = threading.Lock()

    def learn(self, namespace: bytes, profile: Profile) -> None:
        with self._lock:
            self._known[namespace] = profile

    def get(self, namespace: bytes) -> Profile:
        """UnknownNamespace where the service does not know it either; GeometryMismatch for a geometry of another version."""
        with self._lock:
            found = self._known.get(namespace)
        if found is not None:
            return found
        opened = next((each for each in self._ask() if each.digest == namespace), None)
        if opened is None:
            raise UnknownNamespace("no such namespace", field="namespace", value=namespace)
        try:
            profile = Profile.from_geometry(opened.profile_name, opened.geometry)
        except ProfileError as error:
            raise GeometryMismatch(
                f"the namespace's geometry is not understood; use a client and a service of one version: {error}",
                field="profile",
                value=opened.profile_name,
            ) from error
        self.learn(namespace, profile)
        return profile
