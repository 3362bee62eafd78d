"""What others wait while a service that holds many blocks does its longest work."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.bench.restart import SEGMENT_BYTES, bench_profile, budget_for, build
from kvstore.bench.serving import EAGER, Chain, opened, service_directory, serving
from kvstore.errors import KvstoreError
from kvstore.types import ItemKind
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.cache_pb2_grpc import AdminStub
from kvstore_client import CacheClient, Deadlines, ReserveItem

PROBE_SECONDS = 0.02
LOOKED_UP_BLOCKS = 32
ANSWER_BAR = 0.1
"""Seconds that health, and a lookup of LOOKED_UP_BLOCKS blocks, may take meanwhile; and the longest gap of the service's loop."""

FLIGHTS, KEYS_PER_FLIGHT = 256, 1024
"""As many as one session may announce, and all keys that may be announced at once."""
UPLOADED_ITEMS = 65_536
WRITTEN_AT_ONCE = 8192
VERIFY_BYTES_PER_SECOND = 1 << 40
"""As fast as it goes."""
VERIFY_SECONDS = 5.0
"""It does the same all the time."""
STATS_CALLS = 50
WORK_SECONDS_MAX = 600.0
_PATIENT = Deadlines(
    lookup=60,
    control=WORK_SECONDS_MAX,
    write=WORK_SECONDS_MAX,
    commit=WORK_SECONDS_MAX,
    admin=WORK_SECONDS_MAX,
)


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds. `loop_gap`: the service's longest of the last minute or two, so that of the work before may be in it; `own_gap`:
    of that, what the service itself was busy. The rest is the machine's, which runs others too."""

    what: str
    seconds: float
    answers: int
    health: float
    lookup: float
    loop_gap: float
    own_gap: float

    @property
    def missed(self) -> bool:
        return max(self.health, self.lookup, self.loop_gap) > ANSWER_BAR


