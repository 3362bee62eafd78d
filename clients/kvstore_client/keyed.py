"""Payloads under opaque keys: what an engine's plug-in needs, which has keys of its own and no prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.errors import InvalidArgument, UnknownNamespace
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.opaque import OpaqueKey, store_key
from kvstore.types import BlockKey, BytesLike, ItemKind
from kvstore_client.client import CacheClient
from kvstore_client.dock import Dock
from kvstore_client.values import ReserveItem, ReserveOutcome

KEYS_PER_CALL = 256

T = TypeVar("T")


class KeyedStore:
    """The payloads of one keyed namespace: one whose profile is a kvstore.profile.keyed.KeyedProfile. All have its length.

    Nothing is called before the first use, which opens the namespace; so does the first use after a service has come back
    without it. Any number of threads may call. Each call ends by its deadlines with an answer or one of kvstore.errors, as
    the client's do.
    """

    def __init__(
        self, client: CacheClient, identity: NamespaceIdentity, *, name: str, dock: Dock | None = None
    ) -> None:
        """`dock`: memory that the service may read from and write to by itself, for what is stored from there and loaded to there.
        It stays the caller's."""
        if not identity.profile.is_keyed:
            raise InvalidArgument(
                "opaque keys need a keyed namespace",
                field="profile",
                value=identity.profile.name,
                allowed="a KeyedProfile",
            )
        self._client = client
        self._identity = identity
        self._name = name
        self._dock = dock
        self.digest = identity.digest()
        self.payload_bytes = identity.profile.block_bytes
        self._opened = False

    def __repr__(self) -> str:
        return f"KeyedStore({self._name!r}, payload_bytes={self.payload_bytes}, opened={self._opened})"

    def contains(self, keys: Sequence[OpaqueKey], *, use: bool = False) -> tuple[bool, ...]:
        """Whether each is held now; that promises nothing. With `use` those that are count as used now: of one call's, the last
        one goes first where room is wanted."""
        names = self._names(keys)

        def ask() -> tuple[bool, ...]:
            held: list[bool] = []
            for first in range(0, len(names), KEYS_PER_CALL):
                part = names[first : first + KEYS_PER_CALL]
                held += self._client.contains(self.digest, part, use=use).held
            return tuple(held)

        return self._in_namespace(ask)

    def get_into(self, targets: Sequence[tuple[OpaqueKey, memoryview | bytearray]]) -> tuple[bool, ...]:
        """Copy each payload into its target, which has room for it. Whether what lies there now is the key's, checked against
        its writer's checksum; where not, it is a miss, and what the target holds is undefined.

        What is found is used now and protected while it is read. Raises as CacheClient.map: targets are undefined then. Nothing
        is written to a target after this has returned or raised; where the service itself writes to them, it may come later than its
        deadlines for that (see Lease.fetch_into).
        """
        names = self._names([key for key, _ in targets])

        def get() -> tuple[bool, ...]:
            got: list[bool] = []
            for first in range(0, len(names), KEYS_PER_CALL):
                part = slice(first, first + KEYS_PER_CALL)
                got += self._get(names[part], [target for _, target in targets[part]])
            return tuple(got)

        return self._in_namespace(get)

    def put(self, items: Sequence[tuple[OpaqueKey, BytesLike]]) -> tuple[bool, ...]:
        """Keep these, in one reservation: all that is written becomes durable and visible together. Whether each is held now;
        one that another writer is just storing is not yet. What is held already is not written again, and its bytes are not
        compared. Items that one request brought are given first one first, and go from their end on.

        Raises as CacheClient.reserve, Reservation.write and commit do: nothing is stored then, or, after Unavailable from the
        commit, perhaps all. LimitExceeded where the items are more than the service has room for on their way.
        """
        names = self._names([key for key, _ in items])
        payloads = dict(zip(names, (payload for _, payload in items), strict=True))

        def put() -> tuple[bool, ...]:
            held = self._put(payloads)
            return tuple(name in held for name in names)

        return self._in_namespace(put)

    # ---- inside ---------------------------------------------------------------------------------------------

    def _names(self, keys: Sequence[OpaqueKey]) -> list[BlockKey]:
        return [store_key(self.digest, key) for key in keys]

    def _in_namespace(self, call: Callable[[], T]) -> T:
        if not self._opened:
            self._open()
            return call()
        try:
            return call()
        except UnknownNamespace:
            # Another service, or one that began anew, on the same address.
            self._open()
        return call()

    def _open(self) -> None:
        self._client.open_namespace(self._identity, name=self._name)
        self._opened = True

    def _get(self, names: Sequence[BlockKey], targets: Sequence[memoryview | bytearray]) -> list[bool]:
        found = self._client.contains(self.digest, names, lease=True)
        if found.lease is None:
            return [False] * len(names)
        got = list(found.held)
        held = [at for at, is_held in enumerate(got) if is_held]
        with found.lease as lease:
            into = [memoryview(targets[at]) for at in held]
            has_room = all(target.nbytes >= self.payload_bytes for target in into)
            landed = lease.fetch_into(self._dock, into) if self._dock is not None and has_room else None
            if landed is not None:
                for at, is_here in zip(held, landed, strict=True):
                    got[at] = is_here
                return got
            items = lease.map(first_block=0, block_count=len(held), state=False, verify=True)
            for at, item in zip(held, items, strict=True):
                got[at] = item.copy_to(targets[at])
        return got

    def _put(self, payloads: dict[BlockKey, BytesLike]) -> set[BlockKey]:
        # What comes last goes last, and what lies last in the log is found as the newest after a restart.
        names = list(reversed(payloads))
        items = [
            ReserveItem(
                kind=ItemKind.BLOCK, key=name, parent=self.digest, position=1, length=self.payload_bytes
            )
            for name in names
        ]
        with self._client.reserve(self.digest, items) as reservation:
            reservation.write({at: payloads[names[at]] for at in reservation.granted}, dock=self._dock)
            committed = reservation.commit()
        left_out = set(committed.left_out)
        return {
            name
            for at, (name, outcome) in enumerate(zip(names, reservation.outcomes, strict=True))
            if outcome is ReserveOutcome.HELD or (outcome is ReserveOutcome.GRANTED and at not in left_out)
        }
