"""Lookups: how long a service takes for a million tokens, what others notice of it, and its rate beside a bare echo."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.bench.lookup_peers import EAGER, Peer, peers, prompt_keys, reply_bytes, request_of
from kvstore.bench.pairs import Pair, Spread, spread
from kvstore.bench.serving import opened, serving
from kvstore.errors import KvstoreError
from kvstore.profile.base import Profile
from kvstore.profile.formats import RowFormat
from kvstore.profile.registry import get_profile
from kvstore.types import ItemKind
from kvstore_client import CacheClient, Deadlines, OpenedNamespace, ReserveItem

LONG_BLOCKS = 7_812
"""Of 128 tokens: a million."""
SHORT_BLOCKS = 32
CLIENTS = 8
SERVICE_BAR = 10.0
GROWTH_BAR = 10.0
"""Milliseconds."""
ECHO_BAR = 0.7
"""Lookups for each call of the echo."""
HELD = ("all", "half", "none")

BLOCKS_MIN, BLOCKS_MAX = 2, 65_536
SECONDS_MIN, SECONDS_MAX = 0.05, 10.0

TURN_SECONDS = 0.1

_PROMPTS = 8
"""Of each client."""
_LONG = 0
_UNKNOWN = 1_000_000
"""A prompt of which nothing is stored."""
_COMMIT_BLOCKS = 512
_MIB = 1 << 20


@dataclass(slots=True)
class Readings:
    """`service`: milliseconds by what is held; `beside`, `alone`: p99 in milliseconds, beside long lookups and without;
    `rates`: lookups and echoes per second of the same clients; `client`: the same with all that CacheClient does."""

    long_blocks: int
    request_bytes: int = 0
    reply_bytes: int = 0
    service: dict[str, list[float]] = field(default_factory=lambda: {held: [] for held in HELD})
    beside: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    long_waits: list[float] = field(default_factory=list)
    rates: list[Pair] = field(default_factory=list)
    client: list[Pair] = field(default_factory=list)


def measure(
    directory: Path,
    *,
    long_blocks: int,
    pairs: int,
    seconds: float,
    seed: int,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> Readings:
    """In an empty directory that the caller removes, with a service of its own. `seconds`: of each half of a pair. check:
    called between the steps, where nothing is half done; what it raises comes out when all processes have gone."""
    found = Readings(long_blocks)
    options = {
        "--disk": 4 << 30,
        "--cache": 64 * _MIB,
        "--pool": 16 * _MIB,
        "--handoff": 16 * _MIB,
        "--staging": 64 * _MIB,
        "--keys": 65_536,
    }
    with (
        serving(directory, options) as place,
        CacheClient(place, owner="bench", deadlines=Deadlines(pause_first=0, pause_most=0)) as client,
    ):
        space = opened(client, small_profile(), check)
        tell(f"storing prompts of {long_blocks:,} and {SHORT_BLOCKS} blocks (seed {seed})")
        _store(client, space, prompt_keys(seed, _LONG, long_blocks), check)
        for number in range(1, 1 + CLIENTS * _PROMPTS):
            _store(client, space, prompt_keys(seed, number, SHORT_BLOCKS), check)
        _service_times(client, space, found, pairs=pairs, seed=seed, tell=tell, check=check)
        _sizes(place, space, found, seed)
        common = {
            "service": str(place),
            "echo": str(place / "echo.sock"),
            "digest": space.digest.hex(),
            "block_tokens": space.block_tokens,
            "seed": seed,
        }
        short = {**common, "blocks": SHORT_BLOCKS, "prompts": _PROMPTS}
        long = {**common, "blocks": long_blocks, "prompts": 1, "first": _LONG}
        descriptions = [
            ("echo", {"path": common["echo"], "reply_bytes": found.reply_bytes}),
            ("client", long),
            *(("client", {**short, "first": 1 + number * _PROMPTS}) for number in range(CLIENTS)),
        ]
        with peers(descriptions) as started:
            crowd = _Crowd(started[1], started[2:], seconds)
            for number in range(1, pairs + 1):
                check()
                beside, alone = crowd.p99s()
                found.beside.append(beside)
                found.alone.append(alone)
                found.rates.append(crowd.rates(_LOOKUP, _ECHO))
                found.client.append(crowd.rates(_CLIENT, _ECHO))
                tell(
                    f"{number} of {pairs}: p99 {found.alone[-1]:.2f} ms alone, {found.beside[-1]:.2f} beside; lookups "
                    f"{found.rates[-1].ours:,.0f}/s, echo {found.rates[-1].theirs:,.0f}/s, ratio {found.rates[-1].ratio:.3f}, "
                    f"through CacheClient {found.client[-1].ratio:.3f}"
                )
            found.long_waits = crowd.long_waits
    return found


def small_profile() -> Profile:
    """The layers, window and block of deepseek-v4-flash, so that lookups and plans are the same work, in 5 KiB a block."""
    narrow = {"head_dim": 1, "rope_dim": 0, "index_head_dim": 1}
    formats = dict.fromkeys(("entry_format", "key_format", "row_format"), RowFormat.F32)
    return replace(get_profile("deepseek-v4-flash"), name="bench-lookup", **narrow, **formats)  # type: ignore[arg-type]


def report(found: Readings, *, seconds: float, seed: int) -> dict[str, Any]:
    """missed: the bars that the medians do not reach."""
    service = {held: spread(values) for held, values in found.service.items()}
    growths = [beside - alone for beside, alone in zip(found.beside, found.alone, strict=True)]
    growth = spread(growths)
    ratios = [pair.ratio for pair in found.rates]
    ratio = spread(ratios)
    met = {
        "service_ms": all(each.median < SERVICE_BAR for each in service.values()),
        "others_p99_growth_ms": growth.median < GROWTH_BAR,
        "echo_ratio": ratio.median >= ECHO_BAR,
    }
    return {
        "service_ms": {held: each.median for held, each in service.items()},
        "others_p99_growth_ms": growth.median,
        "echo_ratio": ratio.median,
        "bars": {"service_ms": SERVICE_BAR, "others_p99_growth_ms": GROWTH_BAR, "echo_ratio": ECHO_BAR},
        "met": met,
        "missed": [name for name, is_met in met.items() if not is_met],
        "detail": {
            "what": _WHAT,
            "long_blocks": found.long_blocks,
            "short_blocks": SHORT_BLOCKS,
            "clients": CLIENTS,
            "pairs": len(found.rates),
            "seconds": seconds,
            "seed": seed,
            "request_bytes": found.request_bytes,
            "reply_bytes": found.reply_bytes,
            "service_ms": {held: _detail(service[held], values) for held, values in found.service.items()},
            "others_p99_growth_ms": {
                **_detail(growth, growths),
                "alone_ms": found.alone,
                "beside_ms": found.beside,
                "long_calls_ms": found.long_waits,
            },
            "echo_ratio": {
                **_detail(ratio, ratios),
                "lookups_per_second": [pair.ours for pair in found.rates],
                "echoes_per_second": [pair.theirs for pair in found.rates],
            },
            "client_echo_ratio": _client_detail(found.client),
        },
    }


_WHAT = {
    "service_ms": "milliseconds inside the service for one leased lookup of long_blocks keys: from the parsed message to the "
    "finished reply; each all/half/none in a second of its own, so that last uses move",
    "others_p99_growth_ms": "p99 of the clients' short lookups, which call without a pause, while one more sends long ones "
    "without a pause, minus their p99 without it; in turns of a tenth of a second, A B B A",
    "echo_ratio": "leased lookups a second of all clients, for each call of a bare grpc.aio echo with the same bytes each way; "
    "the same processes call both with bytes made before, in turns, A B B A",
    "client_echo_ratio": "as echo_ratio, with all that CacheClient does for a lookup on one side and a bare call on the other",
}


def _detail(found: Spread, samples: Sequence[float]) -> dict[str, Any]:
    return {"interval": [found.low, found.high], "samples": list(samples)}


def _client_detail(pairs: Sequence[Pair]) -> dict[str, Any]:
    ratios = [pair.ratio for pair in pairs]
    found = spread(ratios)
    return {"median": found.median, **_detail(found, ratios)}


# ---- steps ----------------------------------------------------------------------------------------------------------


def _store(
    client: CacheClient, space: OpenedNamespace, keys: Sequence[bytes], check: Callable[[], None]
) -> None:
    payload = bytes(space.block_bytes)
    for first in range(0, len(keys), _COMMIT_BLOCKS):
        check()
        items = [
            ReserveItem(
                kind=ItemKind.BLOCK,
                key=key,
                parent=keys[number - 1] if number else space.digest,
                position=(number + 1) * space.block_tokens,
                length=space.block_bytes,
            )
            for number, key in enumerate(keys[first : first + _COMMIT_BLOCKS], first)
        ]
        with client.reserve(space.digest, items) as reservation:
            reservation.write(dict.fromkeys(reservation.granted, payload))
            reservation.commit()


def _service_times(
    client: CacheClient,
    space: OpenedNamespace,
    found: Readings,
    *,
    pairs: int,
    seed: int,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> None:
    blocks = found.long_blocks
    known = prompt_keys(seed, _LONG, blocks)
    for number in range(pairs):
        unknown = prompt_keys(seed, _UNKNOWN + number, blocks)
        half = blocks // 2
        prompts = {"all": known, "half": known[:half] + unknown[half:], "none": unknown}
        for held, keys in prompts.items():
            check()
            # The next second: a chain that was used within this one is not walked again.
            threading.Event().wait(1.0)
            before = client.stats()["lookup_seconds_total"]
            answer = client.lookup(
                space.digest, keys, prompt_tokens=blocks * space.block_tokens + 1, costs=EAGER
            )
            found.service[held].append((client.stats()["lookup_seconds_total"] - before) * 1000)
            _expect(answer.blocks_held, {"all": blocks, "half": half, "none": 0}[held])
            if answer.lease is not None:
                answer.lease.release()
        tell(
            f"{number + 1} of {pairs}: "
            + ", ".join(f"{held} {values[-1]:.2f} ms" for held, values in found.service.items())
        )


def _sizes(place: Path, space: OpenedNamespace, found: Readings, seed: int) -> None:
    """Bytes of a short lookup's request and of its reply."""
    request = request_of(
        space.digest, prompt_keys(seed, 1, SHORT_BLOCKS), block_tokens=space.block_tokens, rest=1
    )
    found.request_bytes = request.ByteSize()
    found.reply_bytes = reply_bytes(place, request)


