"""Reading from memory that a service shares: how soon all places are known, and what the checks cost beside a plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.bench.pairs import Pair, spread
from kvstore.bench.serving import Chain, opened, options_for, serving
from kvstore.errors import KvstoreError
from kvstore.profile.registry import get_profile
from kvstore_client import CacheClient, Deadlines, Lookup, MappedItem

PROFILE = "deepseek-v4-flash"
DESCRIPTORS_BAR = 10.0
"""Milliseconds from the call until all items of the size are listed."""
RATIO_BAR = 1.3
"""Seconds of copies that were verified, for each second of plain ones."""
TURN_BLOCKS = 8
"""Copied in one way before the other has its turn: a millisecond."""

MEGABYTE = 1e6


@dataclass(slots=True)
class Readings:
    """`descriptors`: milliseconds; `copies`: bytes per second, verified beside plain."""

    blocks: int
    block_bytes: int
    descriptors: list[float] = field(default_factory=list)
    copies: list[Pair] = field(default_factory=list)


def measure(
    directory: Path,
    *,
    size: int,
    pairs: int,
    seed: int,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> Readings:
    """In an empty directory that the caller removes, with a service of its own. `size`: bytes of all blocks. check: called
    between the steps, where nothing is half done; what it raises comes out when the service has gone."""
    profile = get_profile(PROFILE)
    found = Readings(size // profile.block_bytes, profile.block_bytes)
    with (
        serving(directory, options_for(size)),
        CacheClient(
            directory / "s", owner="bench", deadlines=Deadlines(pause_first=0, pause_most=0, fetch=120.0)
        ) as client,
    ):
        chain = Chain(opened(client, profile, check), found.blocks, seed)
        tell(f"storing {found.blocks:,} blocks, {size >> 20} MiB (seed {seed})")
        chain.store(client, check)
        with chain.leased(client) as looked_up:
            items = _shared(_mapped(client, looked_up, found.blocks, check))
            copier = _Copier(items, profile.block_bytes)
            copier.warm(check)
            for number in range(1, pairs + 1):
                pair = copier.pair()
                found.copies.append(pair)
                found.descriptors.append(_map_seconds(chain, client) * 1000)
                tell(
                    f"{number} of {pairs}: {found.descriptors[-1]:.2f} ms, verified {pair.ours / MEGABYTE:,.0f} MB/s, "
                    f"plain {pair.theirs / MEGABYTE:,.0f}, ratio {_ratio(pair):.3f}"
                )
                check()
    return found


def report(found: Readings, *, seed: int) -> dict[str, Any]:
    """missed: the bars that the medians do not reach."""
    samples = {"descriptors_ms": found.descriptors, "verified_ratio": [_ratio(pair) for pair in found.copies]}
    bars = {"descriptors_ms": DESCRIPTORS_BAR, "verified_ratio": RATIO_BAR}
    spreads = {name: spread(values) for name, values in samples.items()}
    return {
        **{name: each.median for name, each in spreads.items()},
        "missed": [name for name, each in spreads.items() if each.median > bars[name]],
        "bars": bars,
        "detail": {
            "what": {
                "descriptors_ms": "milliseconds from one Map of all blocks, which are in memory, until all items are listed",
                "verified_ratio": "seconds of copying all blocks out of shared memory, each copy's checksum and generation "
                "checked, for each second of plain copies of the same bytes into the same warm buffer; both ways in turns of "
                f"{TURN_BLOCKS} blocks, A B B A",
            },
            "profile": PROFILE,
            "blocks": found.blocks,
            "block_bytes": found.block_bytes,
            "size_bytes": found.blocks * found.block_bytes,
            "pairs": len(found.copies),
            "seed": seed,
            **{
                name: {"interval": [each.low, each.high], "samples": samples[name]}
                for name, each in spreads.items()
            },
            "verified_mb_per_second": [pair.ours / MEGABYTE for pair in found.copies],
            "plain_mb_per_second": [pair.theirs / MEGABYTE for pair in found.copies],
        },
    }


def _ratio(pair: Pair) -> float:
    """Of seconds, where a pair has rates."""
    return pair.theirs / pair.ours


# ---- blocks ---------------------------------------------------------------------------------------------------------


def _map_seconds(chain: Chain, client: CacheClient) -> float:
    """How long a Map of all blocks under a new lease takes."""
    with chain.leased(client) as looked_up:
        begin = time.perf_counter()
        items = list(_map(client, looked_up, len(chain.keys)))
        seconds = time.perf_counter() - begin
        _shared(items)
    return seconds


def _map(client: CacheClient, looked_up: Lookup, blocks: int) -> Iterator[MappedItem]:
    assert looked_up.lease is not None
    return client.map(looked_up.lease, first_block=0, block_count=blocks, state=False)


def _mapped(
    client: CacheClient, looked_up: Lookup, blocks: int, check: Callable[[], None]
) -> list[MappedItem]:
    """For the first time, when all blocks are read from the disk."""
    items = []
    for item in _map(client, looked_up, blocks):
        check()
        items.append(item)
    return items


def _shared(items: list[MappedItem]) -> list[MappedItem]:
    """KvstoreError unless all of them are what is to be measured."""
    if not all(item.is_shared for item in items):
        raise KvstoreError("the service shares no memory, or less than all blocks need; its log says why")
    return items


class _Copier:
    """Copies all blocks into one buffer of this process."""

    def __init__(self, items: Sequence[MappedItem], block_bytes: int) -> None:
        self._size = len(items) * block_bytes
        buffer = memoryview(bytearray(self._size))
        self._rooms = [buffer[at : at + block_bytes] for at in range(0, self._size, block_bytes)]
        self._items = items
        self._payloads = [memoryview(item.payload or b"") for item in items]

    def warm(self, check: Callable[[], None]) -> None:
        """Both sides' pages are known afterwards."""
        for first in range(0, len(self._items), TURN_BLOCKS):
            check()
            self._plain(slice(first, first + TURN_BLOCKS))

    def pair(self) -> Pair:
        """All blocks once verified and once plainly, in bytes per second. The ways take turns, A B B A, far shorter than
        what else the processors do, so that this falls on both; and one is half-way round from the other, so that neither
        finds what the other has brought into a cache."""
        turns = [slice(first, first + TURN_BLOCKS) for first in range(0, len(self._items), TURN_BLOCKS)]
        opposite = turns[len(turns) // 2 :] + turns[: len(turns) // 2]
        verified = plain = 0.0
        for number, (one, other) in enumerate(zip(turns, opposite, strict=True)):
            if number % 2 == 0:
                verified += self._verified(one)
                plain += self._plain(other)
            else:
                plain += self._plain(other)
                verified += self._verified(one)
        return Pair(self._size / verified, self._size / plain)

    def _plain(self, turn: slice) -> float:
        payloads, rooms = self._payloads[turn], self._rooms[turn]
        begin = time.perf_counter()
        for payload, room in zip(payloads, rooms, strict=True):
            room[:] = payload
        return time.perf_counter() - begin

    def _verified(self, turn: slice) -> float:
        items, rooms = self._items[turn], self._rooms[turn]
        begin = time.perf_counter()
        for item, room in zip(items, rooms, strict=True):
            if not item.copy_to(room):
                raise KvstoreError(f"block {item.index} is not what was stored, under a lease")
        return time.perf_counter() - begin
