"""Request logs made from a seed, and what a cache of blocks does with them, worked out in the slowest and plainest way."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

GOLDEN = Path(__file__).parent.parent / "golden" / "requests.jsonl"
GOLDEN_RATES = GOLDEN.with_suffix(".json")
GOLDEN_SEED = 20_261_201
BLOCK = 512
NEVER = 1 << 40


@dataclass(frozen=True)
class Asked:
    """One request: when, how long, and the ids of its blocks, each of which stands for its whole prefix."""

    milliseconds: int
    tokens: int
    ids: tuple[int, ...]


def made_requests(seed: int, count: int, *, sessions: int = 40) -> list[Asked]:
    """Sessions that share a few beginnings, grow from turn to turn, and fork now and then. Each request has a second of
    its own."""
    chance = random.Random(seed)
    fresh = iter(range(1, sys.maxsize))
    roots = [[next(fresh) for _ in range(chance.randint(1, 4))] for _ in range(4)]
    held = [list(chance.choice(roots)) for _ in range(sessions)]
    at, made = 0, []
    for _ in range(count):
        at += 1000 * chance.choice((1, 1, 2, 5, 30))
        turn = min(int(chance.expovariate(0.15)), sessions - 1)
        if chance.random() < 0.1:
            held[turn] = list(chance.choice(roots))
        elif chance.random() < 0.2:
            del held[turn][chance.randint(1, len(held[turn])) :]
        ids = held[turn] + [next(fresh) for _ in range(chance.randint(0, 6))]
        is_whole = chance.random() < 0.2
        # The open last block comes back as another one when the session goes on.
        held[turn] = ids if is_whole else ids[:-1] or ids
        made.append(
            Asked(at, len(ids) * BLOCK - (0 if is_whole else chance.randint(1, BLOCK - 1)), tuple(ids))
        )
    return made


def as_lines(requests: Sequence[Asked]) -> str:
    """In the Mooncake format."""
    return "".join(
        json.dumps(
            {
                "timestamp": each.milliseconds,
                "input_length": each.tokens,
                "output_length": 7,
                "hash_ids": list(each.ids),
            }
        )
        + "\n"
        for each in requests
    )


def rate(hits: Sequence[int], requests: Sequence[Asked]) -> float:
    """Percent of all input tokens."""
    hit = sum(min(blocks * BLOCK, each.tokens) for blocks, each in zip(hits, requests, strict=True))
    return 100 * hit / sum(each.tokens for each in requests)


def footprint(requests: Sequence[Asked]) -> int:
    return len({block for each in requests for block in each.ids})


def tree_hits(requests: Sequence[Asked], policy: str, capacity: int) -> list[int]:
    """Blocks of each request that were resident, from its first on. A block is resident only while its parent is; what
    goes is a childless block outside the running request, the one with the least key; belady may refuse to store."""
    parent: dict[int, int] = {}
    key: dict[int, tuple[int, ...]] = {}
    hits = []
    uses = list(_next_uses(requests))
    for number, asked in enumerate(requests):
        hit = 0
        while hit < len(asked.ids) and asked.ids[hit] in parent:
            hit += 1
        hits.append(hit)
        for place, block in enumerate(asked.ids):
            if place >= hit:
                if len(parent) >= capacity:
                    victim = _victim(parent, key, set(asked.ids))
                    is_refused = (
                        policy == "belady" and victim is not None and key[victim][0] >= -uses[number][place]
                    )
                    if victim is None or is_refused:
                        break
                    del parent[victim], key[victim]
                parent[block] = asked.ids[place - 1] if place else 0
                key[block] = (number, place)
            if policy == "lru":
                key[block] = (number, -place)
            elif policy == "belady":
                key[block] = (-uses[number][place],)
    return hits


def _victim(parent: dict[int, int], key: dict[int, tuple[int, ...]], running: set[int]) -> int | None:
    childless = parent.keys() - set(parent.values()) - running
    return min(childless, key=lambda block: (key[block], block), default=None)


def _next_uses(requests: Sequence[Asked]) -> Iterator[list[int]]:
    for number, asked in enumerate(requests):
        later = requests[number + 1 :]
        yield [
            next((number + 1 + n for n, each in enumerate(later) if block in each.ids), NEVER)
            for block in asked.ids
        ]


def ttl_hits(requests: Sequence[Asked], seconds: int, *, slides: bool) -> list[int]:
    """Without a limit on space: a block is of use until `seconds` after its last use, or after it was stored; from the first
    one on that is not, all blocks of the request are stored anew."""
    since: dict[int, int] = {}
    hits = []
    for asked in requests:
        hit = 0
        for block in asked.ids:
            if block not in since or since[block] + 1000 * seconds <= asked.milliseconds:
                break
            hit += 1
        hits.append(hit)
        since.update(dict.fromkeys(asked.ids if slides else asked.ids[hit:], asked.milliseconds))
    return hits


def window_hits(
    requests: Sequence[Asked], *, ends: bool, branches: bool, every: int
) -> tuple[list[int], int]:
    """Without a limit on space: a hit ends where a state is kept. (Hits in blocks, how many states were kept.) ends: at the
    last block and the one before; branches: where a request leaves what is held although that goes on in another way;
    every: at every so many blocks, 0 for none; all of them past the hit."""
    states: set[int] = set()
    held: set[int] = set()
    followed: set[int] = set()
    hits = []
    for asked in requests:
        count = sum(block in held for block in asked.ids)
        hits.append(max((n + 1 for n in range(count) if asked.ids[n] in states), default=0))
        wanted: set[int] = set()
        if ends:
            wanted |= set(asked.ids[-2:])
        if branches and 0 < count < len(asked.ids) and asked.ids[count - 1] in followed:
            wanted.add(asked.ids[count - 1])
        if every:
            wanted |= set(asked.ids[every - 1 :: every])
        states |= wanted - set(asked.ids[: hits[-1]])
        held |= set(asked.ids)
        followed |= set(asked.ids[:-1])
    return hits, len(states)


GOLDEN_SIZES = ("1%", "3%", "10%", "30%")
GOLDEN_POLICIES = ("lru", "fifo", "belady", "infinite")


def golden_rates(requests: Sequence[Asked]) -> dict[str, dict[str, float]]:
    """Token hit rates in percent, by policy and size."""
    blocks = footprint(requests)
    rates: dict[str, dict[str, float]] = {}
    for policy in GOLDEN_POLICIES:
        rates[policy] = {}
        for size in GOLDEN_SIZES:
            capacity = blocks if policy == "infinite" else blocks * int(size[:-1]) // 100
            name = "lru" if policy == "infinite" else policy
            rates[policy][size] = round(rate(tree_hits(requests, name, capacity), requests), 6)
    return rates


if __name__ == "__main__":
    golden = made_requests(GOLDEN_SEED, 400)
    GOLDEN.write_text(as_lines(golden))
    GOLDEN_RATES.write_text(json.dumps(golden_rates(golden), indent=2) + "\n")
