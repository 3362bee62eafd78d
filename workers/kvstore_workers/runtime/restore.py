"""From a prompt and a store to a running sequence: by plan, from a handoff, or cold. A failing store is a miss."""

from __future__ import annotations

import logging
from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass, replace

from kvstore.clock import Clock
from kvstore.errors import DamagedBytes, InvalidArgument
from kvstore.profile.base import Profile
from kvstore.types import Exactness, Lineage, StateSource
from kvstore_client.handoff import HandoffTake
from kvstore_client.values import Plan, SaveStates
from kvstore_workers.model.model import Model
from kvstore_workers.model.sequence import Sequence
from kvstore_workers.runtime.handoff import Note, decode_note, prompt_digest
from kvstore_workers.runtime.stop import Stop
from kvstore_workers.runtime.store import EAGER, STORE_FAILURES, Fetched, PrefixStore
from kvstore_workers.runtime.values import PrefixReport
from kvstore_workers.runtime.writer import describe

log = logging.getLogger(__name__)

FOLLOWED = (StateSource.POOL, StateSource.CHECKPOINT, StateSource.REPLAY, StateSource.NONE)

ATTEMPTS = 2
"""Lookups per prompt: the second one knows what the first one's fetch found missing. Then the prompt is computed."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A sequence to go on with, what it took to get it, and which states are to be kept from here on."""

    sequence: Sequence
    report: PrefixReport
    save_states: SaveStates


class Restorer:
    """`store` None: every prompt starts cold."""

    def __init__(self, model: Model, store: PrefixStore | None, *, clock: Clock) -> None:
        self._model = model
        self._store = store
        self._clock = clock
        self._block_tokens = model.profile.block_tokens

    def cold(self, prompt_tokens: int, *, save_states: SaveStates, reason: str = "") -> Restored:
        """A sequence at position 0."""
        report = PrefixReport(prompt_tokens=prompt_tokens, computed_tokens=prompt_tokens, miss_reason=reason)
        return Restored(self._model.start(), report, save_states)

    def prompt(
        self, tokens: TokenSequence[int], keys: TokenSequence[bytes], *, stop: Stop, reason: str = ""
    ) -> Restored:
        """As the store's plan says. `keys`: of all whole blocks of the prompt. `reason`: of an earlier miss."""
        count = len(tokens)
        if self._store is None:
            return self.cold(count, save_states=SaveStates(), reason=reason)
        for _ in range(ATTEMPTS):
            try:
                plan, fetched, lookup_seconds = self._read(self._store, keys, count, stop)
            except STORE_FAILURES as error:
                reason = describe(error)
                log.warning("the store gave nothing: %s", reason)
            else:
                return self._follow(plan, fetched, tokens, lookup_seconds, reason)
        return self.cold(count, save_states=self._default_states(count), reason=reason)

    def handoff(
        self,
        tokens: TokenSequence[int],
        keys: TokenSequence[bytes],
        *,
        ticket: bytes,
        first_token: int,
        stop: Stop,
    ) -> Restored | str:
        """At the end of the prompt, from the state that a prefill worker left; or the reason why not."""
        assert self._store is not None, "a handoff needs a store"
        began = self._clock.monotonic()
        try:
            take = self._store.take(ticket)
            note = decode_note(take.note)
            _check_note(note, take, tokens, first_token=first_token)
            return self._resume(self._store, take, note, keys, began=began, stop=stop)
        except STORE_FAILURES as error:
            reason = describe(error)
            log.warning("the handoff was not used: %s", reason)
            return reason

    # ---- by plan -----------------------------------------------------------------------------------------------

    def _read(
        self, store: PrefixStore, keys: TokenSequence[bytes], prompt_tokens: int, stop: Stop
    ) -> tuple[Plan, Fetched | None, float]:
        """The plan and all that it reads, None where it reads nothing; seconds of the lookup."""
        began = self._clock.monotonic()
        looked_up = store.lookup(keys, prompt_tokens=prompt_tokens)
        lookup_seconds = self._clock.monotonic() - began
        plan = looked_up.plan
        try:
            _check_plan(plan, prompt_tokens=prompt_tokens, keys=len(keys), profile=self._model.profile)
            if plan.state_source is StateSource.NONE:
                return plan, None, lookup_seconds
            state_at = None if plan.state_source is StateSource.REPLAY else plan.state_at
            blocks = plan.compute_from // self._block_tokens
            return (
                plan,
                store.fetch(looked_up, blocks=blocks, state_at=state_at, check=stop.check),
                lookup_seconds,
            )
        finally:
            store.release(looked_up)

    def _follow(
        self,
        plan: Plan,
        fetched: Fetched | None,
        tokens: TokenSequence[int],
        lookup_seconds: float,
        reason: str,
    ) -> Restored:
        if fetched is None:
            cold = self.cold(len(tokens), save_states=plan.save_states, reason=reason)
            report = replace(cold.report, lookup_seconds=lookup_seconds, expected_seconds=plan.chosen.seconds)
            return replace(cold, report=report)
        position, replay_from = plan.compute_from, plan.replay_from
        began = self._clock.monotonic()
        if fetched.state is not None and replay_from == position:
            sequence = self._model.resume(blocks=fetched.blocks, state=fetched.state, position=position)
        else:
            sequence = self._model.replay(
                blocks=fetched.blocks,
                tokens=list(tokens[replay_from:position]),
                replay_from=replay_from,
                position=position,
                state=fetched.state,
            )
        chosen = plan.chosen
        report = PrefixReport(
            prompt_tokens=len(tokens),
            restored_tokens=position,
            replayed_tokens=position - replay_from,
            computed_tokens=len(tokens) - position,
            state_source=plan.state_source,
            exactness=plan.exactness,
            bytes_ssd=chosen.bytes_ssd,
            bytes_memory=chosen.bytes_memory,
            lookup_seconds=lookup_seconds,
            fetch_seconds=fetched.seconds,
            replay_seconds=self._clock.monotonic() - began,
            expected_seconds=chosen.seconds,
            replay_layer_tokens=chosen.replay_layer_tokens,
            miss_reason=reason,
        )
        return Restored(sequence, report, plan.save_states)

    def _default_states(self, prompt_tokens: int) -> SaveStates:
        """Where no plan could be had: what every policy keeps, so that the next request finds something."""
        edge = (prompt_tokens - 1) // self._block_tokens * self._block_tokens
        return SaveStates(pool=(edge,) if edge > 0 else (), output_edge_pool=True)

    # ---- from a handoff ----------------------------------------------------------------------------------------

    def _resume(
        self,
        store: PrefixStore,
        take: HandoffTake,
        note: Note,
        keys: TokenSequence[bytes],
        *,
        began: float,
        stop: Stop,
    ) -> Restored:
        position = take.position
        try:
            fetched = self._blocks(store, keys, position, stop) if keys else Fetched((), None, 0.0)
            try:
                sequence = self._model.resume(blocks=fetched.blocks, state=take.payload, position=position)
            except InvalidArgument as error:
                raise DamagedBytes(f"the handoff's state does not fit: {error}") from error
        finally:
            # From here on nobody else needs it: a failure below this worker's own is mended by a lookup. Should this
            # process die before, the take goes back with its session.
            store.confirm(take)
        report = PrefixReport(
            prompt_tokens=position,
            restored_tokens=position,
            state_source=None,
            bytes_ssd=sum(len(block) for block in fetched.blocks),
            bytes_memory=len(take.payload),
            fetch_seconds=fetched.seconds,
            lookup_seconds=self._clock.monotonic() - began - fetched.seconds,
            handoff=True,
        )
        return Restored(sequence, report, note.save_states())

    def _blocks(
        self, store: PrefixStore, keys: TokenSequence[bytes], prompt_tokens: int, stop: Stop
    ) -> Fetched:
        """All whole blocks of the prompt; DamagedBytes when the store does not hold them all."""
        # One token more than the prompt, since a plan always leaves one to compute.
        looked_up = store.lookup(keys, prompt_tokens=prompt_tokens + 1, costs=EAGER)
        try:
            covered = looked_up.plan.compute_from // self._block_tokens
            if covered < len(keys):
                raise DamagedBytes(
                    "the handoff's blocks are not (all) in the store",
                    field="blocks",
                    value=covered,
                    allowed=f"{len(keys)} blocks",
                )
            return store.fetch(looked_up, blocks=len(keys), state_at=None, check=stop.check)
        finally:
            store.release(looked_up)


