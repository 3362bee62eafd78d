"""From a prompt and a store to a running sequence: by plan, from a handoff, or cold. A failing store is a miss."""

from __future__ import annotations

import logging
from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass, field, replace

from kvstore.clock import Clock
from kvstore.errors import DamagedBytes, InvalidArgument, UnknownTicket
from kvstore.profile.base import Profile
from kvstore.profile.layout import state_layout
from kvstore.types import BytesLike, Exactness, Lineage, StateSource
from kvstore_client.client import Lookup
from kvstore_client.flight import Flight
from kvstore_client.handoff import HandoffTake
from kvstore_client.values import Plan, SaveStates
from kvstore_workers.model.model import Model
from kvstore_workers.model.sequence import Sequence
from kvstore_workers.model.starts import RowsStart, Start, StateStart
from kvstore_workers.runtime.feed import SLICED_BYTES, SlicedFeed
from kvstore_workers.runtime.handoff import Note, decode_note, prompt_digest
from kvstore_workers.runtime.need import check_plan, rows_of, state_items
from kvstore_workers.runtime.stop import Stop
from kvstore_workers.runtime.store import EAGER, STORE_FAILURES, Fetched, PrefixStore
from kvstore_workers.runtime.trace import Trace
from kvstore_workers.runtime.values import PrefixReport, Request
from kvstore_workers.runtime.writer import describe

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""Lookups per prompt: the second one knows what the first one's fetch found missing. Then the prompt is computed."""

WAIT_SECONDS = 30.0
"""How long a prompt waits in all for another worker that is computing the same blocks."""

WAIT_STEP_SECONDS = 1.0
"""How long one lookup waits: between two the request may be given up."""


@dataclass(slots=True)
class Restored:
    """A sequence to go on with, what it took to get it, and which states are to be kept from here on.

    feed: brings the blocks' entries while the model runs; until it has, the report stands under its success. flight: says
    that this worker computes the rest of the prompt. take: the handoff that the sequence is from, to be confirmed when
    nobody can need it any more.
    """

    sequence: Sequence
    report: PrefixReport
    save_states: SaveStates
    feed: SlicedFeed | None = None
    flight: Flight | None = None
    take: HandoffTake | None = None

    def close(self) -> None:
        """End what still runs for the sake of this restore."""
        if self.feed is not None:
            self.feed.close()