class Probe:
    """Asks for health and looks up, again and again, in a thread of its own; what it asks must be answered."""

    def __init__(self, place: Path, ask: Callable[[], object]) -> None:
        self._place = place
        self._ask = ask
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="probe")
        self.health: list[float] = []
        self.lookup: list[float] = []
        self.error: Exception | None = None

    def _run(self) -> None:
        try:
            with grpc.insecure_channel(f"unix:{self._place / 'kvstore.sock'}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                while not self._over.wait(PROBE_SECONDS):
                    self.health.append(
                        _timed(lambda: stub.Check(health_pb2.HealthCheckRequest(), timeout=WORK_SECONDS_MAX))
                    )
                    self.lookup.append(_timed(self._ask))
        except (grpc.RpcError, KvstoreError) as error:
            self.error = error

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class _Bench:
    """One running service with its blocks, and what is measured of it. check: called between two works."""

    def __init__(
        self, place: Path, seed: int, tell: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        self.place = place
        self._chance = random.Random(seed)
        self._tell = tell
        self._check = check
        self.readings: list[Reading] = []

    @contextmanager
    def client(self) -> Iterator[CacheClient]:
        with CacheClient(self.place, owner="bench", deadlines=_PATIENT) as made:
            yield made

    def measure(self, client: CacheClient, what: str, work: Callable[[], object]) -> None:
        self._check()
        space = opened(client, bench_profile(), self._check)
        chain = Chain(space, LOOKED_UP_BLOCKS, self._chance.randrange(1 << 30))
        chain.store(client, self._check)

        def ask() -> None:
            client.lookup(
                space.digest,
                chain.keys,
                prompt_tokens=LOOKED_UP_BLOCKS * space.block_tokens + 1,
                costs=EAGER,
                lease=False,
            )

        with Probe(self.place, ask) as probe:
            seconds = _timed(work)
        if probe.error is not None:
            raise KvstoreError(f"{what}: the service did not answer meanwhile: {probe.error}")
        self.readings.append(
            Reading(
                what,
                seconds,
                len(probe.health),
                max(probe.health, default=0.0),
                max(probe.lookup, default=0.0),
                (figures := client.stats())["loop_gap_seconds_max"],
                figures["loop_gap_own_seconds_max"],
            )
        )
        self._tell(_line(self.readings[-1]))

    # ---- works ---------------------------------------------------------------------------------------------------

    def everything(self) -> None:
        """All that leaves the blocks where they are."""
        with self.client() as client, self._admin() as admin:
            space = opened(client, bench_profile(), self._check).digest
            self.measure(client, "stats", lambda: [client.stats() for _ in range(STATS_CALLS)])
            self.measure(
                client, "policy", lambda: [client.set_policy(space, p) for p in ("zero", "endpoints")]
            )
            self.measure(client, "verify", lambda: _verify(admin))
            self.measure(client, "drop states", client.drop_states)
            self.measure(client, "end of a session with flights", lambda: self._flights(client))
            self.measure(client, "commit", lambda: self._commit(client))

    def clear(self) -> None:
        with self.client() as client:
            self.measure(client, "clear", client.clear)

    def drain(self) -> None:
        with self.client() as client:
            self.measure(client, "drain", lambda: client.drain(1.0))

    def expire(self) -> None:
        """All but what the bench itself has written since the start."""
        with self.client() as client:

            def gone() -> None:
                while client.stats()["blocks"] > 2 * LOOKED_UP_BLOCKS:
                    self._check()

            self.measure(client, "expiry", gone)

    @contextmanager
    def _admin(self) -> Iterator[AdminStub]:
        with grpc.insecure_channel(f"unix:{self.place / 'kvstore.sock'}") as channel:
            yield AdminStub(channel)

    def _flights(self, watcher: CacheClient) -> None:
        """Announce all that may be, and hang up."""
        with self.client() as client:
            space = opened(client, bench_profile(), self._check)
            for _ in range(FLIGHTS):
                keys = [self._chance.randbytes(32) for _ in range(KEYS_PER_FLIGHT)]
                client.lookup(
                    space.digest,
                    keys,
                    prompt_tokens=KEYS_PER_FLIGHT * space.block_tokens + 1,
                    costs=EAGER,
                    announce=True,
                )
            if watcher.stats()["flight_blocks"] != FLIGHTS * KEYS_PER_FLIGHT:
                raise KvstoreError("not all that was announced is in flight")
        while watcher.stats()["flights"]:
            self._check()

    def _commit(self, client: CacheClient) -> None:
        """One reservation of as many items as a call may have."""
        space = opened(client, bench_profile(), self._check)
        items: list[ReserveItem] = []
        parent = space.digest
        for number in range(UPLOADED_ITEMS):
            key = self._chance.randbytes(32)
            position = (number + 1) * space.block_tokens
            items.append(
                ReserveItem(
                    kind=ItemKind.BLOCK, key=key, parent=parent, position=position, length=space.block_bytes
                )
            )
            parent = key
        payload = self._chance.randbytes(space.block_bytes)
        with client.reserve(space.digest, items) as reservation:
            for first in range(0, UPLOADED_ITEMS, WRITTEN_AT_ONCE):
                last = min(first + WRITTEN_AT_ONCE, UPLOADED_ITEMS)
                reservation.write(dict.fromkeys(range(first, last), payload))
            reservation.commit()


def _verify(admin: AdminStub) -> None:
    begin = time.perf_counter()
    request = pb.VerifyRequest(bytes_per_second=VERIFY_BYTES_PER_SECOND)
    replies = admin.Verify(request, timeout=WORK_SECONDS_MAX)
    for reply in replies:
        if reply.damages:
            raise KvstoreError("the store is damaged", field="damages", value=len(reply.damages))
        if time.perf_counter() - begin > VERIFY_SECONDS:
            replies.cancel()
            return


def measure(
    directory: Path, *, blocks: int, seed: int, tell: Callable[[str], None], check: Callable[[], None]
) -> list[Reading]:
    """Build a store of so many blocks of 4 KiB below `directory`, twice, and put a service to work on it."""
    place = service_directory(directory)
    tell(f"writing {blocks:,} blocks (seed {seed})")
    build(place, blocks, seed=seed, check=check)
    spare = directory / "spare"
    shutil.copytree(place, spare)
    options: dict[str, object] = {
        "--disk": budget_for(blocks + 2 * UPLOADED_ITEMS),
        "--segment": SEGMENT_BYTES,
        "--staging": "1GiB",
        "--cache": "64MiB",
        "--pool": "16MiB",
        "--handoff": "16MiB",
        "--lease": "10m",
    }
    bench = _Bench(place, seed, tell, check)
    with serving(directory, options):
        bench.everything()
        bench.clear()
        bench.drain()
    shutil.rmtree(place)
    spare.rename(place)
    with serving(directory, {**options, "--retention": "1s"}):
        bench.expire()
    return bench.readings


def report(found: list[Reading], *, blocks: int, seed: int) -> dict[str, Any]:
    """missed: works during which somebody waited longer than the bar."""
    return {
        "slowest_answer_ms": 1e3 * max(max(each.health, each.lookup) for each in found),
        "loop_gap_ms": 1e3 * max(each.loop_gap for each in found),
        "own_gap_ms": 1e3 * max(each.own_gap for each in found),
        "missed": [each.what for each in found if each.missed],
        "bars": {"slowest_answer_ms": 1e3 * ANSWER_BAR, "loop_gap_ms": 1e3 * ANSWER_BAR},
        "detail": {"blocks": blocks, "seed": seed, "works": [asdict(each) for each in found]},
    }


def _line(found: Reading) -> str:
    return (
        f"{found.what}: {found.seconds:.1f} s, {found.answers} answers, slowest {1e3 * found.health:.0f} and "
        f"{1e3 * found.lookup:.0f} ms, loop {1e3 * found.loop_gap:.0f} ms, its own doing {1e3 * found.own_gap:.0f} ms"
    )
