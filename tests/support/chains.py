"""Chains of blocks for tests: the bytes of an item follow from its key, so that a reader knows what is right."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.keys import block_keys
from kvstore.profile.layout import state_layout
from kvstore.profile.registry import get_profile
from kvstore.types import Durability, ItemKind
from kvstore_client import CacheClient, Committed, FetchedItem, Lookup, OpenedNamespace, ReserveItem


def payload_of(key: bytes, length: int, kind: ItemKind = ItemKind.BLOCK) -> bytes:
    return hashlib.shake_256(bytes([kind]) + key).digest(length)


def identity_of(profile: str = "tiny", *, salt: str = "") -> NamespaceIdentity:
    return NamespaceIdentity(get_profile(profile), weights_revision="w1", numerics="n1", tenant_salt=salt)


def open_state(profile: str, position: int, *, seed: int = 0) -> bytes:
    """Bytes of the length that a state at any position has, as a handoff carries it."""
    length = state_layout(get_profile(profile), position).total_bytes
    return hashlib.shake_256(f"{seed}".encode()).digest(length)


@dataclass(frozen=True)
class Chain:
    """Whole blocks of one token run in a namespace."""

    namespace: OpenedNamespace
    keys: Sequence[bytes]

    @classmethod
    def of(cls, namespace: OpenedNamespace, blocks: int, *, seed: int) -> Chain:
        tokens = [(seed * 1_000_003 + i * 7) % 50_000 for i in range(blocks * namespace.block_tokens)]
        return cls(namespace, block_keys(namespace.digest, tokens, block_tokens=namespace.block_tokens))

    def block_item(self, index: int) -> ReserveItem:
        return ReserveItem(
            kind=ItemKind.BLOCK,
            key=self.keys[index],
            parent=self.keys[index - 1] if index else self.namespace.digest,
            position=(index + 1) * self.namespace.block_tokens,
            length=self.namespace.block_bytes,
        )

    def state_item(self, index: int, *, to_pool: bool = False, to_ssd: bool = True) -> ReserveItem:
        """The state at the end of block `index`."""
        return ReserveItem(
            kind=ItemKind.STATE,
            key=self.keys[index],
            position=(index + 1) * self.namespace.block_tokens,
            length=self.namespace.state_bytes,
            to_pool=to_pool,
            to_ssd=to_ssd,
        )

    def payload(self, item: ReserveItem) -> bytes:
        return payload_of(item.key, item.length, item.kind)

    def store(
        self,
        client: CacheClient,
        *,
        first: int = 0,
        last: int | None = None,
        states: Collection[int] = (),
        to_pool: bool = False,
        durability: Durability = Durability.DURABLE,
    ) -> Committed:
        """Reserve, write and commit blocks [first, last) and the states at the ends of the blocks in `states`."""
        items = [self.block_item(i) for i in range(first, len(self.keys) if last is None else last)]
        items += [self.state_item(i, to_pool=to_pool) for i in states]
        with client.reserve(self.namespace.digest, items) as reservation:
            reservation.write({i: self.payload(items[i]) for i in reservation.granted})
            return reservation.commit(durability)

    def right_bytes(self, item: FetchedItem) -> bytes:
        """What `item` must hold."""
        if item.kind is ItemKind.BLOCK:
            return payload_of(self.keys[item.index], self.namespace.block_bytes)
        key = self.keys[item.index // self.namespace.block_tokens - 1]
        return payload_of(key, self.namespace.state_bytes, ItemKind.STATE)

    def fetch(self, client: CacheClient, found: Lookup) -> list[FetchedItem]:
        """All that the plan of a leased lookup reads; asserts that each item is missing or exactly right."""
        assert found.lease is not None, "nothing is leased"
        blocks = found.plan.compute_from // self.namespace.block_tokens
        state = found.plan.state_source.value in ("POOL", "CHECKPOINT")
        items = list(client.fetch(found.lease, first_block=0, block_count=blocks, state=state))
        for item in items:
            assert item.payload is None or item.payload == self.right_bytes(item), (item.kind, item.index)
        return items