def _expect(held: int, wanted: int) -> None:
    if held != wanted:
        raise KvstoreError(
            "the service does not hold what was stored", field="blocks_held", value=held, allowed=f"{wanted}"
        )


@dataclass(frozen=True, slots=True)
class _Way:
    """What the clients do in a turn, and whether the one with the long prompt does too."""

    name: str
    beside_long: bool = False


_LOOKUP = _Way("lookup")
_BESIDE = _Way("lookup", beside_long=True)
_ECHO = _Way("echo")
_CLIENT = _Way("client")


class _Crowd:
    """The clients, and the one that sends long lookups."""

    def __init__(self, long: Peer, short: Sequence[Peer], seconds: float) -> None:
        self._long = long
        self._short = short
        self._turns = max(1, round(seconds / TURN_SECONDS))
        self._seconds = seconds / self._turns
        self.long_waits: list[float] = []

    def p99s(self) -> tuple[float, float]:
        """Milliseconds, beside long lookups and without."""
        beside, alone = self._taken(_BESIDE, _LOOKUP)
        return _p99(beside), _p99(alone)

    def rates(self, ours: _Way, theirs: _Way) -> Pair:
        """Calls a second of all clients together."""
        sides = self._taken(ours, theirs)
        return Pair(*(sum(1000 * len(calls) / sum(calls) for calls in side) for side in sides))

    def _taken(self, ours: _Way, theirs: _Way) -> tuple[list[list[float]], list[list[float]]]:
        """Milliseconds of each client's calls. The ways take turns, A B B A, shorter than what else the processors do."""
        sides: tuple[list[list[float]], list[list[float]]] = (
            [[] for _ in self._short],
            [[] for _ in self._short],
        )
        for number in range(2 * self._turns):
            side = (number + 1) // 2 % 2
            for mine, calls in zip(sides[side], self._turn((ours, theirs)[side]), strict=True):
                mine.extend(calls)
        return sides

    def _turn(self, way: _Way) -> list[list[float]]:
        if way.beside_long:
            self._long.begin(way.name, self._seconds)
        for peer in self._short:
            peer.begin(way.name, self._seconds)
        found = [peer.end() for peer in self._short]
        if way.beside_long:
            self.long_waits.append(statistics.median(self._long.end()))
        return found


def _p99(clients: list[list[float]]) -> float:
    values = sorted(each for calls in clients for each in calls)
    return values[min(len(values) * 99 // 100, len(values) - 1)]
