"""A service, a prefill worker, a decode worker and a gateway as real processes."""

from __future__ import annotations

import ctypes
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvstore.clock import SystemClock
from kvstore.profile.registry import get_profile
from kvstore.v1 import cache_pb2, worker_pb2_grpc
from kvstore.v1 import worker_pb2 as pb
from kvstore_client import CacheClient
from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.model import Model
from kvstore_workers.runtime.engine import Engine
from tests.support.checkpoints import write_checkpoint
from tests.support.peers import Peer, run_command
from tests.support.service import ServiceProcess
from tests.support.workers import decode, request_of, tokens_of

B = 32
SECONDS = 60.0
Event = pb.GenerateEvent


@dataclass
class Reply:
    kinds: list[Event.Kind] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    prefix: pb.PrefixReport = field(default_factory=pb.PrefixReport)
    stored: pb.StoreReport = field(default_factory=pb.StoreReport)

    @property
    def same(self) -> tuple[list[int], list[bytes]]:
        return self.tokens, self.logits


@cache
def _engine() -> Engine:
    """What a worker with the same seed computes, in this process."""
    model = Model.random(ModelConfig.for_profile(get_profile("tiny")), seed=0)
    return Engine(model, store=None, writer=None, clock=SystemClock())


def _cold(tokens: list[int], new: int) -> list[int]:
    return decode(_engine(), request_of(tokens, new)).tokens


class Cluster:
    """Everything below one short directory; threads fixed, so that both workers have the same numerics."""

    def __init__(self, folder: Path) -> None:
        self.service = ServiceProcess(folder / "s")
        cache_dir = str(folder / "s")
        self.prefill = Peer(folder / "p.sock", "worker", "prefill", "--cache", cache_dir, "--threads", "1")
        self.decode = Peer(folder / "d.sock", "worker", "decode", "--cache", cache_dir, "--threads", "1")
        self.gateway = Peer(
            folder / "g.sock", "gateway", "--prefill", self.prefill.target, "--decode", self.decode.target
        )

    @property
    def stub(self) -> worker_pb2_grpc.GatewayStub:
        return worker_pb2_grpc.GatewayStub(self._channel(self.gateway))

    def _channel(self, peer: Peer) -> grpc.Channel:
        return self._stack.enter_context(
            grpc.insecure_channel(peer.target, options=[("grpc.use_local_subchannel_pool", 1)])
        )

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            stack.enter_context(self.service)
            for peer in (self.prefill, self.decode, self.gateway):
                stack.enter_context(peer)
            for peer in (self.prefill, self.decode, self.gateway):
                peer.wait_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *args: object) -> None:
        self._stack.close()

    def ask(self, tokens: list[int], new: int = 6, **changes: object) -> Reply:
        request = pb.GenerateRequest(tokens=tokens, max_new_tokens=new, return_logits=True, **changes)  # type: ignore[arg-type]
        return collect(self.stub.Generate(request, timeout=SECONDS))

    def stats(self) -> dict[str, float]:
        with CacheClient(self.service.directory, owner="test") as client:
            return client.stats()

    def open_things(self) -> tuple[float, ...]:
        stats = self.stats()
        return stats["leases"], stats["reservations"], stats["handoff_takes_out"]


def collect(events: Iterator[Event]) -> Reply:
    reply = Reply()
    for event in events:
        reply.kinds.append(event.kind)
        if event.kind == Event.PREFIX:
            reply.prefix = event.prefix
        elif event.kind in (Event.FIRST_TOKEN, Event.TOKEN):
            reply.tokens.append(event.token)
            reply.logits.append(event.logits)
        else:
            reply.stored = event.stored
    steps = [kind for kind in reply.kinds if kind != Event.STORED]
    assert steps == [Event.PREFIX, Event.FIRST_TOKEN, *[Event.TOKEN] * (len(reply.tokens) - 1), Event.DONE], (
        steps
    )
    return reply


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with TemporaryDirectory(prefix="kv-") as folder, Cluster(Path(folder)) as cluster:
        yield cluster


def test_a_second_turn_is_restored_and_every_token_is_that_of_a_cold_run(cluster: Cluster) -> None:
    history = tokens_of(2000, seed=41)
    first = cluster.ask(history)
    assert first.tokens == _cold(history, 6)
    assert first.stored.failure == ""
    assert first.stored.blocks_stored == 62
    history += first.tokens + tokens_of(40, seed=42)
    second = cluster.ask(history)
    assert second.tokens == _cold(history, 6)
    assert second.prefix.restored_tokens == 1984
    assert second.prefix.state_source == cache_pb2.POOL
    assert second.same == cluster.ask(history, bypass_store=True).same
    assert cluster.open_things() == (0, 0, 0)