@dataclass(slots=True)
class Spent:
    """Seconds that a prompt has cost at the store, in tries that failed too."""

    lookup: float = 0.0
    fetch: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be restored for: the request, the keys of its whole blocks, and who hears of it."""

    request: Request
    keys: TokenSequence[bytes]
    stop: Stop
    trace: Trace
    spent: Spent = field(default_factory=Spent)

    @property
    def tokens(self) -> TokenSequence[int]:
        return self.request.tokens

    def allows_bounded(self, profile: Profile) -> bool:
        """Whether an approximate prefix will do: where it was asked for, or the model was trained for it."""
        asked = self.request.exactness
        return profile.bounded_is_trained if asked is None else asked is Exactness.BOUNDED


class Restorer:
    """`store` None: every prompt starts cold. `sliced_bytes`: from how many bytes of blocks on they come by layers."""

    def __init__(
        self, model: Model, store: PrefixStore | None, *, clock: Clock, sliced_bytes: int = SLICED_BYTES
    ) -> None:
        self._model = model
        self._sliced_bytes = sliced_bytes
        self._store = store
        self._clock = clock
        self._profile = model.profile
        self._block_tokens = model.profile.block_tokens

    def cold(self, prompt_tokens: int, *, save_states: SaveStates, reason: str = "") -> Restored:
        """A sequence at position 0."""
        report = PrefixReport(prompt_tokens=prompt_tokens, computed_tokens=prompt_tokens, miss_reason=reason)
        return Restored(self._model.start(), report, save_states)

    def prompt(self, prompt: Prompt, *, reason: str = "", sliced: bool = True) -> Restored:
        """As the store's plan says. `reason`: of an earlier miss. `sliced`: large restores may come with a feed."""
        count = len(prompt.tokens)
        if self._store is None:
            return self.cold(count, save_states=SaveStates(), reason=reason)
        for attempt in range(ATTEMPTS):
            try:
                return self._by_plan(self._store, prompt, reason=reason, sliced=sliced and attempt == 0)
            except STORE_FAILURES as error:
                reason = describe(error)
                log.warning("the store gave nothing: %s", reason)
        restored = self.cold(count, save_states=self._default_states(count), reason=reason)
        restored.report = _with_spent(restored.report, prompt)
        return restored

    def handoff(self, prompt: Prompt, *, ticket: bytes, first_token: int) -> Restored | str:
        """At the end of the prompt, from the state that a prefill worker left; or the reason why not."""
        assert self._store is not None, "a handoff needs a store"
        began = self._clock.monotonic()
        try:
            take = self._store.take(ticket)
            try:
                note = decode_note(take.note)
                _check_note(note, take, prompt, first_token=first_token, profile=self._profile)
                return self._resume(self._store, take, note, prompt, began=began)
            except BaseException:
                # Nobody else can make more of it: what is missing is mended by a lookup.
                self._store.confirm(take)
                raise
        except STORE_FAILURES as error:
            reason = describe(error)
            log.warning("the handoff was not used: %s", reason)
            return reason

    # ---- by plan -----------------------------------------------------------------------------------------------

    def _by_plan(self, store: PrefixStore, prompt: Prompt, *, reason: str, sliced: bool) -> Restored:
        looked_up, report = self._look_up(store, prompt, reason=reason)
        plan = looked_up.plan
        feed: SlicedFeed | None = None
        handed_on = False
        try:
            check_plan(
                plan,
                prompt_tokens=len(prompt.tokens),
                keys=len(prompt.keys),
                profile=self._profile,
                bounded=prompt.allows_bounded(self._profile),
            )
            if plan.state_source is StateSource.NONE:
                handed_on = True
                return Restored(self._model.start(), report, plan.save_states, flight=looked_up.flight)
            blocks = plan.compute_from // self._block_tokens
            if sliced and blocks * self._profile.block_bytes >= self._sliced_bytes:
                feed = SlicedFeed(
                    store,
                    looked_up,
                    blocks=blocks,
                    state_items=len(state_items(plan, self._profile)),
                    stop=prompt.stop,
                    clock=self._clock,
                    trace=prompt.trace,
                )
                restored = self._run(store, plan, prompt, report, fetched=feed)
            else:
                began = self._clock.monotonic()
                try:
                    with prompt.trace.span("fetch", "fetch", blocks=blocks):
                        fetched = store.fetch(
                            looked_up, blocks=blocks, with_state=True, check=prompt.stop.check
                        )
                finally:
                    prompt.spent.fetch += self._clock.monotonic() - began
                restored = self._run(store, plan, prompt, report, fetched=fetched)
                restored.report = _with_spent(restored.report, prompt)
            restored.feed, restored.flight = feed, looked_up.flight
            handed_on = True
            return restored
        finally:
            if not handed_on:
                if feed is not None:
                    feed.close()
                    prompt.spent.fetch += feed.fetch_seconds
                if looked_up.flight is not None:
                    store.end_flight(looked_up.flight)
            if feed is None:
                store.release(looked_up)

    def _look_up(self, store: PrefixStore, prompt: Prompt, *, reason: str) -> tuple[Lookup, PrefixReport]:
        """A plan, after waiting for others where the store finds that sooner, and the report as far as it is known."""
        spent = prompt.spent
        while True:
            prompt.stop.check()
            step = min(WAIT_STEP_SECONDS, max(WAIT_SECONDS - spent.waited, 0.0))
            began, waited = self._clock.monotonic(), 0.0
            try:
                with prompt.trace.span("lookup", "compute", keys=len(prompt.keys)):
                    looked_up = store.lookup(
                        prompt.keys,
                        prompt_tokens=len(prompt.tokens),
                        exactness=prompt.request.exactness,
                        announce=True,
                        wait_seconds=step,
                    )
                waited = looked_up.waited_seconds
            finally:
                spent.waited += waited
                spent.lookup += self._clock.monotonic() - began - waited
            still = looked_up.blocks_in_flight > 0 and looked_up.flight is None
            if not still or waited < step or spent.waited >= WAIT_SECONDS:
                break
            store.release(looked_up)
        plan = looked_up.plan
        chosen = plan.chosen
        report = PrefixReport(
            prompt_tokens=len(prompt.tokens),
            restored_tokens=plan.compute_from,
            replayed_tokens=plan.compute_from - plan.replay_from,
            computed_tokens=len(prompt.tokens) - plan.compute_from,
            state_source=plan.state_source,
            exactness=plan.exactness,
            bytes_ssd=chosen.bytes_ssd,
            bytes_memory=chosen.bytes_memory,
            expected_seconds=chosen.seconds,
            replay_layer_tokens=chosen.replay_layer_tokens,
            miss_reason=reason,
        )
        return looked_up, _with_spent(report, prompt)

    def _run(
        self,
        store: PrefixStore,
        plan: Plan,
        prompt: Prompt,
        report: PrefixReport,
        *,
        fetched: Fetched | SlicedFeed,
    ) -> Restored:
        """The plan's sequence, replayed where the plan says so."""
        began = self._clock.monotonic()
        state = fetched.state() if isinstance(fetched, SlicedFeed) else fetched.state
        tokens = list(prompt.tokens[plan.replay_from : plan.compute_from])
        with prompt.trace.span("restore", "compute", source=plan.state_source.value, replayed=len(tokens)):
            sequence = self._model.restore(
                position=plan.compute_from,
                start=self._start(plan, state),
                tokens=tokens,
                blocks=fetched.blocks if isinstance(fetched, Fetched) else (),
                feed=fetched if isinstance(fetched, SlicedFeed) else None,
                exact=plan.exactness is Exactness.EXACT,
            )
        seconds = self._clock.monotonic() - began
        if isinstance(fetched, Fetched) and not tokens:
            sizes = (len(payload) for payload in (*fetched.blocks, *fetched.state))
            store.rates.loaded(bytes_loaded=sum(sizes), seconds=seconds)
        return Restored(sequence, replace(report, replay_seconds=seconds), plan.save_states)

    def _start(self, plan: Plan, state: TokenSequence[BytesLike]) -> Start | None:
        """Where the window rows come from."""
        rows = rows_of(plan, self._profile)
        if rows is not None:
            return RowsStart(state, rows.edge, rows.overlap)
        return StateStart(state[0], plan.state_at) if state else None

    def _default_states(self, prompt_tokens: int) -> SaveStates:
        """Where no plan could be had: what every policy keeps, so that the next request finds something."""
        edge = (prompt_tokens - 1) // self._block_tokens * self._block_tokens
        return SaveStates(pool=(edge,) if edge > 0 else (), output_edge_pool=True)

    # ---- from a handoff ----------------------------------------------------------------------------------------

    def _resume(
        self, store: PrefixStore, take: HandoffTake, note: Note, prompt: Prompt, *, began: float
    ) -> Restored:
        position = take.position
        exactness = Exactness.EXACT if take.lineage is Lineage.EXACT else Exactness.BOUNDED
        fetched = Fetched((), (), 0.0)
        if prompt.keys:
            with prompt.trace.span("fetch", "fetch", blocks=len(prompt.keys)):
                fetched = self._blocks(store, prompt, exactness)
        asked = self._clock.monotonic() - began - fetched.seconds
        try:
            with prompt.trace.span("restore", "compute", source="handoff"):
                size = state_layout(self._profile, position).total_bytes
                start = StateStart(take.payload[:size], position, open_rows=take.payload[size:])
                sequence = self._model.restore(position=position, start=start, blocks=fetched.blocks)
        except InvalidArgument as error:
            raise DamagedBytes(f"the handoff's state does not fit: {error}") from error
        report = PrefixReport(
            prompt_tokens=position,
            restored_tokens=position,
            state_source=None,
            exactness=exactness,
            bytes_ssd=sum(len(block) for block in fetched.blocks),
            bytes_memory=len(take.payload),
            fetch_seconds=fetched.seconds,
            lookup_seconds=asked,
            handoff=True,
        )
        return Restored(sequence, report, note.save_states(), take=take)

    def _blocks(self, store: PrefixStore, prompt: Prompt, exactness: Exactness) -> Fetched:
        """All whole blocks of the prompt; DamagedBytes when the store does not hold them all."""
        # One token more than the prompt, since a plan always leaves one to compute.
        looked_up = store.lookup(
            prompt.keys, prompt_tokens=len(prompt.tokens) + 1, costs=EAGER, exactness=exactness
        )
        try:
            covered = looked_up.plan.compute_from // self._block_tokens
            if covered < len(prompt.keys):
                raise UnknownTicket(
                    "the handoff's blocks are not (all) in the store",
                    field="blocks",
                    value=covered,
                    allowed=f"{len(prompt.keys)} blocks",
                )
            return store.fetch(looked_up, blocks=len(prompt.keys), with_state=False, check=prompt.stop.check)
        finally:
            store.release(looked_up)


def _with_spent(report: PrefixReport, prompt: Prompt) -> PrefixReport:
    spent = prompt.spent
    return replace(
        report, lookup_seconds=spent.lookup, fetch_seconds=spent.fetch, waited_seconds=spent.waited
    )


def _check_note(note: Note, take: HandoffTake, prompt: Prompt, *, first_token: int, profile: Profile) -> None:
    """DamagedBytes when a handoff belongs to another prompt than the one that is asked for, or is approximate for one
    that must be exact."""
    tokens, sample = prompt.tokens, prompt.request.sample
    digest = prompt_digest(tokens)
    left = (take.position, note.prompt_tokens, note.prompt, note.first_tokens[sample : sample + 1])
    if left != (len(tokens), len(tokens), digest, (first_token,)):
        raise DamagedBytes(
            "the handoff belongs to another request",
            field="position, first_tokens, prompt",
            value=f"{take.position}, {note.first_tokens}, {note.prompt}",
            allowed=f"{len(tokens)}, {first_token} for sample {sample}, {digest}",
        )
    if take.lineage is not Lineage.EXACT and not prompt.allows_bounded(profile):
        raise DamagedBytes(
            "the handoff is approximate", field="lineage", value=take.lineage, allowed=Lineage.EXACT.name
        )
