"""From the events of several workers to one stream of events, in which no token comes twice."""

from __future__ import annotations

from collections import deque
from functools import reduce

from kvstore.clock import Clock
from kvstore.v1 import worker_pb2 as pb
from kvstore_workers.runtime.values import StoreReport
from kvstore_workers.runtime.wire import from_stored, to_stored

_Event = pb.GenerateEvent


class TokensDiffer(Exception):
    """A second worker gave another token than the one that was sent already."""


class Leg:
    """What one call to one worker has given so far. `sample` None: a prefill worker's, which gives the first token of each."""

    def __init__(self, sample: int | None, *, has_first: bool) -> None:
        self.sample = sample
        self.has_first = has_first
        self.seen: dict[int, int] = {}
        self.report = StoreReport()


class Relay:
    """What has been sent to one caller, and with it what an event that comes now becomes. `new_tokens`: of each sample.

    For one thread at a time, but for `tokens_of` a thread's own sample, and `add_span`.
    """

    def __init__(self, clock: Clock, *, samples: int = 1, new_tokens: int) -> None:
        self._clock = clock
        self._began = clock.monotonic()
        self._new_tokens = new_tokens
        self._tokens: list[list[int]] = [[] for _ in range(samples)]
        self._legs: list[Leg] = []
        self._has_prefix = False
        self._spans: deque[pb.Span] = deque()
        self.ticket = b""
        self.model = b""

    def prefill(self) -> Leg:
        """A prefill worker's events come from here on."""
        return self._begin(Leg(None, has_first=False))

    def decode(self, sample: int) -> Leg:
        """A decode worker's events come from here on; it goes on from the sample's first token if there is one."""
        return self._begin(Leg(sample, has_first=bool(self._tokens[sample])))

    def tokens_of(self, sample: int) -> list[int]:
        return self._tokens[sample]

    @property
    def has_tokens(self) -> bool:
        return any(self._tokens)

    @property
    def lacking(self) -> list[int]:
        """The samples that are not complete."""
        return [sample for sample in range(len(self._tokens)) if self.lacks(sample)]

    def lacks(self, sample: int) -> bool:
        return len(self._tokens[sample]) < self._new_tokens

    def add_span(self, span: pb.Span) -> None:
        """Sent with the next STORED or DONE."""
        self._spans.append(span)

    def take(self, leg: Leg, event: _Event) -> _Event | None:
        """What the caller gets of a worker's event; None: nothing."""
        if event.kind in (_Event.FIRST_TOKEN, _Event.TOKEN):
            return self._token(leg, event)
        if event.kind == _Event.PREFIX:
            return self._prefix(event)
        leg.report = from_stored(event.stored)
        self._spans.extend(event.spans)
        if event.kind == _Event.DONE and leg.sample is not None:
            # There may be other samples; `done` is for the last of them.
            return None
        self.ticket = event.ticket or self.ticket
        return self._made(_Event.STORED)

    def done(self) -> _Event:
        """The end, with what all workers stored."""
        return self._made(_Event.DONE)

    def _begin(self, leg: Leg) -> Leg:
        self._legs.append(leg)
        return leg

    def _prefix(self, event: _Event) -> _Event | None:
        if not self.has_tokens:
            # Whoever picks the first token decides which model the others must have.
            self.model = event.model
        if self._has_prefix:
            self._spans.extend(event.spans)
            return None
        self._has_prefix = True
        passed = _Event()
        passed.CopyFrom(event)
        passed.at_seconds = self._clock.monotonic() - self._began
        return passed

    def _token(self, leg: Leg, event: _Event) -> _Event | None:
        sample = event.sample if leg.sample is None else leg.sample
        tokens = self._tokens[sample]
        place = leg.seen.get(sample, 0) + leg.has_first
        leg.seen[sample] = leg.seen.get(sample, 0) + 1
        if place < len(tokens):
            if tokens[place] != event.token:
                of = f" of sample {sample}" if len(self._tokens) > 1 else ""
                raise TokensDiffer(
                    f"token {place}{of} was sent as {tokens[place]}, and is {event.token} from a second worker"
                )
            return None
        tokens.append(event.token)
        passed = _Event()
        passed.CopyFrom(event)
        passed.sample = sample
        passed.at_seconds = self._clock.monotonic() - self._began
        return passed

    def _made(self, kind: _Event.Kind) -> _Event:
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        total = reduce(StoreReport.plus, (leg.report for leg in self._legs), StoreReport())
        at_seconds = self._clock.monotonic() - self._began
        return _Event(kind=kind, at_seconds=at_seconds, stored=to_stored(total), spans=spans)