def _check_plan(plan: Plan, *, prompt_tokens: int, keys: int, profile: Profile) -> None:
    """InvalidArgument for a plan that this worker can't follow, or that would give a wrong state."""
    chosen, block_tokens = plan.chosen, profile.block_tokens
    if plan.state_source not in FOLLOWED:
        raise InvalidArgument(
            "a plan that this worker can't follow",
            field="state_source",
            value=plan.state_source,
            allowed=", ".join(FOLLOWED),
        )
    if plan.exactness is not Exactness.EXACT:
        raise InvalidArgument(
            "not asked for", field="exactness", value=plan.exactness, allowed=Exactness.EXACT
        )
    if plan.state_source is StateSource.NONE:
        return
    position, replay_from = chosen.compute_from, chosen.replay_from
    if not 0 < position <= min(prompt_tokens - 1, keys * block_tokens) or position % block_tokens:
        raise InvalidArgument(
            "a plan ends where no block does",
            field="compute_from",
            value=position,
            allowed=f"a multiple of {block_tokens} below {prompt_tokens}",
        )
    if plan.state_source is StateSource.REPLAY:
        latest, unit = max(0, position - profile.exact_replay_tokens), 1
    else:
        latest, unit = position, block_tokens
    if not 0 <= replay_from <= latest or replay_from % unit:
        raise InvalidArgument(
            "a replay that is not exact",
            field="replay_from",
            value=replay_from,
            allowed=f"a multiple of {unit} up to {latest}",
        )


def _check_note(note: Note, take: HandoffTake, tokens: TokenSequence[int], *, first_token: int) -> None:
    """DamagedBytes when a handoff belongs to another prompt than the one that is asked for, or is approximate."""
    left = (take.position, note.prompt_tokens, note.prompt, note.first_token)
    asked = (len(tokens), len(tokens), prompt_digest(tokens), first_token)
    if left != asked:
        raise DamagedBytes(
            "the handoff belongs to another request",
            field="position, first_token, prompt",
            value=f"{take.position}, {note.first_token}, {note.prompt}",
            allowed=f"{len(tokens)}, {first_token}, {asked[2]}",
        )
    if take.lineage is not Lineage.EXACT:
        raise DamagedBytes(
            "the handoff is approximate", field="lineage", value=take.lineage, allowed=Lineage.EXACT.name
        )
