"""One simulation: a log's requests, one after another, against the core that serves them, on the log's clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core import Core, Limits, ReserveItem, Written
from kvstore.core.base import Gone, LookupResult
from kvstore.plan import Costs
from kvstore.plan.planner import plan
from kvstore.plan.save import save_states
from kvstore.policy import EvictionPolicy
from kvstore.policy.admission import Admission, SecondSight
from kvstore.policy.window import WindowPolicy
from kvstore.pool import StatePool
from kvstore.prefix import NamespaceIdentity
from kvstore.prefix.joined import JoinedKeys
from kvstore.profile.base import Profile
from kvstore.simulate.belady import BeladyPolicy, NextUses, Uses
from kvstore.simulate.case import Case, Outcome, Replay, TtlFrom, counting_profile
from kvstore.simulate.disk import SimulatedDisk
from kvstore.simulate.log import Numbers, RequestLog
from kvstore.simulate.resume import Resume, resume_of, within
from kvstore.store.base import Place
from kvstore.types import KEY_BYTES, Checks, ItemKind

FREE_READS = Costs(
    seconds_per_layer_token=1.0, seconds_per_ssd_byte=0.0, seconds_per_memory_byte=0.0, seconds_per_fetch=0.0
)
"""The plan that computes least."""

FOR_EVER = float(2**31)
"""Seconds: longer than any log."""

SESSION = "simulation"
_NO_CHECKS = Checks(0)
_RECORDS_PER_SEGMENT = 4096
_START = 1.0
"""When the clock starts."""

_STEPS_MAX = 100_000
_PLENTY = 1 << 40
_ITEMS_AT_ONCE = Limits().reserved_items


def keys_of(log: RequestLog) -> JoinedKeys:
    """A key for each distinct block: its number from 1 on, as a big-endian number. The log has no tokens to hash."""
    words = np.zeros((log.footprint, KEY_BYTES // 8), ">u8")
    words[:, -1] = np.arange(1, log.footprint + 1)
    return JoinedKeys(words.tobytes())


class Course(NamedTuple):
    """What became of a log's requests elsewhere: when each came and when its blocks were stored, by one clock, and how many
    blocks were held after it."""

    asked: Sequence[float]
    stored: Sequence[float]
    room: Sequence[int]


class Ages:
    """When each block came, for a retention since then: a block whose time is over is of no use, and comes anew with the next
    request that wants it, as do all blocks after it."""

    def __init__(self, footprint: int, seconds: float) -> None:
        self._since = np.full(footprint, -np.inf)
        self._seconds = seconds
        self._held = 0.0
        self.expired = 0

    def serve(self, blocks: Numbers, held: int, now: float) -> int:
        """How many of the first `held` are of use; the others are stored now."""
        over = np.flatnonzero(self._since[blocks[:held]] + self._seconds <= now)
        usable = int(over[0]) if len(over) else held
        self.expired += len(over)
        fresh = blocks[usable:]
        self._held += self._lives(self._since[fresh], now)
        self._since[fresh] = now
        return usable

    def held_seconds(self, end: float) -> float:
        """Over all blocks, how long each was of use until `end`."""
        return self._held + self._lives(self._since, end)

    def _lives(self, since: NDArray[np.float64], now: float) -> float:
        came = since[np.isfinite(since)]
        return float(np.minimum(now - came, self._seconds).sum())


class Simulation:
    """Owns a core and feeds it a log. `keys` of the log's blocks may be shared by simulations, `uses` is for BeladyPolicy.
    `course`: in place of the log's clock and the case's capacity."""

    def __init__(
        self,
        log: RequestLog,
        case: Case,
        *,
        ranks: EvictionPolicy,
        profile: Profile | None = None,
        keys: JoinedKeys | None = None,
        uses: NextUses | None = None,
        course: Course | None = None,
    ) -> None:
        assert course is None or {len(each) for each in course} == {len(log)}, "one of each a request"
        chosen = counting_profile(log.block_tokens) if profile is None else profile
        self._profile = replace(chosen, block_tokens=log.block_tokens)
        self._log = log
        self._case = case
        self._course = course
        self._keys = keys_of(log) if keys is None else keys
        self._belady = ranks if isinstance(ranks, BeladyPolicy) else None
        self._uses = NextUses(log) if self._belady is not None and uses is None else uses
        by_age = case.retention_seconds is not None and case.ttl_from is TtlFrom.INSERTION
        slides = case.retention_seconds is not None and not by_age
        self._core = Core(
            pool=StatePool(0, FOR_EVER),
            retention_seconds=case.retention_seconds if slides and case.retention_seconds else FOR_EVER,
            limits=Limits(keys=_PLENTY, prompt_tokens=_PLENTY, leased_blocks=_PLENTY),
            ranks=ranks,
        )
        policy = case.windows or "zero"
        identity = NamespaceIdentity(self._profile, "simulated", "simulated")
        # What the service's share for states would refuse is simulated all the same.
        self._space = self._core.open_namespace("log", identity, policy).digest
        self._windows = WindowPolicy.parse(policy, self._profile)
        self._admission = SecondSight() if case.admission is Admission.SECOND_SIGHT else None
        self._ages = Ages(log.footprint, case.retention_seconds or FOR_EVER) if by_age else None
        self._disk = self._made_disk(case)
        self._placed = 0
        self._held = 0
        self._held_seconds = 0.0
        self._counted = self._second = _START
        self.outcome = Outcome()

    def run(self, check: Callable[[], None] = lambda: None) -> Outcome:
        """All requests in order. `check` is called before each and may raise."""
        for request in range(len(self._log)):
            check()
            self._serve(request)
        statistics, outcome = self._core.statistics(), self.outcome
        outcome.blocks_held = statistics.blocks
        outcome.blocks_stored = statistics.totals["stored_blocks_total"]
        outcome.states_stored = statistics.totals["stored_states_total"]
        outcome.index_bytes_per_block = statistics.index_bytes_per_block
        if self._disk is not None:
            written = self._disk.log
            outcome.device_bytes = written.written_bytes
            outcome.appended_bytes = written.appended_bytes
            outcome.copied_bytes = written.cleaned_bytes
        span = self._log.span_seconds
        if self._ages is not None:
            self._held_seconds = self._ages.held_seconds(span + _START)
            outcome.blocks_expired = self._ages.expired
        outcome.held_blocks_mean = self._held_seconds / span if span else float(statistics.blocks)
        return outcome

    def check_integrity(self) -> None:
        """Raise AssertionError unless every law of the core holds, and the capacity."""
        self._core.check_integrity()
        assert len(self._log) == 0 or self._held == self._core.statistics().blocks, "blocks held"
        assert self._case.capacity is None or self.outcome.blocks_held_most <= self._case.capacity, "capacity"
        if self._disk is not None:
            self._disk.log.check_integrity()

    # ---- one request ----------------------------------------------------------------------------------------

    def _serve(self, request: int) -> None:
        log, case, core = self._log, self._case, self._core
        now, then = self._times(request)
        self._expire(now)
        self._count_held(now)
        tokens = int(log.input_tokens[request])
        keys, size = self._keys_of(request), log.block_tokens
        if case.as_served:
            keys = keys[: tokens // size]
        # A token more than the blocks have, so that nothing is held back for the one that must be computed.
        prompt = tokens if case.as_served else len(keys) * size + 1
        found = core.lookup(
            self._space,
            keys,
            prompt_tokens=prompt,
            costs=FREE_READS,
            session=SESSION,
            now_mono=now,
            now_wall=now,
            lease=True,
            exact_only=case.replay is not Replay.BOUNDED,
        )
        held = found.coverage.blocks
        found = self._aged(found, request, now, prompt)
        resume = self._count(found, tokens, len(keys), prompt)
        uses = self._reuse(request, len(keys), found.lease_id, now)
        admitted = self._admitted(request, held, len(keys))
        room = self._room(request, admitted, now, None if uses is None else uses[held : held + admitted])
        if self._belady is not None and uses is not None:
            self._belady.expect(uses[held : held + room])
        items = self._block_items(keys, held, held + room)
        if case.windows is not None:
            items += self._state_items(found, keys, held + room, resume, prompt)
        for begin in range(0, len(items), _ITEMS_AT_ONCE):
            self._store(items[begin : begin + _ITEMS_AT_ONCE], then)
        if found.lease_id is not None:
            core.release(found.lease_id, SESSION, then)

    def _keys_of(self, request: int) -> JoinedKeys:
        joined = self._keys.joined
        return JoinedKeys(
            b"".join(
                [
                    joined[start * KEY_BYTES : (start + count) * KEY_BYTES]
                    for start, count in self._log.runs(request)
                ]
            )
        )

    def _times(self, request: int) -> tuple[float, float]:
        """When it comes, and when its blocks are stored."""
        course, log = self._course, self._log
        if course is None:
            now = float(log.seconds[request] - log.seconds[0]) + _START
            return now, now
        # Last uses are whole seconds: where those of a course begin is kept.
        begin = math.floor(course.asked[0]) - _START
        return course.asked[request] - begin, course.stored[request] - begin

    def _aged(self, found: LookupResult, request: int, now: float, prompt: int) -> LookupResult:
        """Without the blocks from the first one on whose time since it came is over: those come anew."""
        if self._ages is None:
            return found
        held = found.coverage.blocks
        blocks = self._ages.serve(self._log.blocks(request), held, now)
        if blocks == held:
            return found
        coverage = within(found.coverage, blocks, self._log.block_tokens)
        planned = plan(
            self._profile,
            coverage,
            prompt_tokens=prompt,
            costs=FREE_READS,
            policy=self._windows,
            exact_only=self._case.replay is not Replay.BOUNDED,
        )
        return found._replace(coverage=coverage, plan=planned)

    def _count(self, found: LookupResult, tokens: int, blocks: int, prompt: int) -> Resume:
        """Count a request, and say how it resumes."""
        outcome = self.outcome
        resume = resume_of(self._case, self._profile, found.coverage, found.plan.chosen, prompt)
        outcome.requests += 1
        outcome.input_tokens += tokens
        outcome.hit_tokens += resume.saved_tokens(tokens, self._profile.layer_count)
        outcome.restored_tokens += min(resume.compute_from, tokens)
        outcome.replayed_tokens += resume.replay_tokens
        outcome.replay_layer_tokens += resume.replay_layer_tokens
        if resume.source is not None:
            outcome.sources[resume.source] += 1
        outcome.blocks_asked += blocks
        outcome.blocks_hit += found.coverage.blocks
        return resume

    def _reuse(self, request: int, blocks: int, lease_id: int | None, now: float) -> Uses | None:
        """When each block of the request is used next, where the policy wants to know; what is held is told it."""
        if self._belady is None or self._uses is None:
            return None
        uses = self._uses.of(request)[:blocks]
        if lease_id is not None:
            slots = np.frombuffer(self._core.lease(lease_id, SESSION, now).slots, np.int32)
            self._belady.used(slots, uses[: len(slots)])
        return uses

    def _admitted(self, request: int, held: int, asked: int) -> int:
        """How many of the blocks that are not held are to be stored."""
        missing = asked - held
        if self._admission is None or not missing:
            return missing
        admitted = self._admission.admit(self._log.blocks(request)[held:asked].tolist())
        self.outcome.blocks_not_admitted += missing - admitted
        return admitted

    def _room(self, request: int, missing: int, now: float, uses: Uses | None) -> int:
        """How many of the missing blocks find room, after as many others as may go have gone."""
        capacity = self._case.capacity if self._course is None else self._course.room[request]
        # A disk makes its own room, when it is written to.
        if capacity is None or self._disk is not None or missing <= capacity - self._held:
            return missing
        free = capacity - self._held
        if self._belady is not None and uses is not None:
            self._belady.refuse_below(uses[free:])
        wanted = missing - free
        while wanted > 0:
            gone = self._core.plan_eviction(
                wanted * self._profile.block_bytes, prefer_states=False, now_wall=now
            )
            if not gone:
                break
            blocks = self._left(gone)
            self.outcome.blocks_evicted += blocks
            wanted -= blocks
        if self._belady is not None:
            self._belady.refuse_below(None)
        # Room may shrink by more than is asked for, and what is leased stays.
        refused = min(max(wanted, 0), missing)
        self.outcome.blocks_refused += refused
        return missing - refused

    # ---- storing --------------------------------------------------------------------------------------------

    def _block_items(self, keys: JoinedKeys, begin: int, end: int) -> list[ReserveItem]:
        size, length = self._log.block_tokens, self._profile.block_bytes
        own = list(keys[begin:end])
        parents = [keys[begin - 1] if begin else self._space, *own]
        return [
            ReserveItem(key, ItemKind.BLOCK, parent, position, length)
            for key, parent, position in zip(
                own, parents, range((begin + 1) * size, (end + 1) * size, size), strict=False
            )
        ]

    def _state_items(
        self, found: LookupResult, keys: JoinedKeys, held: int, resume: Resume, prompt: int
    ) -> list[ReserveItem]:
        """States and rows that the policy keeps of what is held now. The edge where an output would end is that of the input:
        outputs have no ids."""
        size = self._log.block_tokens
        saved = save_states(
            self._windows,
            self._profile,
            prompt_tokens=prompt if self._case.as_served else len(keys) * size,
            coverage=found.coverage,
            compute_from=resume.compute_from,
            rebuilt=resume.rebuilt,
        )
        edges = {edge for edge in saved.ssd if edge <= held * size}
        if saved.output_edge_ssd and held == len(keys) and held:
            edges.add(held * size)
        edges -= set(found.coverage.checkpoints)
        length = self._profile.state_bytes
        items = [
            ReserveItem(keys[edge // size - 1], ItemKind.STATE, b"", edge, length) for edge in sorted(edges)
        ]
        if saved.rows:
            overlap = self._profile.rows_overlap_block_bytes
            length = overlap if saved.rows_overlap else self._profile.rows_block_bytes
            items += [
                ReserveItem(keys[number], ItemKind.ROWS, b"", (number + 1) * size, length)
                for number in range(resume.compute_from // size, held)
            ]
        return items

    def _store(self, items: list[ReserveItem], now: float) -> None:
        """The writer's part of the service: reserve, have places, commit."""
        if not items:
            return
        core = self._core
        made = core.reserve(SESSION, self._space, items, now_mono=now, now_wall=now)
        if made.reservation_id is None:
            return
        granted = core.commit_list(made.reservation_id, SESSION)
        places = self._places([each.item.length for each in granted], now)
        blocks = sum(each.item.kind is ItemKind.BLOCK for each in granted[len(places) :])
        self.outcome.blocks_refused += blocks
        granted = granted[: len(places)]
        written = {
            each.item.item_id: Written(_NO_CHECKS, place) for each, place in zip(granted, places, strict=True)
        }
        report = core.committed(made.reservation_id, SESSION, written, now_mono=now, now_wall=now)
        if self._disk is not None:
            self._disk.discard(report.discard)
        self._held += sum(each.item.kind is ItemKind.BLOCK for each in granted)
        self.outcome.state_bytes += sum(
            each.item.length for each in granted if each.item.kind is not ItemKind.BLOCK
        )
        self.outcome.blocks_held_most = max(self.outcome.blocks_held_most, self._held)

    def _places(self, lengths: list[int], now: float) -> list[Place]:
        """Of the first ones that find room."""
        if self._disk is not None:
            return self._disk.append(lengths, now)
        begin = self._placed
        self._placed += len(lengths)
        return [
            Place(*divmod(number, _RECORDS_PER_SEGMENT), length)
            for number, length in enumerate(lengths, begin)
        ]

    def _made_disk(self, case: Case) -> SimulatedDisk | None:
        if case.segment_bytes is None:
            return None
        return SimulatedDisk(
            self._core,
            budget_bytes=None if case.capacity is None else case.capacity * self._profile.block_bytes,
            segment_bytes=case.segment_bytes,
            left=self._evicted,
        )

    # ---- leaving --------------------------------------------------------------------------------------------

    def _evicted(self, gone: Sequence[Gone]) -> None:
        self.outcome.blocks_evicted += self._left(gone)

    def _left(self, gone: Sequence[Gone]) -> int:
        blocks = sum(each.item.kind is ItemKind.BLOCK for each in gone)
        self._held -= blocks
        return blocks

    def _expire(self, now: float) -> None:
        """What the service does each second, for all seconds since the last request."""
        if self._case.retention_seconds is None or self._ages is not None:
            return
        step = max(1.0, (now - self._second) / _STEPS_MAX)
        while self._second < now:
            self._second = min(self._second + step, now)
            while gone := self._core.expire_blocks(self._second):
                self._count_held(self._second)
                self.outcome.blocks_expired += self._left(gone)
                if self._disk is not None:
                    self._disk.discard(each.place for each in gone)

    def _count_held(self, until: float) -> None:
        self._held_seconds += self._held * max(until - self._counted, 0.0)
        self._counted = max(until, self._counted)
