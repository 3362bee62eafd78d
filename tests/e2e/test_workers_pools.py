"""Several prefill and decode workers behind a gateway, as processes that are restarted, killed and given up on."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.clock import SystemClock
from kvstore.profile.registry import get_profile
from kvstore.v1 import worker_pb2 as pb
from kvstore.v1 import worker_pb2_grpc
from kvstore_client import CacheClient
from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.model import Model
from kvstore_workers.runtime.engine import Engine
from kvstore_workers.runtime.peer import words
from tests.support.peers import Peer, run_command
from tests.support.service import ServiceProcess
from tests.support.workers import decode, request_of, tokens_of

SECONDS = 120.0
GIVE_BACK_SECONDS = 25.0
"""Less than any deadline at which the store would take things back by itself."""
Event = pb.GenerateEvent


@cache
def _engine() -> Engine:
    """What a worker with the same seed computes, in this process."""
    model = Model.random(ModelConfig.for_profile(get_profile("tiny")), seed=0)
    return Engine(model, store=None, writer=None, clock=SystemClock())


@cache
def _cold(tokens: tuple[int, ...], new: int, seed: int | None = None) -> list[int]:
    sampling = {} if seed is None else {"temperature": 1.0, "seed": seed}
    return decode(_engine(), request_of(tokens, new, **sampling)).tokens


@dataclass
class Reply:
    """Events in order; tokens by sample."""

    events: list[Event] = field(default_factory=list)

    def tokens(self, sample: int = 0) -> list[int]:
        kinds = (Event.FIRST_TOKEN, Event.TOKEN)
        return [event.token for event in self.events if event.kind in kinds and event.sample == sample]

    @property
    def spans(self) -> list[pb.Span]:
        return [span for event in self.events for span in event.spans]

    @property
    def prefix(self) -> pb.PrefixReport:
        return self.events[0].prefix

    @property
    def stored(self) -> pb.StoreReport:
        return self.events[-1].stored


class Cluster:
    """Two workers of each role; threads fixed, so that all have the same numerics."""

    left_behind = 0.0

    def __init__(self, folder: Path) -> None:
        self.service = ServiceProcess(folder / "s")
        self.prefill = [self._worker(folder, "prefill", name) for name in ("p0", "p1")]
        self.decode = [self._worker(folder, "decode", name) for name in ("d0", "d1")]
        targets = [
            f"--{role}={peer.target}" for role in ("prefill", "decode") for peer in getattr(self, role)
        ]
        self.gateway = Peer(folder / "g.sock", "gateway", *targets)

    def _worker(self, folder: Path, role: str, name: str) -> Peer:
        return Peer(
            folder / f"{name}.sock",
            "worker",
            role,
            "--cache",
            str(folder / "s"),
            "--threads",
            "1",
            "--grace",
            "60",
        )

    @property
    def workers(self) -> list[Peer]:
        return [*self.prefill, *self.decode]

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            stack.enter_context(self.service)
            for peer in (*self.workers, self.gateway):
                stack.enter_context(peer)
            for peer in (*self.workers, self.gateway):
                peer.wait_ready()
            channel = stack.enter_context(grpc.insecure_channel(self.gateway.target))
            self.stub = worker_pb2_grpc.GatewayStub(channel)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.close()

    def call(self, tokens: tuple[int, ...], new: int, **changes: object) -> Iterator[Event]:
        request = pb.GenerateRequest(tokens=tokens, max_new_tokens=new, **changes)  # type: ignore[arg-type]
        call: Iterator[Event] = self.stub.Generate(request, timeout=SECONDS)
        return call

    def ask(self, tokens: tuple[int, ...], new: int, **changes: object) -> Reply:
        return Reply(list(self.call(tokens, new, **changes)))

    def describe(self, peer: Peer) -> pb.WorkerDescription:
        with grpc.insecure_channel(peer.target) as channel:
            return worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=SECONDS)

    def stats(self) -> dict[str, float]:
        with CacheClient(self.service.directory, owner="test") as client:
            return client.stats()

    def forget_what_is_left(self) -> None:
        """What handoffs hold now is not this test's."""
        self.left_behind = self.stats()["handoff_bytes"]

    def open_things(self) -> tuple[float, ...]:
        stats = self.stats()
        held = tuple(stats[name] for name in ("leases", "reservations", "flights", "handoff_takes_out"))
        # A prefill worker that was killed before it told its ticket leaves a handoff to its deadline.
        held = (*held, max(stats["handoff_bytes"] - self.left_behind, 0.0))
        return *held, *(self.describe(peer).requests_running for peer in self.workers)

    def all_given_back(self) -> bool:
        """Whether nothing is open any more within GIVE_BACK_SECONDS; every look is a call to all of them."""
        clock = SystemClock()
        deadline = clock.monotonic() + GIVE_BACK_SECONDS
        while any(self.open_things()):
            if clock.monotonic() > deadline:
                return False
        return True


