"""What a worker does for one request: restore, compute and store meanwhile, pick tokens, hand over."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kvstore.clock import Clock
from kvstore.errors import InvalidArgument
from kvstore_client.values import SaveStates
from kvstore_workers.model.config import TILE
from kvstore_workers.model.model import Model
from kvstore_workers.model.sampling import pick
from kvstore_workers.runtime.handoff import Note, encode_note, prompt_digest
from kvstore_workers.runtime.passage import Passage, RunKeys
from kvstore_workers.runtime.restore import Restored, Restorer
from kvstore_workers.runtime.stop import Stop
from kvstore_workers.runtime.store import STORE_FAILURES, PrefixStore
from kvstore_workers.runtime.values import (
    TICKET_BYTES,
    Computed,
    Done,
    Event,
    Picked,
    Prefixed,
    Request,
    Stored,
    StoreReport,
    check_request,
)
from kvstore_workers.runtime.writer import StoreRun, Writer, describe

CHUNK_TILES = 4
"""Tiles computed between two looks at the stop flag; after each chunk its blocks go to the writer."""

FLUSH_SECONDS = 10.0
"""How long the end of a request waits for the store."""

_NO_ROOT = bytes(32)


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a prefill leaves for a decode worker: a state at `position` and the note that goes with it."""

    position: int
    state: bytes
    note: bytes


