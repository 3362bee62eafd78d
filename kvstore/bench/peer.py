"""A client process of a bench: `python -m kvstore.bench.peer DIRECTORY`. It does what its input's lines say, one at a time, and
answers each with a line of JSON."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvstore.errors import KvstoreError
from kvstore.profile.registry import get_profile
from kvstore.types import ItemKind
from kvstore_client import CacheClient, Costs, Deadlines, OpenedNamespace, ReserveItem

PAGE = 4096
_EAGER = Costs(seconds_per_layer_token=1.0)
"""A price of computing at which every plan restores all that it can."""

Keys = list[bytes]


class Peer:
    """`commits` under way at once; the bytes of one are handed over after those of another."""

    def __init__(self, client: CacheClient, space: OpenedNamespace, *, commits: int, seed: int) -> None:
        self._client = client
        self._space = space
        self._chance = random.Random(seed)
        self._threads = ThreadPoolExecutor(commits)
        self._commits = commits
        self._filling = threading.Lock()
        self._chains: list[Keys] = []
        self._stamp = 0

    def prepare(self, chains: int, blocks: int) -> dict[str, Any]:
        """New keys, for the next `write`."""
        self._chains = [[self._chance.randbytes(32) for _ in range(blocks)] for _ in range(chains)]
        return {}

    def warm(self, blocks: int) -> dict[str, Any]:
        """Every page that a commit of so many blocks is put together in holds random bytes, on both sides."""
        for _ in range(self._commits):
            chain = [self._chance.randbytes(32) for _ in range(blocks)]
            self._store(chain, lambda buffer: _fill(buffer, self._chance))
        return {}

    def write(self) -> dict[str, Any]:
        """All chains, each in a commit of its own."""
        return {"bytes": sum(self._run(lambda chain: self._store(chain, self._stamped)))}

    def read(self) -> dict[str, Any]:
        """All chains, each mapped under a lease of its own, and one byte of every page read where it lies."""
        return {"bytes": sum(self._run(self._look))}

    def _run(self, work: Callable[[Keys], int]) -> list[int]:
        return list(self._threads.map(work, self._chains))

    def _store(self, chain: Keys, fill: Callable[[memoryview], None]) -> int:
        space = self._space
        items = [
            ReserveItem(
                kind=ItemKind.BLOCK,
                key=key,
                parent=chain[number - 1] if number else space.digest,
                position=(number + 1) * space.block_tokens,
                length=space.block_bytes,
            )
            for number, key in enumerate(chain)
        ]
        with self._client.reserve(space.digest, items) as reservation:
            with self._filling:
                buffers = {number: reservation.buffer(number) for number in reservation.granted}
                for buffer in buffers.values():
                    fill(buffer)
                reservation.write(buffers)
            return reservation.commit().bytes

    def _stamped(self, buffer: memoryview) -> None:
        """As a device leaves it there: no processor copies it, and it is not what was there before."""
        self._stamp += 1
        buffer[:8] = self._stamp.to_bytes(8, "little")

    def _look(self, chain: Keys) -> int:
        tokens = len(chain) * self._space.block_tokens
        found = self._client.lookup(self._space.digest, chain, prompt_tokens=tokens + 1, costs=_EAGER)
        if found.lease is None or found.plan.compute_from != tokens:
            raise KvstoreError(
                "not all that was stored is held",
                field="tokens",
                value=found.plan.compute_from,
                allowed=f"{tokens}",
            )
        total = 0
        with found.lease:
            for item in self._client.map(found.lease, first_block=0, block_count=len(chain), state=False):
                payload = item.payload
                if payload is None or not item.is_shared:
                    raise KvstoreError(f"block {item.index} is not in shared memory")
                _touch(payload)
                if not item.is_current():
                    raise KvstoreError(f"block {item.index} is not what was stored, under a lease")
                total += len(payload)
        return total


def _fill(buffer: memoryview, chance: random.Random) -> None:
    buffer[:] = chance.randbytes(len(buffer))


def _touch(payload: memoryview) -> int:
    return len(payload[::PAGE].tobytes())


def _lines() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def main() -> int:
    directory, profile, commits, seed = sys.argv[1:]
    with CacheClient(directory, owner="bench", deadlines=Deadlines(pause_first=0, pause_most=0)) as client:
        known = {each.profile_name: each for each in client.namespaces()}
        peer = Peer(client, known[get_profile(profile).name], commits=int(commits), seed=int(seed))
        print(json.dumps({"ready": True}), flush=True)
        for told in _lines():
            name = told.pop("do")
            try:
                answer = getattr(peer, name)(**told)
            except KvstoreError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