@pytest.fixture(scope="module")
def running_cluster() -> Iterator[Cluster]:
    with TemporaryDirectory(prefix="kv-") as folder, Cluster(Path(folder)) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster) -> Cluster:
    running_cluster.forget_what_is_left()
    return running_cluster


PROMPTS = [tuple(tokens_of(180 + 40 * number, seed=700 + number)) for number in range(4)]
NEW = 12


@contextmanager
def _steady_requests(cluster: Cluster, threads: int = 2) -> Iterator[Counter[str]]:
    """Requests from several threads, one after another in each, all the while inside. What became of them is counted;
    on leaving the last ones have ended."""
    ended: Counter[str] = Counter()
    lock = threading.Lock()
    enough = threading.Event()

    def ask(number: int) -> None:
        turn = number
        while not enough.is_set():
            prompt = PROMPTS[turn % len(PROMPTS)]
            turn += 1
            try:
                reply = cluster.ask(prompt, NEW)
                outcome = "right" if reply.tokens() == _cold(prompt, NEW) else f"wrong {reply.tokens()}"
            except grpc.RpcError as error:
                outcome = words(error)
            with lock:
                ended[outcome] += 1
            # Workers that start beside them need the cores too.
            enough.wait(0.05)

    for prompt in PROMPTS:
        _cold(prompt, NEW)
    asking = [threading.Thread(target=ask, args=(number,)) for number in range(threads)]
    for thread in asking:
        thread.start()
    try:
        yield ended
    finally:
        enough.set()
        for thread in asking:
            thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in asking)


def test_workers_restarted_one_after_another_cost_no_request(cluster: Cluster) -> None:
    with _steady_requests(cluster) as ended:
        for peer in cluster.workers:
            assert peer.stop() == 0
            peer.start().wait_ready()
    assert set(ended) == {"right"}
    print(f"{ended.total()} requests during 4 restarts")


def test_workers_killed_one_after_another_cost_no_request(cluster: Cluster) -> None:
    with _steady_requests(cluster) as ended:
        for peer in (cluster.prefill[0], cluster.decode[0]):
            peer.kill()
            peer.start().wait_ready()
    assert set(ended) == {"right"}
    print(f"{ended.total()} requests during 2 kills")


def test_a_decode_worker_that_is_killed_is_replaced_by_one_that_takes_the_same_handoff(
    cluster: Cluster,
) -> None:
    prompt = tuple(tokens_of(400, seed=720))
    before = cluster.stats()
    call = cluster.call(prompt, 80)
    events = [next(call)]
    while sum(event.kind == Event.TOKEN for event in events) < 5:
        events.append(next(call))
    (peer,) = [peer for peer in cluster.decode if cluster.describe(peer).requests_running]
    peer.kill()
    try:
        events += list(call)
    finally:
        peer.start().wait_ready()
    assert Reply(events).tokens() == _cold(prompt, 80)
    after = cluster.stats()
    assert after["handoffs_returned_total"] - before["handoffs_returned_total"] == 1
    assert after["handoffs_confirmed_total"] - before["handoffs_confirmed_total"] == 1
    assert cluster.all_given_back()


def test_a_worker_that_hangs_is_passed_over(cluster: Cluster) -> None:
    hung = cluster.prefill[0]
    hung.signal(signal.SIGSTOP)
    try:
        for number in range(4):
            prompt = tuple(tokens_of(90, seed=730 + number))
            assert cluster.ask(prompt, 3).tokens() == _cold(prompt, 3)
    finally:
        hung.signal(signal.SIGCONT)
    assert cluster.all_given_back()


def test_a_caller_that_goes_before_every_sample_has_begun_leaves_no_handoff_behind(cluster: Cluster) -> None:
    prompt = tuple(tokens_of(400, seed=721))
    call = cluster.call(prompt, 3000, samples=16, sampling=pb.Sampling(temperature=1.0, seed=5))
    while next(call).kind != Event.TOKEN:
        pass
    call.cancel()  # type: ignore[attr-defined]
    assert cluster.all_given_back()


