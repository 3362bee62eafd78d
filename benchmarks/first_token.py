"""First token of one prompt by every way back, against what the plan predicted, and what storing costs a cold prompt.

    python -m benchmarks.first_token --profile flash-slim --prompt 4096 --pairs 15 --json FILE

A service of its own on a temporary directory, and a prefill worker's engine in this process (one torch thread). Each pair is a
new random prompt; all ways of a pair run one after the other, in an order that turns with the pair. The time of a first
token is from the request's arrival in the engine until it is picked; the prediction is the plan's own, made with the
rates that this engine had measured until then.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.bench.pairs import spread
from kvstore.cli.output import table
from kvstore.clock import SystemClock
from kvstore.plan.figures import figures_of
from kvstore.plan.work import scanned
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.profile.registry import get_profile
from kvstore.types import StateSource
from kvstore_client import CacheClient, Costs
from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.model import Model
from kvstore_workers.model.rates import measure_rates
from kvstore_workers.model.selfcheck import numerics, self_check
from kvstore_workers.model.sequence import Sequence
from kvstore_workers.runtime.engine import Engine
from kvstore_workers.runtime.rates import Rates
from kvstore_workers.runtime.stop import Stop
from kvstore_workers.runtime.store import PrefixStore
from kvstore_workers.runtime.values import Computed, Picked, Prefixed, PrefixReport, Request
from kvstore_workers.runtime.writer import Writer

CLOCK = SystemClock()
START_SECONDS = 30.0


class Rectangular(Model):
    """Replays every layer at all tokens, as if no layer could begin later than the first."""

    def restore(self, **options: Any) -> Sequence:
        return super().restore(**options, triangular=False)


@contextmanager
def service(directory: Path, prompt_tokens: int, disk: int) -> Iterator[None]:
    arguments = ["serve", "--dir", str(directory), "--disk", str(disk), "--prompt-tokens", str(prompt_tokens)]
    with (directory.parent / "service.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "kvstore.cli.main", *arguments], stderr=log)
    try:
        with grpc.insecure_channel(f"unix:{directory / 'kvstore.sock'}") as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=START_SECONDS, wait_for_ready=True
            )
            next(reply for reply in watch if reply.status == health_pb2.HealthCheckResponse.SERVING)
        yield
    finally:
        process.terminate()
        process.wait(START_SECONDS)


class Bench:
    """Engines that share one writer, one namespace and one set of rates: the usual one and one that replays rectangles."""

    def __init__(self, client: CacheClient, model: Model, rectangular: Model) -> None:
        self.client = client
        self.rates = Rates()
        measured = measure_rates(model)
        self.rates.prime(
            layer_token=measured.seconds_per_layer_token,
            index_entry=measured.seconds_per_index_entry,
            spread=measured.density_spread,
        )
        identity = NamespaceIdentity(
            model.profile, weights_revision=model.weights_revision, numerics=numerics(model)
        )
        store = PrefixStore(client, identity, name="bench", clock=CLOCK, rates=self.rates)
        self.writer = Writer(store)
        self.engine = Engine(model, store=store, writer=self.writer, clock=CLOCK)
        # Fetches everything before it runs anything.
        self.whole = Engine(model, store=store, writer=self.writer, clock=CLOCK, sliced_bytes=1 << 60)
        self.rectangular = Engine(rectangular, store=store, writer=self.writer, clock=CLOCK)
        self.profile = model.profile
        store.open()
        self.namespace = store.namespace

    def ask(
        self, tokens: list[int], *, engine: Engine | None = None, bypass: bool = False
    ) -> tuple[float, PrefixReport]:
        """(Seconds to the first token, the report); returns when all is stored."""
        began = CLOCK.monotonic()
        first, report = 0.0, None
        request = Request(tokens=tokens, max_new_tokens=1, bypass_store=bypass)
        for event in (engine or self.engine).prefill(request, stop=Stop()):
            if isinstance(event, Picked):
                first = CLOCK.monotonic() - began
            elif isinstance(event, Prefixed):
                report = event.report
            elif isinstance(event, Computed):
                done = event.done()
                if done.report.failure:
                    raise RuntimeError(f"not all was stored: {done.report.failure}")
        assert report is not None
        return first, report

    def rectangle_seconds(self, report: PrefixReport, costs: Costs) -> float:
        """What the plan's own prices say about the same resume with every layer replayed at all its tokens."""
        start = report.restored_tokens - report.replayed_tokens
        entries = scanned(figures_of(self.profile), start, report.prompt_tokens)
        work = (report.replayed_tokens + report.computed_tokens) * self.profile.layer_count
        compute = work * costs.seconds_per_layer_token + entries * costs.seconds_per_index_entry
        return compute + report.bytes_ssd * costs.seconds_per_ssd_byte + costs.seconds_per_fetch


