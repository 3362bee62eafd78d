"""One agent session, turn by turn: ask with the store, ask without it, compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import grpc
import numpy as np

from kvstore.clock import Clock, SystemClock
from kvstore.errors import KvstoreError
from kvstore.v1 import cache_pb2, worker_pb2, worker_pb2_grpc
from kvstore_client import CacheClient
from kvstore_workers.demo.material import excerpts
from kvstore_workers.demo.processes import Cluster, open_channel
from kvstore_workers.demo.script import Before, Turn
from kvstore_workers.demo.tokenizer import Mark, decode, encode

CALL_SECONDS = 150.0
CALL_SECONDS_PER_TOKEN = 0.05
"""Of the prompt: the run without a store computes all of it, on a machine that may be busy."""

_Event = worker_pb2.GenerateEvent


@dataclass
class Answer:
    """What one request gave. `ttft_s` is seen from the caller, from the call to the first token."""

    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    ttft_s: float = math.nan
    prefix: worker_pb2.PrefixReport = field(default_factory=worker_pb2.PrefixReport)
    blocks_stored: int = 0
    blocks_failed: int = 0
    spans: list[worker_pb2.Span] = field(default_factory=list)


@dataclass(frozen=True)
class TurnResult:
    turn: Turn
    prompt_tokens: int
    answer: Answer
    cold: Answer
    killed: bool

    @property
    def killed_during_store(self) -> bool:
        """Some blocks of this turn were acknowledged before the kill, and some failed after it."""
        return self.killed and self.answer.blocks_stored > 0 and self.answer.blocks_failed > 0

    @property
    def identical(self) -> bool:
        return self.answer.tokens == self.cold.tokens

    @property
    def max_logit_difference(self) -> float:
        """Over every number of every generated token; infinite where one side has a token more."""
        if len(self.answer.logits) != len(self.cold.logits) or not self.answer.logits:
            return math.inf
        gaps = [
            float(np.max(np.abs(a - b))) for a, b in zip(self.answer.logits, self.cold.logits, strict=True)
        ]
        return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps)

    @property
    def state_source(self) -> str:
        return str(cache_pb2.StateSource.Name(self.answer.prefix.state_source))

    @property
    def text(self) -> str:
        return decode(self.answer.tokens)


class Session:
    """Holds the conversation so far. Every turn adds a question, a piece of a file, and the answer."""

    def __init__(
        self,
        cluster: Cluster,
        files: list[Path],
        *,
        turn_tokens: int,
        answer_tokens: int,
        seed: int,
        shot_tokens: int = 0,
        trace: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """`shot_tokens`: the least that a turn reads in which the service is killed while it stores. `trace`: collect the
        workers' spans."""
        self._cluster = cluster
        self._shot_tokens = shot_tokens
        self._trace = trace
        self._clock = clock or SystemClock()
        self._material = excerpts(files, length=turn_tokens)
        self._answer_tokens = answer_tokens
        self._seed = seed
        self._history: list[int] = [
            Mark.SESSION,
            *encode("You are a careful engineer. Read what the tools return."),
        ]
        self._gateway = open_channel(cluster.address("gateway"))
        self._reference = open_channel(cluster.address("reference"))

    def close(self) -> None:
        self._gateway.close()
        self._reference.close()

    def play(self, turn: Turn) -> TurnResult:
        wall, began = self._clock.wall(), self._clock.monotonic()
        self._prepare(turn.before)
        name, content = next(self._material)
        while turn.kill_during_store and len(content) < self._shot_tokens:
            content += next(self._material)[1]
        self._history += [
            Mark.USER,
            *encode(f"Turn {turn.number}: read {name} and say what matters."),
            Mark.TOOL,
        ]
        self._history += [*content, Mark.ASSISTANT]
        request = worker_pb2.GenerateRequest(
            tokens=self._history,
            max_new_tokens=self._answer_tokens,
            return_logits=True,
            sampling=worker_pb2.Sampling(temperature=0.8, seed=self._seed + turn.number),
            trace=self._trace,
        )
        answer, killed = self._ask(request, kill_during_store=turn.kill_during_store)
        if killed:
            self._cluster.restart_service()
        cold = self._collect(self._ask_reference(request))
        result = TurnResult(turn, len(self._history), answer, cold, killed)
        took = self._clock.monotonic() - began
        what = {"before": str(turn.before)} if turn.before else {}
        what |= {"service": "killed -9 while it stored"} if killed else {}
        answer.spans.append(
            worker_pb2.Span(
                name=f"turn {turn.number}", track="session", start_seconds=wall, seconds=took, detail=what
            )
        )
        self._history += [*answer.tokens, Mark.END]
        return result

    def _prepare(self, before: Before) -> None:
        if before is Before.KILL:
            self._cluster.kill_service()
            self._cluster.restart_service()
        elif before is Before.FULL_POLICY:
            with CacheClient(self._cluster.cache, owner="demo") as client:
                for namespace in client.namespaces():
                    client.set_policy(namespace.digest, "full")
        elif before is not Before.NOTHING:
            tier: Literal["pool", "both"] = "pool" if before is Before.EMPTY_POOL else "both"
            with CacheClient(self._cluster.cache, owner="demo") as client:
                _, kept = client.drop_states(tier=tier)
            if kept:
                raise KvstoreError(f"{kept} window states are still leased between two turns; none should be")

    def _ask(self, request: worker_pb2.GenerateRequest, *, kill_during_store: bool) -> tuple[Answer, bool]:
        stub = worker_pb2_grpc.GatewayStub(self._gateway)
        events = stub.Generate(request, timeout=_call_seconds(request))
        shot = _Shot(self._cluster.kill_service) if kill_during_store else None
        answer = self._collect(shot.watch(events) if shot else events)
        return answer, shot is not None and shot.fired

    def _ask_reference(self, request: worker_pb2.GenerateRequest) -> Iterator[_Event]:
        stub = worker_pb2_grpc.DecodeStub(self._reference)
        events: Iterator[_Event] = stub.Run(
            worker_pb2.DecodeRequest(request=request), timeout=_call_seconds(request)
        )
        return events

    def _collect(self, events: Iterable[_Event]) -> Answer:
        answer = Answer()
        begun = self._clock.monotonic()
        try:
            for event in events:
                answer.spans.extend(event.spans)
                if event.kind in (_Event.FIRST_TOKEN, _Event.TOKEN):
                    if math.isnan(answer.ttft_s):
                        answer.ttft_s = self._clock.monotonic() - begun
                    answer.tokens.append(event.token)
                    answer.logits.append(np.frombuffer(event.logits, dtype="<f4"))
                elif event.kind == _Event.PREFIX and not answer.prefix.prompt_tokens:
                    # The decode worker reports its own way in as well; the prompt's story is the first one.
                    answer.prefix.CopyFrom(event.prefix)
                elif event.kind == _Event.STORED:
                    # Each report counts its worker's whole request so far; the largest is the last of its worker.
                    answer.blocks_stored = max(answer.blocks_stored, event.stored.blocks_stored)
                    answer.blocks_failed = max(answer.blocks_failed, event.stored.blocks_failed)
        except grpc.RpcError as error:
            raise KvstoreError(
                f"a request failed, and none may: {error.code()}: {error.details()}"
            ) from error
        return answer


def _call_seconds(request: worker_pb2.GenerateRequest) -> float:
    return CALL_SECONDS + CALL_SECONDS_PER_TOKEN * len(request.tokens)


class _Shot:
    """Kills the service at the first sign that the turn's blocks are being stored."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill
        self.fired = False

    def watch(self, events: Iterable[_Event]) -> Iterator[_Event]:
        for event in events:
            if not self.fired and event.kind == _Event.STORED and event.stored.blocks_stored:
                self._kill()
                self.fired = True
            yield event