def _ask_until_refused(stub: worker_pb2_grpc.DecodeStub, asked: pb.DecodeRequest) -> None:
    """The worker may take some before its signal has come through; those are given up."""
    while True:
        call = stub.Run(asked, timeout=SECONDS)
        try:
            # Sent as soon as the worker has taken it.
            if not call.initial_metadata():
                list(call)
        finally:
            call.cancel()


def test_a_worker_that_is_told_to_end_says_so_and_finishes_what_it_has(cluster: Cluster) -> None:
    prompt = PROMPTS[0]
    call = cluster.call(prompt, 120)
    events = [next(call)]
    while sum(event.kind == Event.TOKEN for event in events) < 2:
        events.append(next(call))
    (peer,) = [peer for peer in cluster.decode if cluster.describe(peer).requests_running]
    peer.signal(signal.SIGTERM)
    with grpc.insecure_channel(peer.target) as channel:
        stub = worker_pb2_grpc.DecodeStub(channel)
        asked = pb.DecodeRequest(request=pb.GenerateRequest(tokens=[1], max_new_tokens=1))
        with pytest.raises(grpc.RpcError, match="this worker is shutting down"):
            _ask_until_refused(stub, asked)
        said = worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=SECONDS)
        assert said.draining
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
    events += list(call)
    assert Reply(events).tokens() == _cold(prompt, 120)
    assert peer.wait() == 0
    peer.start().wait_ready()


def test_a_request_that_takes_longer_than_the_grace_is_ended_and_the_worker_ends_in_order() -> None:
    with TemporaryDirectory(prefix="kv-") as folder:
        args = ("worker", "decode", "--threads", "1", "--grace", "0.2")
        with Peer(Path(folder) / "d.sock", *args) as peer, grpc.insecure_channel(peer.target) as channel:
            peer.wait_ready()
            asked = pb.DecodeRequest(request=pb.GenerateRequest(tokens=[1], max_new_tokens=60_000))
            call = worker_pb2_grpc.DecodeStub(channel).Run(asked, timeout=SECONDS)
            next(call)
            peer.signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError, match=r"CANCELLED|UNAVAILABLE"):
                list(call)
            assert peer.wait() == 0
            assert "1 requests were not done within 0.2 s and are ended" in peer.log


def test_samples_are_drawn_from_one_prefill_on_several_workers(cluster: Cluster) -> None:
    prompt = tuple(tokens_of(300, seed=710))
    reply = cluster.ask(prompt, 10, samples=4, sampling=pb.Sampling(temperature=1.0, seed=5), trace=True)
    for sample in range(4):
        assert reply.tokens(sample) == _cold(prompt, 10, 5 + sample)
    assert len({tuple(reply.tokens(sample)) for sample in range(4)}) > 1
    kinds = Counter(event.kind for event in reply.events)
    assert (kinds[Event.PREFIX], kinds[Event.FIRST_TOKEN], kinds[Event.DONE]) == (1, 4, 1)
    assert (reply.events[0].kind, reply.events[-1].kind) == (Event.PREFIX, Event.DONE)
    calls = [span for span in reply.spans if span.track.startswith("gateway")]
    assert Counter(span.name for span in calls if not span.name.startswith("wait")) == {
        "prefill": 1,
        "decode": 4,
    }
    assert {span.detail["worker"] for span in calls if span.name == "decode"} == {
        peer.target for peer in cluster.decode
    }
    workers = {span.track.partition(":")[0] for span in reply.spans if span not in calls}
    assert Counter(worker.split()[0] for worker in workers) == {"prefill": 1, "decode": 2}
    assert reply.stored.blocks_stored == 9
    assert cluster.all_given_back()


