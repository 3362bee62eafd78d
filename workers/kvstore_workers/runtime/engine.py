"""What a worker does for one request: restore, compute and store meanwhile, pick tokens, hand over."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from kvstore.clock import Clock
from kvstore.errors import InvalidArgument
from kvstore.plan.figures import figures_of
from kvstore.plan.work import scanned
from kvstore.types import Lineage
from kvstore_client.values import SaveStates
from kvstore_workers.model.config import TILE
from kvstore_workers.model.model import Model
from kvstore_workers.model.sampling import pick
from kvstore_workers.runtime.feed import SLICED_BYTES, SlicedFeed
from kvstore_workers.runtime.handoff import Note, encode_note, prompt_digest
from kvstore_workers.runtime.passage import Passage, RunKeys
from kvstore_workers.runtime.restore import Prompt, Restored, Restorer
from kvstore_workers.runtime.stop import Stop
from kvstore_workers.runtime.store import STORE_FAILURES, PrefixStore
from kvstore_workers.runtime.trace import SPANS_MAX, Trace
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
    """What a prefill leaves for decode workers: a state at `position` and the note that goes with it."""

    position: int
    state: bytes
    note: bytes
    takes: int
    lineage: Lineage


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
        name: str = "worker",
        sliced_bytes: int = SLICED_BYTES,
    ) -> None:
        """`name`: what the spans of a trace call this process. `sliced_bytes`: see Restorer."""
        if (store is None) != (writer is None):
            raise InvalidArgument(
                "a store comes with its writer", field="writer", value=writer, allowed="both or neither"
            )
        self.model = model
        self._store = store
        self._writer = writer
        self._clock = clock
        self._flush_seconds = flush_seconds
        self._name = name
        self._restorer = Restorer(model, store, clock=clock, sliced_bytes=sliced_bytes)

    @property
    def store(self) -> PrefixStore | None:
        return self._store

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
        """Prefixed, Stored..., Picked(first) for each sample, Computed, whose Done has a ticket if decode workers can go
        on from here: as many as there are samples."""
        self.check(request)
        trace = self._trace(request)
        run, prompt, keys = self._begin(request, stop, trace)
        with self._running(run) as running:
            passage, logits = self._start(running, prompt, keys, logits=True)
            yield Prefixed(running.restored.report, trace.take())
            logits = yield from self._compute(passage, logits, prompt, run, wanted=True)
            assert logits is not None, "a prompt has at least one token to compute"
            tokens = [
                self._pick(logits, request, passage.position, sample) for sample in range(request.samples)
            ]
            for sample, token in enumerate(tokens):
                yield Picked(token, self._wire_logits(logits, request), first=True, sample=sample)
            handoff = None
            if request.max_new_tokens > 1:
                with trace.span("handoff", "compute"):
                    handoff = self._handoff(passage, request, running.restored, tokens)
            else:
                passage.finish()
        yield Computed(partial(self._done, run, trace, handoff))

    def decode(
        self, request: Request, *, stop: Stop, ticket: bytes = b"", first_token: int | None = None
    ) -> Generator[Event, None, None]:
        """Prefixed, Picked(first) unless `first_token` is given, Picked..., with Stored between, Computed; all for the
        request's own sample.

        With a ticket from the handoff; where that fails, or without one, as the store's plan says, or cold.
        """
        self.check(request, ticket=ticket, first_token=first_token)
        trace = self._trace(request)
        run, prompt, keys = self._begin(request, stop, trace)
        with self._running(run) as running:
            wanted = first_token is None
            passage, logits = self._start(
                running, prompt, keys, logits=wanted, ticket=ticket, first_token=first_token
            )
            yield Prefixed(running.restored.report, trace.take())
            logits = yield from self._compute(passage, logits, prompt, run, wanted=wanted)
            if first_token is None:
                assert logits is not None, (
                    "a prompt whose first token is wanted has at least one token to compute"
                )
                first_token = self._pick(logits, request, passage.position, request.sample)
                yield Picked(
                    first_token, self._wire_logits(logits, request), first=True, sample=request.sample
                )
            yield from self._generate(passage, prompt, run, first_token)
            passage.finish()
        yield Computed(partial(self._done, run, trace))

    # ---- steps -------------------------------------------------------------------------------------------------

    def _trace(self, request: Request) -> Trace:
        limit = SPANS_MAX // request.samples
        return Trace(self._clock, enabled=request.trace, process=self._name, limit=limit)

    def _begin(self, request: Request, stop: Stop, trace: Trace) -> tuple[StoreRun | None, Prompt, RunKeys]:
        bypassed = self._store is None or request.bypass_store
        block_tokens = self.model.profile.block_tokens
        with trace.span("keys", "compute"):
            if self._store is None or request.bypass_store:
                keys = RunKeys(_NO_ROOT, (), block_tokens=block_tokens)
            else:
                keys = RunKeys(self._store.root, request.tokens, block_tokens=block_tokens)
        run = None if self._writer is None or bypassed else self._writer.begin(trace)
        # The prompt's own: those of the output are added to the others.
        return run, Prompt(request, keys.joined, stop, trace), keys

    @contextmanager
    def _running(self, run: StoreRun | None) -> Iterator[_Running]:
        """Whatever way the body ends, nothing of it is left in the store: the flight ends when the run is stored or given
        up, the handoff that was taken is confirmed, a fetch under way is given up."""
        running = _Running(run)
        try:
            yield running
        finally:
            for restored in running.all:
                restored.close()
                if restored.take is not None and self._store is not None:
                    self._store.confirm(restored.take)
            if run is not None:
                run.complete(partial(self._end_flights, running.all))

    def _end_flights(self, restored: Iterable[Restored]) -> None:
        for each in restored:
            if each.flight is not None and self._store is not None:
                self._store.end_flight(each.flight)

    def _start(
        self,
        running: _Running,
        prompt: Prompt,
        keys: RunKeys,
        *,
        logits: bool,
        ticket: bytes = b"",
        first_token: int | None = None,
    ) -> tuple[Passage, torch.Tensor | None]:
        """A passage whose restored blocks are all there. Where they come by a feed, the first tile has been computed, and
        the logits are there if that was the prompt's last."""
        restored = running.add(self._restore(prompt, ticket=ticket, first_token=first_token))
        passage = Passage(self.model, restored, keys=keys, run=running.run)
        if restored.feed is None:
            return passage, None
        try:
            computed = self._first_tile(passage, prompt, restored.feed, logits=logits)
            restored.sequence.finish_feed()
        except STORE_FAILURES as error:
            restored.close()
            prompt.spent.fetch += restored.feed.fetch_seconds
            self._end_flights([restored])
            again = running.add(self._restorer.prompt(prompt, reason=describe(error), sliced=False))
            return Passage(self.model, again, keys=keys, run=running.run), None
        fetched = prompt.spent.fetch + restored.feed.fetch_seconds
        restored.report = replace(restored.report, fetch_seconds=fetched)
        return passage, computed

    def _first_tile(
        self, passage: Passage, prompt: Prompt, feed: SlicedFeed, *, logits: bool
    ) -> torch.Tensor | None:
        """Compute up to the first tile's end, which makes every layer take its entries from the feed."""
        start, count = passage.position, len(prompt.tokens)
        end = min(count, start // TILE * TILE + TILE)
        began, waited = self._clock.monotonic(), feed.wait_seconds
        with prompt.trace.span("first tile", "compute", tokens=end - start):
            computed = passage.extend(list(prompt.tokens[start:end]), logits=logits and end == count)
        # Nothing else tells what it costs to make numbers of the fetched bytes. A tile that is not filled has no price of its
        # own to be compared with.
        if self._store is not None and end % TILE == 0:
            tile = self._store.rates.compute_seconds(*self._work(start, end))
            spent = self._clock.monotonic() - began - (feed.wait_seconds - waited)
            if tile:
                size = feed.blocks * self.model.profile.block_bytes
                self._store.rates.loaded(bytes_loaded=size, seconds=max(spent - tile, 0.0))
        return computed

    def _restore(self, prompt: Prompt, *, ticket: bytes, first_token: int | None) -> Restored:
        prompt.stop.check()
        if self._store is None or prompt.request.bypass_store:
            return self._restorer.cold(len(prompt.tokens), save_states=SaveStates())
        reason = ""
        if ticket and first_token is not None:
            taken = self._restorer.handoff(prompt, ticket=ticket, first_token=first_token)
            if isinstance(taken, Restored):
                return taken
            reason = taken
        return self._restorer.prompt(prompt, reason=reason)

    def _compute(
        self,
        passage: Passage,
        last: torch.Tensor | None,
        prompt: Prompt,
        run: StoreRun | None,
        *,
        wanted: bool,
    ) -> Generator[Event, None, torch.Tensor | None]:
        """The rest of the prompt, a chunk at a time; the last token's logits, if wanted."""
        count, step = len(prompt.tokens), CHUNK_TILES * TILE
        reported = StoreReport()
        while passage.position < count:
            prompt.stop.check()
            start = passage.position
            # Cut at absolute multiples, so that no tile is computed in two halves.
            end = min(count, start // step * step + step)
            began = self._clock.monotonic()
            last = passage.extend(list(prompt.tokens[start:end]), logits=wanted and end == count)
            ended = self._clock.monotonic()
            prompt.trace.add(f"compute {start}..{end - 1}", "compute", began=began, ended=ended)
            self._note_speed(start, end, ended - began)
            if run is not None and (report := run.report) != reported:
                reported = report
                yield Stored(report)
        return last

    def _generate(
        self, passage: Passage, prompt: Prompt, run: StoreRun | None, token: int
    ) -> Iterator[Event]:
        """The tokens after the first; the last one is picked and not computed."""
        request, reported = prompt.request, StoreReport()
        for _ in range(request.max_new_tokens - 1):
            prompt.stop.check()
            with prompt.trace.span("decode", "compute", position=passage.position):
                logits = passage.extend([token], logits=True)
            assert logits is not None
            token = self._pick(logits, request, passage.position, request.sample)
            yield Picked(token, self._wire_logits(logits, request), first=False, sample=request.sample)
            if run is not None and (report := run.report) != reported:
                reported = report
                yield Stored(report)

    def _handoff(self, passage: Passage, request: Request, restored: Restored, tokens: list[int]) -> Handoff:
        save = restored.save_states
        note = Note(
            prompt_tokens=passage.position,
            prompt=prompt_digest(request.tokens),
            first_tokens=tuple(tokens),
            output_edge_pool=save.output_edge_pool,
            output_edge_ssd=save.output_edge_ssd,
            every_tokens=save.every_tokens,
            rows=save.rows,
            rows_overlap=save.rows_overlap,
        )
        sequence = passage.sequence
        return Handoff(
            passage.position,
            # The decode worker completes the open block, and gives its rows.
            sequence.state() + (sequence.open_rows() if save.rows else b""),
            encode_note(note),
            takes=request.samples,
            lineage=restored.report.lineage,
        )

    def _done(self, run: StoreRun | None, trace: Trace, handoff: Handoff | None = None) -> Done:
        """Leave the handoff, then wait until the run is stored or given up; without a store there is neither."""
        if self._store is None or run is None:
            return Done(StoreReport(), spans=trace.take())
        ticket = b""
        if handoff is not None:
            try:
                with trace.span("leave handoff", "writer", bytes=len(handoff.state)):
                    ticket = self._store.leave(
                        position=handoff.position,
                        payload=handoff.state,
                        note=handoff.note,
                        takes=handoff.takes,
                        lineage=handoff.lineage,
                    )
            except STORE_FAILURES as error:
                run.note_failure(f"no handoff: {describe(error)}")
        report = run.flush(seconds=self._flush_seconds)
        return Done(report, ticket, trace.take())

    # ---- small things ------------------------------------------------------------------------------------------

    def _pick(self, logits: torch.Tensor, request: Request, position: int, sample: int) -> int:
        seed = request.seed_of(sample)
        return pick(logits, seed=seed, temperature=request.temperature, position=position)

    def _wire_logits(self, logits: torch.Tensor, request: Request) -> bytes:
        if not request.return_logits:
            return b""
        return logits.reshape(-1).to("cpu", torch.float32).numpy().astype("<f4").tobytes()

    def _work(self, start: int, end: int) -> tuple[int, int]:
        """(Layer-tokens, index entries) of computing the positions [start, end)."""
        profile = self.model.profile
        return (end - start) * profile.layer_count, scanned(figures_of(profile), start, end)

    def _note_speed(self, start: int, end: int, seconds: float) -> None:
        """Less than a tile costs as much as a tile: it says nothing about the price of a token."""
        if self._store is not None and end - start >= TILE:
            layer_tokens, entries = self._work(start, end)
            self._store.rates.computed(layer_tokens=layer_tokens, index_entries=entries, seconds=seconds)


class _Running:
    """What one request has restored: the last one is what it goes on with, an earlier one failed half-way."""

    def __init__(self, run: StoreRun | None) -> None:
        self.run = run
        self.all: list[Restored] = []

    def add(self, restored: Restored) -> Restored:
        self.all.append(restored)
        return restored

    @property
    def restored(self) -> Restored:
        return self.all[-1]