def run_pair(bench: Bench, tokens: list[int], turn: int, note: Callable[[str, float, float], None]) -> None:
    """Every way once. The namespace is empty before and after."""
    client, namespace = bench.client, bench.namespace

    def expect(report: PrefixReport, source: StateSource) -> None:
        if report.state_source is not source:
            raise RuntimeError(f"the plan took {report.state_source}, this step is for {source}")

    def bypassed() -> None:
        first, _ = bench.ask(tokens, bypass=True)
        note("no store", first, 0.0)

    def stored() -> None:
        first, report = bench.ask(tokens)
        expect(report, StateSource.NONE)
        note("cold, stored", first, report.expected_seconds)

    client.set_policy(namespace, "endpoints")
    for step in (bypassed, stored) if turn % 2 == 0 else (stored, bypassed):
        step()
    pooled = [("POOL", bench.engine), ("POOL, whole blocks first", bench.whole)]
    for name, engine in pooled[:: 1 - 2 * (turn % 2)]:
        first, report = bench.ask(tokens, engine=engine)
        expect(report, StateSource.POOL)
        note(name, first, report.expected_seconds)
    client.drop_states(namespace, "pool")
    first, report = bench.ask(tokens)
    expect(report, StateSource.CHECKPOINT)
    note("CHECKPOINT", first, report.expected_seconds)
    replays = [("REPLAY, triangle", bench.engine), ("REPLAY, rectangle", bench.rectangular)]
    for name, engine in replays[:: 1 - 2 * (turn % 2)]:
        client.drop_states(namespace, "both")
        costs = bench.rates.costs()
        first, report = bench.ask(tokens, engine=engine)
        expect(report, StateSource.REPLAY)
        expected = report.expected_seconds
        note(name, first, expected if engine is bench.engine else bench.rectangle_seconds(report, costs))
    for policy in ("full", "full+overlap"):
        client.clear(namespace)
        client.set_policy(namespace, policy)
        first, report = bench.ask(tokens)
        expect(report, StateSource.NONE)
        note(f"cold, stored with {policy}", first, report.expected_seconds)
        client.drop_states(namespace, "pool")
        first, report = bench.ask(tokens)
        expect(report, StateSource.ROWS)
        note(f"ROWS, {policy}", first, report.expected_seconds)
    client.clear(namespace)


def summary(seen: dict[str, list[tuple[float, float]]], prompt: int) -> dict[str, Any]:
    ways: dict[str, Any] = {}
    base = [seconds for seconds, _ in seen["no store"]]
    for name, values in seen.items():
        seconds = [value for value, _ in values]
        way: dict[str, Any] = {
            "first_token_seconds": statistics.median(seconds),
            "of_no_store": spread([s / b for s, b in zip(seconds, base, strict=True)]).as_json(),
            "samples": values,
        }
        if name != "no store":
            way["predicted_over_measured"] = spread([p / s for s, p in values]).as_json()
        ways[name] = way
    overhead = ways["cold, stored"]["of_no_store"]
    return {
        "storing_overhead": overhead["median"] - 1.0,
        "storing_overhead_high": overhead["high"] - 1.0,
        "tokens_per_second": prompt / ways["no store"]["first_token_seconds"],
        "ways": ways,
    }


def text(result: dict[str, Any]) -> str:
    def shown(value: dict[str, float] | None) -> str:
        return "" if value is None else f"{value['median']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"

    rows = [
        (
            name,
            f"{way['first_token_seconds']:.3f} s",
            shown(way["of_no_store"]),
            shown(way.get("predicted_over_measured")),
        )
        for name, way in result["ways"].items()
    ]
    return table(rows, head=("way", "first token", "of no store", "predicted / measured"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="flash-slim", choices=("tiny", "flash-slim"))
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = ModelConfig.for_profile(get_profile(args.profile))
    model = Model.random(config, seed=args.seed)
    check = self_check(model)
    if not check.bit_equal:
        raise RuntimeError(f"the self-check failed: {check.details}")
    rectangular = Rectangular.random(config, seed=args.seed)
    rectangular.decode_tile = model.decode_tile
    chance = random.Random(args.seed)
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    profile = model.profile
    disk = max(4 << 30, 8 * args.prompt * profile.rows_overlap_block_bytes // profile.block_tokens)
    with tempfile.TemporaryDirectory(prefix="kvbench-") as home:
        directory = Path(home) / "cache"
        directory.mkdir(mode=0o700)
        with service(directory, args.prompt, disk), CacheClient(directory, owner="bench") as client:
            bench = Bench(client, model, rectangular)
            warm = [chance.randrange(config.vocab_size) for _ in range(args.prompt)]
            bench.ask(warm)
            bench.ask(warm)
            client.clear(bench.namespace)
            for turn in range(args.pairs):
                tokens = [chance.randrange(config.vocab_size) for _ in range(args.prompt)]

                def note(name: str, seconds: float, predicted: float) -> None:
                    seen[name].append((seconds, predicted))

                run_pair(bench, tokens, turn, note)
                print(f"pair {turn + 1} of {args.pairs}", file=sys.stderr, flush=True)
            if not bench.writer.close(seconds=30.0):
                raise RuntimeError("the writer did not end")
    result = {
        "profile": args.profile,
        "prompt_tokens": args.prompt,
        "pairs": args.pairs,
        "seed": args.seed,
        "decode_tile": check.decode_tile,
        **summary(seen, args.prompt),
    }
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    print(text(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