def test_samples_without_a_store_are_the_same(cluster: Cluster) -> None:
    prompt = tuple(tokens_of(150, seed=711))
    sampling = pb.Sampling(temperature=1.0, seed=2**64 - 2)
    reply = cluster.ask(prompt, 4, samples=3, sampling=sampling, bypass_store=True)
    for sample in range(3):
        assert reply.tokens(sample) == _cold(prompt, 4, (2**64 - 2 + sample) % 2**64)
    assert sum(event.kind == Event.PREFIX for event in reply.events) == 1


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("samples", [2, 16])
def test_short_samples(cluster: Cluster, samples: int, new: int) -> None:
    prompt = tuple(tokens_of(64, seed=712))
    reply = cluster.ask(prompt, new, samples=samples, sampling=pb.Sampling(temperature=1.0, seed=9))
    assert [reply.tokens(sample) for sample in range(samples)] == [
        _cold(prompt, new, 9 + sample) for sample in range(samples)
    ]


def test_more_samples_than_allowed_are_refused_by_name(cluster: Cluster) -> None:
    with pytest.raises(grpc.RpcError, match="samples=17; allowed: 1 to 16"):
        cluster.ask((1, 2, 3), 1, samples=17)
    with pytest.raises(grpc.RpcError, match="exactness=7; allowed: unspecified, EXACT, BOUNDED"):
        cluster.ask((1, 2, 3), 1, exactness=7)


def test_a_sample_s_worker_that_is_killed_is_replaced_and_no_token_comes_twice(cluster: Cluster) -> None:
    prompt = tuple(tokens_of(100, seed=713))
    call = cluster.call(prompt, 60, samples=4, sampling=pb.Sampling(temperature=1.0, seed=1))
    events = [next(call)]
    while sum(event.kind == Event.TOKEN for event in events) < 24:
        events.append(next(call))
    cluster.decode[0].kill()
    try:
        reply = Reply(events + list(call))
    finally:
        cluster.decode[0].start().wait_ready()
    for sample in range(4):
        assert reply.tokens(sample) == _cold(prompt, 60, 1 + sample)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("until", [0, Event.PREFIX, Event.FIRST_TOKEN, Event.TOKEN])
def test_a_caller_that_goes_at_any_stage_leaves_nothing_behind(
    cluster: Cluster, samples: int, until: int
) -> None:
    prompt = tuple(tokens_of(3000, seed=720 + until))
    call = cluster.call(prompt, 2000, samples=samples)
    if until:
        for event in call:
            if event.kind == until:
                break
    call.cancel()  # type: ignore[attr-defined]
    assert cluster.all_given_back()
    assert cluster.ask(prompt[:64], 2).tokens() == _cold(prompt[:64], 2)


def test_a_prompt_s_next_turn_goes_to_the_worker_that_had_it(cluster: Cluster) -> None:
    used = []
    for turn in range(1, 5):
        prompt = tuple(tokens_of(300 * turn, seed=730))
        reply = cluster.ask(prompt, 2, trace=True)
        used += [span.detail["worker"] for span in reply.spans if span.name == "prefill"]
    assert len(used) == 4
    assert len(set(used)) == 1


def test_all_decode_workers_away_is_a_refusal_that_names_them(cluster: Cluster) -> None:
    for peer in cluster.decode:
        peer.kill()
    try:
        with pytest.raises(grpc.RpcError, match="no decode worker could do it") as refused:
            cluster.ask(PROMPTS[0], 3)
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert all(peer.target in refused.value.details() for peer in cluster.decode)
    finally:
        for peer in cluster.decode:
            peer.start()
        for peer in cluster.decode:
            peer.wait_ready()
    assert cluster.ask(PROMPTS[1], 3).tokens() == _cold(PROMPTS[1], 3)


@pytest.mark.parametrize(
    ("args", "code", "words_"),
    [
        (
            ("--prefill", "unix:/p", "--decode", "unix:/d", "--prefill", "unix:/p"),
            1,
            "the same worker twice; --prefill=/p",
        ),
        (("--prefill", "unix:/p", "--decode", "unix:/d", "--decode", "tcp:1"), 1, "--decode=tcp:1"),
        (("--prefill", "unix:/p"), 2, "--decode"),
        (
            ("--prefill", "unix:/p", "--decode", "unix:/d", "--queue-seconds", "nan"),
            2,
            "nan: not a number of seconds",
        ),
        (
            ("--prefill", "unix:/p", "--decode", "unix:/d", "--per-worker", "0"),
            2,
            "0: not a whole number from 1",
        ),
    ],
)
def test_a_gateway_s_bad_options_are_refused_by_name(args: tuple[str, ...], code: int, words_: str) -> None:
    ended = run_command("gateway", "--listen", "unix:w", *args)
    assert ended.returncode == code
    assert words_ in ended.stderr
