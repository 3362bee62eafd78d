"""Names of vLLM that the tier takes, as 0.32 and 0.33 have them, for where vLLM is not installed; and its scheduler's calls, in the
order in which its tiering manager was seen to make them."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

ROW = 4096
ROWS = 64
WAIT = 60.0


class LookupResult(Enum):
    MISS = auto()
    HIT = auto()
    HIT_PENDING = auto()
    RETRY = auto()


class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"


@dataclass
class OffloadingEvent:
    keys: list[bytes]
    medium: Medium
    removed: bool
    locality: Locality | None = None
    ownership: str | None = None


@dataclass(frozen=True)
class OffloadingCounterMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class OffloadingConnectorStats:
    def __init__(self) -> None:
        self.counters: dict[str, float] = {}

    def increase_counter(self, name: str, value: float = 1, labelvalues: tuple[str, ...] = ()) -> None:
        self.counters[name] = self.counters.get(name, 0) + value


class SecondaryTierManager:
    medium: Medium | None = None

    def __init__(self, spec: Any, view: memoryview, tier_type: str, detector: Any = None) -> None:
        assert view.strides is not None
        self.tier_type = tier_type
        self.block_size_bytes = view.strides[0]
        self.locality: Locality | None = None


class SecondaryTierFactory:
    registered: dict[str, tuple[str, str]] = {}  # noqa: RUF012

    @classmethod
    def register_tier(cls, tier_type: str, module_path: str, class_name: str) -> None:
        if tier_type in cls.registered:
            raise ValueError(f"Tier '{tier_type}' is already registered.")
        cls.registered[tier_type] = (module_path, class_name)


_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_NAMES: dict[str, dict[str, Any]] = {
    "vllm": {},
    f"{_OFFLOADING}.canonical_mapping": {"canonical_format_id": "canonical-{}".format},
    f"{_OFFLOADING}.metrics": {"OffloadingConnectorStats": OffloadingConnectorStats},
    "vllm.v1.kv_offload.base": {
        "Locality": Locality,
        "LookupResult": LookupResult,
        "Medium": Medium,
        "OffloadingCounterMetadata": OffloadingCounterMetadata,
        "OffloadingEvent": OffloadingEvent,
        "RequestOffloadingContext": RequestOffloadingContext,
    },
    "vllm.v1.kv_offload.tiering.base": {
        "JobResult": JobResult,
        "SecondaryTierManager": SecondaryTierManager,
    },
    "vllm.v1.kv_offload.tiering.factory": {"SecondaryTierFactory": SecondaryTierFactory},
}


@contextmanager
def vllm_double(version: str = "0.33.0") -> Iterator[Any]:
    """vLLM is there, in this version; gives the module kvstore_vllm.tier, imported anew."""
    ours = ("kvstore_vllm.tier", "kvstore_vllm.compat")
    before = {name: module for name, module in sys.modules.items() if _is(name, "vllm") or name in ours}
    for name in before:
        del sys.modules[name]
    for path, names in _NAMES.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        vars(sys.modules[path]).update(names)
    sys.modules["vllm"].__version__ = version  # type: ignore[attr-defined]
    SecondaryTierFactory.registered.clear()
    try:
        yield importlib.import_module("kvstore_vllm.tier")
    finally:
        for name in [name for name in sys.modules if _is(name, "vllm") or name in ours]:
            del sys.modules[name]
        sys.modules.update(before)


def _is(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def spec(**changed: Any) -> Any:
    """An OffloadingSpec of one worker and one group, but for what is changed of its configuration."""
    config = {
        "model": SimpleNamespace(name="tiny", dtype="float32"),
        "cache": SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
        "groups": (SimpleNamespace(tokens_per_block=32, layer_names=("l0",), group_id=0),),
        "parallel": SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, world_size=1, is_parallelism_agnostic=False
        ),
        "kv_cache_layout": "LBHNC",
        "canonical_layout": False,
        "replicated_layout": False,
    }
    return SimpleNamespace(
        config=SimpleNamespace(**{**config, **changed}),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )


def steps() -> Iterator[None]:
    """As many as a while has; the engine lets helper threads run in each."""
    end = time.monotonic() + WAIT
    while time.monotonic() < end:
        yield
        os.sched_yield()
    raise AssertionError(f"it did not come to an end within {WAIT:g} s")


@dataclass
class Request:
    """A ReqContext: its keys, and where in the prompt each ends."""

    req_id: str
    keys: list[bytes]
    places: dict[bytes, int] = field(default_factory=dict)

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self.places.get(key)


class Scheduler:
    """The tiering manager's part: keys found in the pool are not asked for; hits get a row and are loaded as one job at the
    step's end; computed ones are stored; jobs are polled once a step. A full pool gives up what it has held longest, except for
    rows that a job is at. It gives up after a while, since nothing of the tier may keep a request from coming to an end."""

    def __init__(self, tier: Any, pool: bytearray, *, row: int = ROW, first_row: int = 0) -> None:
        self.tier = tier
        self.pool = memoryview(pool)
        self.row = row
        self.held: dict[bytes, int] = {}
        self.jobs: dict[int, tuple[bool, list[bytes], list[int]]] = {}
        self.results: list[JobResult] = []
        self._free = list(range(len(pool) // row - 1, first_row - 1, -1))
        self._next_job = 0

    def bytes_of(self, key: bytes) -> bytes:
        at = self.held[key] * self.row
        return bytes(self.pool[at : at + self.row])

    def run(self, request: Request, compute: Callable[[bytes], bytes]) -> int:
        """How many of the request's keys came from the tier; the others are computed, and given to it."""
        self.tier.on_new_request(request)
        loaded: set[bytes] = set()
        for _ in steps():
            self._poll()
            pending: list[bytes] = []
            waits = False
            for key in request.keys:
                if key in self.held:
                    continue
                if any(key in keys for is_load, keys, _ in self.jobs.values() if is_load):
                    waits = True
                    continue
                result = self.tier.lookup(key, request)
                if result is LookupResult.HIT:
                    pending.append(key)
                elif result is LookupResult.RETRY:
                    waits = True
                else:
                    break
            if pending:
                loaded.update(pending)
                self._submit(pending, request, is_load=True)
            self.tier.on_schedule_end(None)
            if not (pending or waits):
                break
        found = sum(key in self.held for key in loaded)
        missing = [key for key in request.keys if key not in self.held]
        for key in missing:
            row = self._take_row()
            data = compute(key)
            self.pool[row * self.row : (row + 1) * self.row] = data
            self.held[key] = row
        self.tier.touch(request.keys, request)
        if missing:
            self._submit(missing, request, is_load=False)
        self.tier.on_request_finished(request)
        return found

    def settle(self) -> None:
        """Step until no job is under way."""
        for _ in steps():
            self._poll()
            if not self.jobs:
                return
            self.tier.on_schedule_end(None)

    def _submit(self, keys: Iterable[bytes], request: Request, *, is_load: bool) -> None:
        keys = list(keys)
        rows = [self._take_row() if is_load else self.held[key] for key in keys]
        self._next_job += 1
        self.jobs[self._next_job] = (is_load, keys, rows)
        job = SimpleNamespace(
            job_id=self._next_job, keys=keys, chunk_ids=rows, is_promotion=is_load, req_context=request
        )
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)

    def _poll(self) -> None:
        for result in self.tier.get_finished_jobs():
            is_load, keys, rows = self.jobs.pop(result.job_id)
            self.results.append(result)
            if is_load:
                good = set(keys if result.success else result.successful_keys or ())
                assert good <= set(keys)
                for key, row in zip(keys, rows, strict=True):
                    if key in good:
                        self.held[key] = row
                    else:
                        self._free.append(row)

    def _take_row(self) -> int:
        if not self._free:
            busy = {row for _, _, rows in self.jobs.values() for row in rows}
            oldest = next(key for key, row in self.held.items() if row not in busy)
            self._free.append(self.held.pop(oldest))
        return self._free.pop()