@pytest.mark.parametrize("count", [1, 32, 50])
@pytest.mark.parametrize("new", [1, 2, 20])
def test_short_prompts_through_the_gateway(cluster: Cluster, count: int, new: int) -> None:
    prompt = tokens_of(count, seed=300 + count)
    for _ in range(2):
        assert cluster.ask(prompt, new).tokens == _cold(prompt, new)


def test_every_worker_says_what_it_is(cluster: Cluster) -> None:
    for role, peer in (("prefill", cluster.prefill), ("decode", cluster.decode)):
        with grpc.insecure_channel(peer.target) as channel:
            said = worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest(), timeout=SECONDS)
            health = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="kvstore.v1.Worker"), timeout=SECONDS
            )
            services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert (said.role, said.profile.name, said.bit_equal, said.vocabulary) == (role, "tiny", True, 320)
        assert len(said.namespace) == 32
        assert "threads=1" in said.numerics
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        assert {f"kvstore.v1.{role.capitalize()}", "kvstore.v1.Worker", "grpc.health.v1.Health"} <= set(
            services
        )
        assert peer.socket.stat().st_mode & 0o777 == 0o600
        assert "self-check passed" in peer.log


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (pb.GenerateRequest(max_new_tokens=1), "empty prompt"),
        (pb.GenerateRequest(tokens=[1, 2, 320], max_new_tokens=1), r"tokens\[2\]=320; allowed: 0 to 319"),
        (
            pb.GenerateRequest(tokens=[1, 2, 2**32 - 1], max_new_tokens=1, bypass_store=True),
            r"tokens\[2\]=4294967295",
        ),
        (pb.GenerateRequest(tokens=[1]), "max_new_tokens=0"),
        (pb.GenerateRequest(tokens=[1], max_new_tokens=65_537), "max_new_tokens=65537"),
        (
            pb.GenerateRequest(tokens=[1], max_new_tokens=1, sampling=pb.Sampling(temperature=1.0)),
            "sampling.seed",
        ),
        (
            pb.GenerateRequest(
                tokens=[1], max_new_tokens=1, sampling=pb.Sampling(temperature=float("nan"), seed=1)
            ),
            "temperature",
        ),
    ],
)
def test_a_wrong_request_is_refused_by_name(
    cluster: Cluster, request_: pb.GenerateRequest, words: str
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as refused:
        list(cluster.stub.Generate(request_, timeout=SECONDS))
    error = refused.value
    assert isinstance(error, grpc.Call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ("kvstore-error", "INVALID_ARGUMENT") in [tuple(entry) for entry in error.trailing_metadata()]


def test_a_bad_ticket_is_refused_by_name(cluster: Cluster) -> None:
    request = pb.GenerateRequest(tokens=[1], max_new_tokens=2)
    with grpc.insecure_channel(cluster.decode.target) as channel:
        stub = worker_pb2_grpc.DecodeStub(channel)
        for asked, words in (
            (pb.DecodeRequest(), "nothing to decode"),
            (pb.DecodeRequest(request=request, ticket=b"x", first_token=1), "not a ticket"),
            (pb.DecodeRequest(request=request, ticket=bytes(16)), "first_token"),
            (pb.DecodeRequest(request=request, first_token=320), "first_token=320"),
        ):
            with pytest.raises(grpc.RpcError, match=words):
                list(stub.Run(asked, timeout=SECONDS))


@pytest.mark.parametrize("events", [1, 2, 4, 10])
def test_a_cancelled_request_gives_everything_back_and_frees_its_worker(
    cluster: Cluster, events: int
) -> None:
    prompt = tokens_of(3000, seed=500 + events)
    call = cluster.stub.Generate(pb.GenerateRequest(tokens=prompt, max_new_tokens=5000), timeout=SECONDS)
    for _ in range(events):
        next(call)
    call.cancel()
    # Each worker runs one request at a time: that this one ends within its deadline shows that the other has ended.
    assert cluster.ask(prompt[:100], 2).tokens == _cold(prompt[:100], 2)
    assert cluster.open_things() == (0, 0, 0)


def test_a_killed_prefill_worker_is_replaced_by_the_decode_worker(cluster: Cluster) -> None:
    prompt = tokens_of(500, seed=43)
    cluster.prefill.kill()
    try:
        assert cluster.ask(prompt).tokens == _cold(prompt, 6)
        # It died; now one that dies in the middle of a request.
        cluster.prefill.start().wait_ready()
        call = cluster.stub.Generate(
            pb.GenerateRequest(tokens=tokens_of(3_000, seed=44), max_new_tokens=3), timeout=SECONDS
        )
        next(call)
        cluster.prefill.kill()
        assert [event.token for event in call if event.kind in (Event.FIRST_TOKEN, Event.TOKEN)] == _cold(
            tokens_of(3_000, seed=44), 3
        )
    finally:
        cluster.prefill.start().wait_ready()


def test_a_decode_worker_that_dies_and_stays_away_is_a_refusal_by_name(cluster: Cluster) -> None:
    prompt = tokens_of(300, seed=45)
    call = cluster.stub.Generate(pb.GenerateRequest(tokens=prompt, max_new_tokens=2000), timeout=SECONDS)
    tokens = []
    while len(tokens) < 20:
        event = next(call)
        if event.kind in (Event.FIRST_TOKEN, Event.TOKEN):
            tokens.append(event.token)
    cluster.decode.kill()
    try:
        with pytest.raises(grpc.RpcError, match="no decode worker could do it; tried unix:") as refused:
            list(call)
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        cluster.decode.start().wait_ready()
    assert cluster.ask(prompt, 20).tokens == tokens == _cold(prompt, 20)


def test_a_killed_service_costs_the_restore_and_no_token(cluster: Cluster) -> None:
    prompt = tokens_of(400, seed=46)
    cluster.ask(prompt)
    cluster.service.kill()
    try:
        dead = cluster.ask(prompt)
        assert dead.tokens == _cold(prompt, 6)
        assert dead.prefix.restored_tokens == 0
        assert dead.prefix.miss_reason.startswith("UNAVAILABLE")
    finally:
        cluster.service.start()
    assert cluster.ask(prompt).prefix.restored_tokens == 384


def test_a_service_killed_while_a_prompt_is_computed_and_stored_costs_no_token(cluster: Cluster) -> None:
    prompt = tokens_of(4000, seed=47)
    call = cluster.stub.Generate(
        pb.GenerateRequest(tokens=prompt, max_new_tokens=6, return_logits=True), timeout=SECONDS
    )
    events = []
    killed = False
    for event in call:
        events.append(event)
        if event.kind == Event.STORED and not killed:
            cluster.service.kill()
            killed = True
    cluster.service.start()
    assert killed
    assert collect(iter(events)).tokens == _cold(prompt, 6)
    assert cluster.ask(prompt).tokens == _cold(prompt, 6)


def test_sigterm_lets_a_request_under_way_finish_and_ends_with_0(cluster: Cluster) -> None:
    prompt = tokens_of(200, seed=48)
    peers = (cluster.gateway, cluster.prefill, cluster.decode)
    call = cluster.stub.Generate(pb.GenerateRequest(tokens=prompt, max_new_tokens=80), timeout=SECONDS)
    tokens = []
    # Until the decode worker has it: one that is told to end takes no further requests.
    while len(tokens) < 3:
        event = next(call)
        if event.kind in (Event.FIRST_TOKEN, Event.TOKEN):
            tokens.append(event.token)
    try:
        for peer in peers:
            peer.signal(signal.SIGTERM)
        tokens += [event.token for event in call if event.kind == Event.TOKEN]
        assert tokens == _cold(prompt, 80)
        assert [peer.wait() for peer in peers] == [0, 0, 0]
        assert not any(peer.socket.exists() for peer in peers)
    finally:
        for peer in peers:
            peer.restart()
        for peer in peers:
            peer.wait_ready()


# ---- starts that are refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("worker", "prefill", "--listen", "tcp:1"), "--listen=tcp:1; allowed: unix:PATH"),
        (("worker", "prefill", "--listen", "unix:w", "--profile", "nonesuch"), "profile=nonesuch"),
        (
            ("worker", "prefill", "--listen", "unix:w", "--device", "meta"),
            "--device=meta; allowed: cpu, cuda",
        ),
        (
            ("worker", "prefill", "--listen", "unix:w", "--profile", "deepseek-v4-pro"),
            "profile=deepseek-v4-pro",
        ),
        (
            ("worker", "prefill", "--listen", "unix:w", "--dtype", "float8"),
            "--dtype=float8; allowed: float32, bfloat16",
        ),
        (
            ("worker", "decode", "--listen", "unix:w", "--threads", "1", "--checkpoint", "/nonexistent"),
            "/nonexistent",
        ),
        (
            ("worker", "decode", "--listen", "unix:w", "--threads", "1025"),
            "--threads=1025; allowed: 0 to 1024",
        ),
        (
            ("worker", "decode", "--listen", "unix:w", "--cache", "/nonexistent", "--policy", "some"),
            "policy=some; allowed: zero, endpoints",
        ),
        (("gateway", "--listen", "unix:w", "--prefill", "unix:p", "--decode", "host:1"), "--decode=host:1"),
    ],
)
def test_a_start_that_can_t_work_is_one_line_and_exit_code_1(args: tuple[str, ...], words: str) -> None:
    ended = run_command(*args)
    assert ended.returncode == 1
    assert words in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert ended.stdout == ""


