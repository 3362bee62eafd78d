"""A request log against a running service, with real keys and real payloads, and the same log simulated in as much room."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvstore.clock import Clock
from kvstore.errors import LimitExceeded, NoSpace, Unavailable
from kvstore.plan.base import Coverage
from kvstore.plan.coverage import longest_restore
from kvstore.policy import EVICTION_POLICIES
from kvstore.prefix import KeyChain, NamespaceIdentity
from kvstore.profile.base import Profile
from kvstore.simulate.case import Case, Outcome, counting_profile
from kvstore.simulate.log import RequestLog
from kvstore.simulate.run import Course, Simulation, keys_of
from kvstore.types import BlockKey, ItemKind
from kvstore_client import CacheClient, Costs, Lookup, OpenedNamespace, ReserveItem

DIFFERENCE_MAX = 0.2
"""Points of token hit rate by which live and simulated may differ."""

EAGER = Costs(seconds_per_layer_token=1.0, assumed=True)
"""A price of computing at which the plan, and so the lease, takes in all that is held, as in a simulation."""

BATCH_BLOCKS = 256
BATCH_BYTES = 8 << 20
_WAIT_SECONDS = 0.2
"""A signal is heard at least so often."""


def namespace_name(profile: Profile) -> str:
    # One for each model, and the same each time: a namespace is never forgotten, and there is room for so many only.
    return f"simulate-live-{profile.name}"


def payload_of(key: bytes, length: int) -> bytes:
    """What is stored under a key: nothing else has these bytes."""
    return hashlib.shake_128(key).digest(length)


def chain_keys(log: RequestLog, root: bytes, *, block_tokens: int, seed: int) -> list[BlockKey]:
    """A key for each distinct block of the log, below its parent's. Their tokens are made of the block's number and of
    `seed`, 64 bits, so that no two runs share a block."""
    keys: list[BlockKey] = []
    rest = [seed & 0xFFFFFFFF, seed >> 32, *[0] * (block_tokens - 3)]
    for number, parent in enumerate(log.parents.tolist()):
        chain = KeyChain(keys[parent] if parent >= 0 else root, block_tokens=block_tokens)
        keys += chain.extend([number, *rest])
    return keys


class Asked(NamedTuple):
    """What a request asks for: numbers of its blocks, and whether the last one's state would be held back for the token that
    must be computed."""

    numbers: list[int]
    holds_back: bool


def asked_by(log: RequestLog, request: int, *, as_served: bool) -> Asked:
    numbers = log.blocks(request).tolist()
    if not as_served:
        return Asked(numbers, holds_back=False)
    tokens, size = int(log.input_tokens[request]), log.block_tokens
    return Asked(numbers[: tokens // size], holds_back=tokens % size == 0)


def hit_tokens(log: RequestLog, request: int, held: int, *, as_served: bool) -> int:
    """Of `held` blocks, by the rule that simulations count by."""
    tokens = int(log.input_tokens[request])
    limit = held * log.block_tokens
    if as_served:
        limit = longest_restore(counting_profile(log.block_tokens), Coverage(held), tokens)
    return min(limit, tokens)


class Figures(NamedTuple):
    """Of the whole service, as it tells them."""

    blocks: int
    stored: int
    evicted: int
    expired: int
    damaged: int
    cleared: int

    @classmethod
    def of(cls, client: CacheClient) -> Figures:
        told = client.stats()
        totals = (f"{name}_blocks_total" for name in ("stored", "evicted", "expired", "damaged", "cleared"))
        return cls(int(told["blocks"]), *(int(told.get(name, 0)) for name in totals))


class Moment(NamedTuple):
    """Of a request: when it came and when its blocks were stored, by the wall clock; and after it, how many blocks this run had
    stored, and what the service said."""

    asked: float
    done: float
    stored: int
    figures: Figures


@dataclass(slots=True, kw_only=True)
class LiveOutcome:
    """What the service did with a log. `missing_blocks` were leased, and were not there when they were fetched."""

    policy: str
    before: Figures
    requests: int = 0
    seconds: float = 0.0
    late_seconds_most: float = 0.0
    input_tokens: int = 0
    hit_tokens: int = 0
    blocks_asked: int = 0
    blocks_hit: int = 0
    blocks_stored: int = 0
    blocks_refused: int = 0
    fetched_blocks: int = 0
    missing_blocks: int = 0
    wrong_bytes: int = 0
    blocks_held: int = 0
    moments: list[Moment] = field(default_factory=list)

    @property
    def token_hit_rate(self) -> float:
        """Percent."""
        return 100.0 * self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def blocks_left(self) -> int:
        """How many of those stored were not held any more at the end."""
        return self.blocks_stored - self.blocks_held

    @property
    def others_stored(self) -> int:
        """Blocks that others stored meanwhile."""
        return (
            self.moments[-1].figures.stored - self.before.stored - self.blocks_stored if self.moments else 0
        )

    @property
    def others_left(self) -> int:
        """Blocks of others that are not held any more."""
        return self._left(self.moments[-1].figures) - self.blocks_left if self.moments else 0

    def held_after(self) -> list[int]:
        """This run's blocks after each request. Those of others are taken to have left first: they are older, which under other
        policies than lru need not decide."""
        theirs = self.others_left
        return [each.stored - max(0, self._left(each.figures) - theirs) for each in self.moments]

    def _left(self, now: Figures) -> int:
        return self.before.blocks + now.stored - self.before.stored - now.blocks


class Drive:
    """Sends a log's requests, one after another, to the service behind `client`. `seed`: 64 bits that no other run has. What it
    stores lies in a namespace of its own and is cleared when `run` ends, however it ends."""

    def __init__(
        self,
        client: CacheClient,
        log: RequestLog,
        profile: Profile,
        *,
        as_served: bool,
        seed: int,
        clock: Clock,
        warp: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """warp: by how much faster than in the log time passes; None: requests follow each other at once. tell: called with a
        line about how far it is."""
        self._client = client
        self._log = log
        self._profile = profile
        self._as_served = as_served
        self._seed = seed
        self._clock = clock
        self._warp = warp
        self._tell = tell
        self._check: Callable[[], None] = lambda: None
        self._space: OpenedNamespace
        self._keys: list[BlockKey] = []
        self.outcome: LiveOutcome

    def run(self, check: Callable[[], None] = lambda: None) -> LiveOutcome:
        """All requests in order. `check` is called where nothing is half done, and may raise."""
        client, self._check = self._client, check
        self.outcome = LiveOutcome(policy=client.set_eviction().policy, before=Figures.of(client))
        identity = NamespaceIdentity(self._profile, "simulated", "simulated")
        self._space = client.open_namespace(identity, name=namespace_name(self._profile), policy="zero")
        try:
            self._keys = chain_keys(
                self._log, self._space.digest, block_tokens=self._space.block_tokens, seed=self._seed
            )
            self._send_all()
        finally:
            self.outcome.blocks_held = client.clear(self._space.digest).blocks
        return self.outcome

    def _send_all(self) -> None:
        log, outcome, clock = self._log, self.outcome, self._clock
        begun, boot = clock.monotonic(), self._client.boot
        for request in range(len(log)):
            self._check()
            self._tell(f"{request:,} of {len(log):,} requests")
            if self._warp is not None:
                due = begun + float(log.seconds[request] - log.seconds[0]) / self._warp
                self._wait_until(due)
                outcome.late_seconds_most = max(outcome.late_seconds_most, clock.monotonic() - due)
            asked = clock.wall()
            done = self._send(request)
            outcome.moments.append(Moment(asked, done, outcome.blocks_stored, Figures.of(self._client)))
        outcome.seconds = clock.monotonic() - begun
        if self._client.boot != boot:
            raise Unavailable(
                "the service was started again meanwhile: what it counts began anew; run it once more"
            )

    def _wait_until(self, due: float) -> None:
        while (left := due - self._clock.monotonic()) > 0:
            self._check()
            threading.Event().wait(min(left, _WAIT_SECONDS))

    def _send(self, request: int) -> float:
        """Returns when its blocks were stored, by the wall clock."""
        log, outcome, space = self._log, self.outcome, self._space
        numbers, holds_back = asked_by(log, request, as_served=self._as_served)
        keys = [self._keys[number] for number in numbers]
        found = self._client.lookup(
            space.digest,
            keys,
            prompt_tokens=len(keys) * space.block_tokens + (not holds_back),
            costs=EAGER,
        )
        held = found.coverage.blocks
        outcome.requests += 1
        outcome.input_tokens += int(log.input_tokens[request])
        outcome.hit_tokens += hit_tokens(log, request, held, as_served=self._as_served)
        outcome.blocks_asked += len(keys)
        outcome.blocks_hit += held
        try:
            self._look_at_one(found, keys, request)
            self._store(keys, held)
            return self._clock.wall()
        finally:
            if found.lease is not None:
                found.lease.release()

    def _look_at_one(self, found: Lookup, keys: Sequence[BlockKey], request: int) -> None:
        """Fetch one of the blocks that are held, another one each time, and compare its bytes."""
        leased = found.plan.compute_from // self._space.block_tokens
        if found.lease is None or not leased:
            return
        number = request % leased
        [item] = self._client.fetch(found.lease, first_block=number, block_count=1, state=False)
        self.outcome.fetched_blocks += 1
        if item.payload is None:
            self.outcome.missing_blocks += 1
            return
        self.outcome.wrong_bytes += differing(item.payload, payload_of(keys[number], self._space.block_bytes))

    def _store(self, keys: Sequence[BlockKey], held: int) -> None:
        space, outcome = self._space, self.outcome
        step = max(1, min(BATCH_BLOCKS, BATCH_BYTES // space.block_bytes))
        parents = [space.digest, *keys]
        for begin in range(held, len(keys), step):
            self._check()
            numbers = range(begin, min(begin + step, len(keys)))
            items = [
                ReserveItem(
                    kind=ItemKind.BLOCK,
                    key=keys[number],
                    parent=parents[number],
                    position=(number + 1) * space.block_tokens,
                    length=space.block_bytes,
                )
                for number in numbers
            ]
            try:
                with self._client.reserve(space.digest, items) as reservation:
                    reservation.write(
                        {each: payload_of(items[each].key, space.block_bytes) for each in reservation.granted}
                    )
                    stored = reservation.commit().items
            except (NoSpace, LimitExceeded):
                # What the service has no room for now it refuses by name, and a simulation counts it too.
                stored = 0
            outcome.blocks_stored += stored
            if stored < len(items):
                outcome.blocks_refused += len(keys) - begin - stored
                return


def differing(found: bytes, expected: bytes) -> int:
    """How many bytes are not those expected; a missing or further one is one too."""
    if found == expected:
        return 0
    common = min(len(found), len(expected))
    ours, theirs = (np.frombuffer(each, np.uint8, common) for each in (found, expected))
    return int(np.count_nonzero(ours != theirs)) + abs(len(found) - len(expected))


class Simulated(NamedTuple):
    """The same log with the service's policy. `alike`: with as many blocks held after each request as the service held, and on its
    clock, where last uses are whole seconds and a log that runs fast has many requests in one. `steady`: on the log's own
    clock, with the most blocks that the service held, all the time."""

    alike: Outcome
    steady: Outcome


def simulate_alike(
    log: RequestLog, live: LiveOutcome, *, as_served: bool, check: Callable[[], None] = lambda: None
) -> Simulated:
    held = live.held_after()
    keys = keys_of(log)

    def outcome(capacity: int | None, course: Course | None) -> Outcome:
        case = Case(policy=live.policy, capacity=capacity, as_served=as_served)
        ranks = EVICTION_POLICIES[live.policy]()
        return Simulation(log, case, ranks=ranks, keys=keys, course=course).run(check)

    course = Course([each.asked for each in live.moments], [each.done for each in live.moments], held)
    return Simulated(outcome(None, course), outcome(max(held) if live.blocks_left else None, None))
