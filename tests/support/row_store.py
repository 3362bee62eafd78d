"""A store of rows in this process whose calls a test holds up, fails and counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvstore.errors import KvstoreError
from kvstore.prefix.opaque import OpaqueKey
from kvstore.types import BytesLike

WAIT = 10.0


class HeldStore:
    """As kvstore_client.KeyedStore. `fails`: raised by every call; `lost`: keys that are said to be held and cannot be read.
    While it is held, calls stand still where their bytes would move; `standing` counts those that have got there."""

    def __init__(self) -> None:
        self.kept: dict[OpaqueKey, bytes] = {}
        self.lost: set[OpaqueKey] = set()
        self.in_flight: set[OpaqueKey] = set()
        self.fails: KvstoreError | None = None
        self.fails_after: int | None = None
        """Calls that go well before `fails` counts; None: it counts at once."""
        self.used: list[OpaqueKey] = []
        self.calls: list[tuple[str, list[OpaqueKey]]] = []
        self.standing = threading.Semaphore(0)
        self._going = threading.Event()
        self._going.set()

    def hold(self) -> None:
        self._going.clear()

    def let_go(self) -> None:
        self._going.set()

    def wait_standing(self) -> None:
        assert self.standing.acquire(timeout=WAIT), "no call came"

    def contains(self, keys: Sequence[OpaqueKey], *, use: bool = False) -> tuple[bool, ...]:
        self._begin("use" if use else "contains", keys)
        if use:
            self.used += keys
        return tuple(key in self.kept or key in self.lost for key in keys)

    def get_into(self, targets: Sequence[tuple[OpaqueKey, memoryview | bytearray]]) -> tuple[bool, ...]:
        self._begin("get", [key for key, _ in targets])
        for key, target in targets:
            if key in self.kept:
                target[: len(self.kept[key])] = self.kept[key]
            elif key in self.lost:
                target[:4] = b"\xff" * 4
        return tuple(key in self.kept for key, _ in targets)

    def put(self, items: Sequence[tuple[OpaqueKey, BytesLike]]) -> tuple[bool, ...]:
        self._begin("put", [key for key, _ in items])
        self.kept.update({key: bytes(row) for key, row in items if key not in self.in_flight})
        return tuple(key not in self.in_flight for key, _ in items)

    def _begin(self, name: str, keys: Sequence[OpaqueKey]) -> None:
        self.calls.append((name, list(keys)))
        self.standing.release()
        assert self._going.wait(WAIT), "nobody let the store go"
        if self.fails is not None and (self.fails_after is None or len(self.calls) > self.fails_after):
            raise self.fails
