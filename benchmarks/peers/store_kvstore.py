"""kvstore: its service as a process of its own, this process as a client through the public client.

Copies: a put goes from the client's memory through its arena into the service, and from there to disk; a get maps the
block in the service's memory and copies it once. In the memory tier a put is acknowledged as ACCEPTED, with room for all of a pass
to wait for the disk in; in the disk tier as DURABLE.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from benchmarks.peers.base import Peer, PeerFailed, Place, Prompt, Tier
from benchmarks.peers.processes import READY_SECONDS, Server, inherited
from kvstore.errors import Unavailable
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.keys import block_keys
from kvstore.profile.registry import get_profile
from kvstore.types import Durability, ItemKind
from kvstore_client import CacheClient, Costs, Deadlines, Lookup, OpenedNamespace, ReserveItem

PROFILE = "deepseek-v4-flash"
DISK_CACHE_BYTES = 256 << 20
STAGING_TIMES = 5
"""One session may hold half of it, and is answered before its bytes are durable while half of that is free."""
_MIB = 1 << 20
_EAGER = Costs(seconds_per_layer_token=1.0, assumed=True)
"""A price of computing at which every plan restores all that it can."""
_DEADLINES = Deadlines(pause_first=0, pause_most=0, lookup=30.0, fetch=120.0, write=120.0, commit=120.0)


class Store(Peer):
    checks_itself = True

    def __init__(self, place: Place, *, threads: int) -> None:
        super().__init__(place)
        self.threads = threads
        self._identity = NamespaceIdentity(get_profile(PROFILE), weights_revision="bench", numerics="bench")
        self.block_bytes = self._identity.profile.block_bytes
        self._server: Server | None = None
        self._client: CacheClient | None = None
        self._space: OpenedNamespace | None = None
        in_memory = place.tier is Tier.MEMORY
        self._durability = Durability.ACCEPTED if in_memory else Durability.DURABLE

    def start(self) -> None:
        size = self.place.set_bytes
        in_memory = self.place.tier is Tier.MEMORY
        parts = {
            "--cache": size * 3 // 2 if in_memory else DISK_CACHE_BYTES,
            "--pool": 16 * _MIB,
            "--handoff": 16 * _MIB,
            "--staging": size * STAGING_TIMES if in_memory else 256 * _MIB,
        }
        # A quarter more: arenas and fetches have their shares of all of it, whatever the machine's memory.
        options = {
            "--dir": self.place.directory / "s",
            "--disk": size * 3 + (1 << 30),
            "--memory": sum(parts.values()) * 5 // 4,
            **parts,
            "--lease": "1h",
        }
        flags = [str(word) for option in options.items() for word in option]
        self._server = Server(
            [sys.executable, "-m", "kvstore.cli.main", "serve", *flags],
            log=self.place.directory / "kvstore.log",
            environment=inherited(),
        )
        self._client = CacheClient(self.place.directory / "s", owner="bench", deadlines=_DEADLINES)
        self._server.wait_for(self._opened, what="kvstore", seconds=READY_SECONDS)

    def _opened(self) -> bool:
        try:
            self._space = self._open_client().open_namespace(self._identity, name="bench")
        except Unavailable:
            return False
        return True

    def stop(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._server is not None:
            self._server.stop()
        self._client = self._server = None

    def put(self, prompt: Prompt, payloads: Sequence[memoryview]) -> None:
        keys, items = self._items(prompt)
        with self._open_client().reserve(self._opened_space().digest, items) as reservation:
            if len(reservation.granted) != len(keys):
                raise PeerFailed(f"kvstore granted {len(reservation.granted)} of {len(keys)} blocks")
            reservation.write({number: payloads[number] for number in reservation.granted})
            committed = reservation.commit(self._durability)
        if committed.items != len(keys):
            raise PeerFailed(f"kvstore stored {committed.items} of {len(keys)} blocks")
        if committed.durability not in (self._durability, Durability.DURABLE):
            raise PeerFailed(f"kvstore answered {self._durability.name} as {committed.durability.name}")

    def get(
        self, prompt: Prompt, rooms: Sequence[memoryview], got: Callable[[int], None], *, verify: bool
    ) -> None:
        client, found = self._open_client(), self._lookup(prompt)
        assert found.lease is not None
        with found.lease:
            items = client.map(
                found.lease, first_block=0, block_count=prompt.blocks, state=False, verify=verify
            )
            for number, item in enumerate(items):
                if not item.copy_to(rooms[number]):
                    raise PeerFailed(f"kvstore has lost block {number} of {prompt.blocks}")
                got(number)

    def _lookup(self, prompt: Prompt) -> Lookup:
        space, tokens = self._opened_space(), prompt.tokens()
        keys = block_keys(space.digest, tokens, block_tokens=space.block_tokens)
        found = self._open_client().lookup(space.digest, keys, prompt_tokens=len(tokens) + 1, costs=_EAGER)
        if found.lease is None or found.plan.compute_from != len(tokens):
            raise PeerFailed(f"kvstore holds {found.blocks_held} of {len(keys)} blocks")
        return found

    def _items(self, prompt: Prompt) -> tuple[Sequence[bytes], list[ReserveItem]]:
        space = self._opened_space()
        keys = block_keys(space.digest, prompt.tokens(), block_tokens=space.block_tokens)
        items = [
            ReserveItem(
                kind=ItemKind.BLOCK,
                key=key,
                parent=keys[number - 1] if number else space.digest,
                position=(number + 1) * space.block_tokens,
                length=space.block_bytes,
            )
            for number, key in enumerate(keys)
        ]
        return keys, items

    def forget(self) -> None:
        self._open_client().clear(self._opened_space().digest)

    def _open_client(self) -> CacheClient:
        assert self._client is not None, "start comes first"
        return self._client

    def _opened_space(self) -> OpenedNamespace:
        assert self._space is not None, "start comes first"
        return self._space