@pytest.mark.parametrize(("given", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_a_worker_s_threads_do_not_spin_unless_they_are_told_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, policy: str
) -> None:
    monkeypatch.setenv("OMP_DISPLAY_ENV", "TRUE")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    ended = run_command("worker", "decode", "--listen", "unix:w", "--checkpoint", str(tmp_path), fresh=True)
    assert f"OMP_WAIT_POLICY = '{policy}'" in ended.stderr


def test_a_label_that_another_identity_has_is_refused_at_the_start(cluster: Cluster) -> None:
    directory = str(cluster.service.directory)
    args = (
        "worker",
        "prefill",
        "--listen",
        "unix:w",
        "--cache",
        directory,
        "--namespace",
        "shared",
        "--threads",
        "1",
    )
    with CacheClient(directory, owner="test") as client:
        from tests.support.chains import identity_of

        client.open_namespace(identity_of(), name="shared")
    ended = run_command(*args)
    assert ended.returncode == 1
    assert "shared" in ended.stderr


def test_the_same_checkpoint_in_two_places_is_one_namespace(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    shutil.copytree(write_checkpoint(tmp_path / "here"), tmp_path / "there")
    options = ("--cache", str(cluster.service.directory), "--threads", "1")
    namespaces = []
    with TemporaryDirectory(prefix="kv-") as folder:
        for place in ("here", "there"):
            args = ("worker", "decode", "--checkpoint", str(tmp_path / place), *options)
            with Peer(Path(folder) / f"{place}.sock", *args) as worker:
                worker.wait_ready()
                with grpc.insecure_channel(worker.target) as channel:
                    stub = worker_pb2_grpc.WorkerStub(channel)
                    namespaces.append(stub.Describe(pb.DescribeRequest(), timeout=SECONDS).namespace)
    assert len(namespaces[0]) == 32
    assert namespaces[0] == namespaces[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--checkpoint", ""), "argument --checkpoint: an empty path"),
        (("--cache", ""), "argument --cache: an empty path"),
        (("--seed", "9" * 30), "argument --seed"),
        (("--requests", "x"), "argument --requests: x: not a whole number from 1 to 10000"),
    ],
)
def test_an_option_that_means_nothing_is_refused_and_not_taken_for_its_default(
    args: tuple[str, ...], words: str
) -> None:
    ended = run_command("worker", "decode", "--listen", "unix:w", *args)
    assert ended.returncode == 2
    assert words in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_a_process_whichever_of_its_threads_receives_it(number: signal.Signals) -> None:
    with TemporaryDirectory(prefix="kv-") as folder:
        workers = [f"--{role}=unix:{folder}/{role}" for role in ("prefill", "decode")]
        with Peer(Path(folder) / "g.sock", "gateway", *workers) as peer:
            peer.wait_ready()
            threads = {int(path.name) for path in Path(f"/proc/{peer.pid}/task").iterdir()} - {peer.pid}
            assert ctypes.CDLL(None).tgkill(peer.pid, min(threads), number) == 0
            assert peer.wait() == 0


def test_a_second_worker_on_one_socket_is_refused(cluster: Cluster) -> None:
    ended = run_command("worker", "prefill", "--listen", cluster.prefill.target)
    assert ended.returncode == 1
    assert "another process listens there" in ended.stderr
    assert cluster.ask(tokens_of(40, seed=49), 2).tokens == _cold(tokens_of(40, seed=49), 2)