class Engine:
    """Runs requests of one model, one at a time. `store` and `writer` are both there or both None.

    `prefill` and `decode` are generators: closing one, or setting its `stop`, ends the work at the next step and gives
    back what it holds in the store. A failing store never fails a request; InvalidArgument does, before any event.
    """

    def __init__(
        self,
        model: Model,
        *,
        store: PrefixStore | None,
        writer: Writer | None,
        clock: Clock,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        if (store is None) != (writer is None):
            raise InvalidArgument(
                "a store comes with its writer", field="writer", value=writer, allowed="both or neither"
            )
        self.model = model
        self._store = store
        self._writer = writer
        self._clock = clock
        self._flush_seconds = flush_seconds
        self._restorer = Restorer(model, store, clock=clock)

    @property
    def namespace(self) -> bytes:
        return b"" if self._store is None else self._store.namespace

    def check(self, request: Request, *, ticket: bytes = b"", first_token: int | None = None) -> None:
        """InvalidArgument for a request that this model can't run."""
        vocabulary = self.model.config.vocab_size
        check_request(request, vocabulary=vocabulary)
        if ticket and len(ticket) != TICKET_BYTES:
            raise InvalidArgument(
                "not a ticket",
                field="ticket",
                value=f"{len(ticket)} bytes",
                allowed=f"{TICKET_BYTES} bytes, or none",
            )
        if ticket and first_token is None:
            raise InvalidArgument(
                "a ticket comes with the first token",
                field="first_token",
                value="none",
                allowed="the prefill worker's",
            )
        if first_token is not None and not 0 <= first_token < vocabulary:
            raise InvalidArgument(
                "token id outside the vocabulary",
                field="first_token",
                value=first_token,
                allowed=f"0 to {vocabulary - 1}",
            )

    # ---- the two jobs ------------------------------------------------------------------------------------------

    def prefill(self, request: Request, *, stop: Stop) -> Generator[Event, None, None]:
        """Prefixed, Stored..., Picked(first), Computed, whose Done has a ticket if a decode worker can go on from here."""
        self.check(request)
        keys = self._keys(request)
        restored = self._restore(request, keys, stop)
        yield Prefixed(restored.report)
        run = self._begin(request)
        passage = Passage(self.model, restored, keys=keys, run=run)
        logits = yield from self._compute(passage, request, run, stop, logits=True)
        assert logits is not None
        token = self._pick(logits, request, passage.position)
        yield Picked(token, self._wire_logits(logits, request), first=True)
        handoff = None
        if request.max_new_tokens > 1:
            handoff = self._handoff(passage, request, restored.save_states, token)
        else:
            passage.finish()
        yield Computed(partial(self._done, run, handoff))

    def decode(
        self, request: Request, *, stop: Stop, ticket: bytes = b"", first_token: int | None = None
    ) -> Generator[Event, None, None]:
        """Prefixed, Picked(first) unless `first_token` is given, Picked..., with Stored between, Computed.

        With a ticket from the handoff; where that fails, or without one, as the store's plan says, or cold.
        """
        self.check(request, ticket=ticket, first_token=first_token)
        keys = self._keys(request)
        restored = self._restore(request, keys, stop, ticket=ticket, first_token=first_token)
        yield Prefixed(restored.report)
        run = self._begin(request)
        passage = Passage(self.model, restored, keys=keys, run=run)
        logits = yield from self._compute(passage, request, run, stop, logits=first_token is None)
        if first_token is None:
            assert logits is not None, (
                "a prompt whose first token is wanted has at least one token to compute"
            )
            first_token = self._pick(logits, request, passage.position)
            yield Picked(first_token, self._wire_logits(logits, request), first=True)
        yield from self._generate(passage, request, run, stop, first_token)
        passage.finish()
        yield Computed(partial(self._done, run))

    # ---- steps -------------------------------------------------------------------------------------------------

    def _keys(self, request: Request) -> RunKeys:
        if self._store is None or request.bypass_store:
            return RunKeys(_NO_ROOT, (), block_tokens=self.model.profile.block_tokens)
        return RunKeys(self._store.root, request.tokens, block_tokens=self.model.profile.block_tokens)

    def _begin(self, request: Request) -> StoreRun | None:
        return None if self._writer is None or request.bypass_store else self._writer.begin()

    def _restore(
        self,
        request: Request,
        keys: RunKeys,
        stop: Stop,
        *,
        ticket: bytes = b"",
        first_token: int | None = None,
    ) -> Restored:
        stop.check()
        if self._store is None or request.bypass_store:
            return self._restorer.cold(len(request.tokens), save_states=SaveStates())
        reason = ""
        if ticket and first_token is not None:
            taken = self._restorer.handoff(
                request.tokens, keys.keys, ticket=ticket, first_token=first_token, stop=stop
            )
            if isinstance(taken, Restored):
                return taken
            reason = taken
        return self._restorer.prompt(request.tokens, keys.keys, stop=stop, reason=reason)

    def _compute(
        self, passage: Passage, request: Request, run: StoreRun | None, stop: Stop, *, logits: bool
    ) -> Generator[Event, None, torch.Tensor | None]:
        """The rest of the prompt, a chunk at a time; the last token's logits, if asked for."""
        count, step = len(request.tokens), CHUNK_TILES * TILE
        last: torch.Tensor | None = None
        reported = StoreReport()
        while passage.position < count:
            stop.check()
            start = passage.position
            # Cut at absolute multiples, so that no tile is computed in two halves.
            end = min(count, start // step * step + step)
            began = self._clock.monotonic()
            last = passage.extend(list(request.tokens[start:end]), logits=logits and end == count)
            self._note_speed(end - start, self._clock.monotonic() - began)
            if run is not None and (report := run.report) != reported:
                reported = report
                yield Stored(report)
        return last

    def _generate(
        self, passage: Passage, request: Request, run: StoreRun | None, stop: Stop, token: int
    ) -> Iterator[Event]:
        """The tokens after the first; the last one is picked and not computed."""
        reported = StoreReport()
        for _ in range(request.max_new_tokens - 1):
            stop.check()
            logits = passage.extend([token], logits=True)
            assert logits is not None
            token = self._pick(logits, request, passage.position)
            yield Picked(token, self._wire_logits(logits, request), first=False)
            if run is not None and (report := run.report) != reported:
                reported = report
                yield Stored(report)

    def _handoff(self, passage: Passage, request: Request, save: SaveStates, token: int) -> Handoff:
        note = Note(
            prompt_tokens=passage.position,
            prompt=prompt_digest(request.tokens),
            first_token=token,
            output_edge_pool=save.output_edge_pool,
            output_edge_ssd=save.output_edge_ssd,
            every_tokens=save.every_tokens,
        )
        return Handoff(passage.position, passage.sequence.state(), encode_note(note))

    def _done(self, run: StoreRun | None, handoff: Handoff | None = None) -> Done:
        """Leave the handoff, then wait until the run is stored or given up; without a store there is neither."""
        if self._store is None or run is None:
            return Done(StoreReport())
        ticket = b""
        if handoff is not None:
            try:
                ticket = self._store.leave(
                    position=handoff.position, payload=handoff.state, note=handoff.note
                )
            except STORE_FAILURES as error:
                run.note_failure(f"no handoff: {describe(error)}")
        return Done(run.flush(seconds=self._flush_seconds), ticket)

    # ---- small things ------------------------------------------------------------------------------------------

    def _pick(self, logits: torch.Tensor, request: Request, position: int) -> int:
        return pick(logits, seed=request.seed, temperature=request.temperature, position=position)

    def _wire_logits(self, logits: torch.Tensor, request: Request) -> bytes:
        if not request.return_logits:
            return b""
        return logits.reshape(-1).to("cpu", torch.float32).numpy().astype("<f4").tobytes()

    def _note_speed(self, tokens: int, seconds: float) -> None:
        """Less than a tile costs as much as a tile: it says nothing about the price of a token."""
        if self._store is not None and tokens >= TILE:
            self._store.rates.computed(layer_tokens=tokens * self.model.profile.layer_count, seconds=seconds)
