"""A service's life: start, ready, stop signal, grace, end."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvstore.clock import Clock, SystemClock
from kvstore.config import ServiceConfig
from kvstore.core import Core, Limits, LoadReport
from kvstore.core.changes import Journal
from kvstore.errors import PolicyTooLarge
from kvstore.memory import BlockCache, why_not_mapped
from kvstore.memory.cache import EXTENT_BYTES, EXTENTS_MIN, extent_bytes_for
from kvstore.policy.registry import make_policy
from kvstore.policy.window import WindowPolicy
from kvstore.pool.handoffs import HandoffTable
from kvstore.pool.states import StatePool
from kvstore.service import audit
from kvstore.service.audit import AuditLog
from kvstore.service.engine import Engine
from kvstore.service.erasing import Erasing
from kvstore.service.events import Publisher, check_events
from kvstore.service.figures import figures
from kvstore.service.gate import ReadGate
from kvstore.service.listening import Doors, Listeners
from kvstore.service.logs import log_to_stderr
from kvstore.service.metrics import MetricsPage, split_address, split_hosts
from kvstore.service.opening import STOP_SIGNALS, StartStopped, keep_stop_signals_away, open_store
from kvstore.service.pins import Pins
from kvstore.service.ports import check_ports
from kvstore.service.process import (
    Places,
    allow_descriptors,
    close_directory_to_others,
    collect_seldom,
    collector_resting,
    forbid_dumps,
    give_back_freed_memory,
    holding_sockets,
    keep_freed_memory,
    remove_stale_sockets,
)
from kvstore.service.reader import Reader
from kvstore.service.registry import Registry
from kvstore.service.reloading import Began, Reloading, begin
from kvstore.service.spans import spans_to
from kvstore.service.statuspage import status
from kvstore.service.tcp import Trust
from kvstore.service.timekeeping import ServiceTime
from kvstore.service.upkeep import Upkeep
from kvstore.service.writer import Writer
from kvstore.store import RecordLog, Recovery
from kvstore.store.device import Device
from kvstore.store.records import Records
from kvstore.store.space import segment_bytes_for
from kvstore.store.wear import check_bytes_per_day
from kvstore.types import BootId

log = logging.getLogger(__name__)

READER_THREADS = 4
COPIER_THREADS = 2
"""For bytes that are in memory: they do not wait for those that wait for the device."""

LEASES_SHARE = 4
"""One session has at most this part of all leases."""

INDEX_BYTES_PER_BLOCK = 200
"""At most, for a million blocks; `index_bytes_per_block` is what it is."""

GRACE_SECONDS = 10.0
QUIET_SECONDS = 1.0
"""At a stop, leases and reservations whose owners do nothing for so long are not waited for."""
LAST_CALLS_SECONDS = 2.0

DESCRIPTORS_PER_SESSION = 6
"""The session's own connection, twice, its calls' two, and its arena's, twice; or its connections over TCP."""
DESCRIPTORS_PER_EXTENT = 2
"""One to pass on, and one that mmap keeps."""
DESCRIPTORS_BESIDE = 1024
"""Segments, the catalogue, smaller extents, connections without a session, what the libraries need."""

LAST_USE_STEP_SECONDS = 3600.0
"""Last uses are persisted rounded up to this."""


def main_blocking(
    config: ServiceConfig,
    *,
    dumpable: bool = False,
    ready: Callable[[], None] | None = None,
    unknown: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT. Raises KvstoreError when the service cannot start.

    `dumpable`: let core dumps and tracers see the process. `ready` is called once, when calls are served. The log goes
    to stderr unless the caller has sent it elsewhere. `unknown`: variables that configure nothing, which it tells of.
    """
    log_to_stderr(config.log_format)
    if unknown:
        log.warning("environment variables that are no options, and change nothing: %s", ", ".join(unknown))
    # Sockets and files are for this user alone; nothing here is ever meant for another.
    os.umask(0o077)
    extents = max(EXTENTS_MIN, config.cache_bytes // EXTENT_BYTES)
    allow_descriptors(
        DESCRIPTORS_PER_SESSION * config.sessions + DESCRIPTORS_PER_EXTENT * extents + DESCRIPTORS_BESIDE
    )
    keep_freed_memory()
    if not dumpable:
        forbid_dumps()
    collect_seldom()
    serve = run_service(config, ready=ready)
    if sys.platform == "linux":
        import uvloop

        uvloop.run(serve)
    else:
        asyncio.run(serve)


async def run_service(
    config: ServiceConfig,
    *,
    clock: Clock | None = None,
    device: Device | None = None,
    ready: Callable[[], None] | None = None,
    stop: asyncio.Event | None = None,
    doors: Callable[[Engine], Doors] | None = None,
) -> None:
    """The service in this event loop, until SIGTERM or SIGINT, or until `stop` is set, and no signal is looked at. `device`: what
    the store lies on instead of the directory itself. `doors` makes the ways in; without it they are sockets. Raises
    KvstoreError when it cannot start."""
    clock = SystemClock() if clock is None else clock
    directory = Path(config.dir).absolute()
    places = Places(directory, Path(config.sockets).absolute() if config.sockets else directory)
    places.check()
    # Refused here where it does not fit; told when nothing else is refused any more.
    memory = config.memory_text()
    WindowPolicy.check(config.policy)
    make_policy(config.eviction, field="--eviction")
    check_bytes_per_day(config.wear)
    if config.metrics:
        split_address(config.metrics)
    split_hosts(config.metrics_hosts)
    probes = split_address(config.health, field="health") if config.health else None
    spans = spans_to(config.otlp)
    began, tcp = begin(config)
    check_events(config)
    check_ports(config, directory)
    segment_bytes = segment_bytes_for(config.disk, config.segment or None)
    has_signals = stop is None
    stop = _stop_event() if stop is None else stop
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as ends:
        writer_thread = ends.enter_context(
            ThreadPoolExecutor(1, "kvstore-writer", initializer=keep_stop_signals_away)
        )
        reader_threads = ends.enter_context(ThreadPoolExecutor(READER_THREADS, "kvstore-reader"))
        copier_threads = ends.enter_context(ThreadPoolExecutor(COPIER_THREADS, "kvstore-copier"))
        if spans is not None:
            ends.push_async_callback(loop.run_in_executor, copier_threads, spans.end)
        time = ServiceTime(clock)
        try:
            store, recovery = await loop.run_in_executor(
                writer_thread,
                lambda: open_store(places, config, segment_bytes, time, stop.is_set, device=device),
            )
        except StartStopped:
            log.info("stopped while the store was being opened; it is as before")
            return
        ends.push_async_callback(loop.run_in_executor, writer_thread, store.close)
        # The directory's lock is ours from here on: what another service left behind is stale.
        close_directory_to_others(places.directory)
        ends.enter_context(holding_sockets(places))
        remove_stale_sockets(places)
        log.info("%s; the index takes about %d bytes a block beside that", memory, INDEX_BYTES_PER_BLOCK)
        if store.buffered_because:
            log.warning(
                "segments pass through the page cache: %s; what is promised holds, and speed is the cache's",
                store.buffered_because,
            )
        service = _Service(
            config,
            places,
            store=store,
            recovery=recovery,
            time=time,
            segment_bytes=segment_bytes,
            began=began,
            has_signals=has_signals,
            doors=doors
            or (
                lambda engine: Listeners(
                    engine,
                    places.socket,
                    places.session_socket,
                    tcp=tcp,
                    probes=probes,
                    spans=spans,
                )
            ),
        )
        # The service lets go of it once it is loaded.
        del recovery
        await service.run(writer_thread, reader_threads, copier_threads, stop=stop, ready=ready)


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    for name in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop


class _Service:
    """One run. The parts are made here; the order of their start and end is `run`."""

    def __init__(
        self,
        config: ServiceConfig,
        places: Places,
        *,
        store: RecordLog,
        recovery: Recovery,
        time: ServiceTime,
        segment_bytes: int,
        began: Began,
        has_signals: bool,
        doors: Callable[[Engine], Doors],
    ) -> None:
        self._config = config
        self._places = places
        self._store = store
        self._recovery = recovery
        self._time = time
        self._segment_bytes = segment_bytes
        self._began = began
        self._has_signals = has_signals
        self._doors = doors

    async def run(
        self,
        writer_thread: ThreadPoolExecutor,
        reader_threads: ThreadPoolExecutor,
        copier_threads: ThreadPoolExecutor,
        *,
        stop: asyncio.Event,
        ready: Callable[[], None] | None,
    ) -> None:
        config = self._config
        engine = self._engine(writer_thread, reader_threads, copier_threads)
        reloading = Reloading(config, self._began, partial(_adopt, engine))
        engine.reloading = reloading
        async with AsyncExitStack() as ends:
            engine.audit = self._audit(engine)
            ends.push_async_callback(engine.audit.close)
            doors = self._doors(engine)
            ends.push_async_callback(doors.stop, 0)
            await doors.start()
            report = await self._load(engine, writer_thread)
            writing = asyncio.create_task(engine.writer.run(), name="writer")
            ends.push_async_callback(_finish, writing)
            ends.callback(engine.writer.stop)
            writing.add_done_callback(partial(_stop_without_writer, stop))
            await engine.writer.alone(engine.writer.room.shrink_to_budget)
            page = MetricsPage(
                lambda: figures(engine), lambda: status(engine), hosts=split_hosts(config.metrics_hosts)
            )
            if config.metrics:
                await page.start(config.metrics)
                ends.push_async_callback(page.stop)
            ends.push_async_callback(engine.erasing.stop)
            await engine.erasing.resume()
            ends.callback(engine.sessions.close_all)
            ends.callback(doors.close_to_sessions)
            await doors.open_to_sessions()
            if engine.events is not None:
                engine.events.open()
                ends.callback(engine.events.close)
                telling = asyncio.create_task(engine.events.run(), name="events")
                ends.callback(telling.cancel)
            upkeep = Upkeep(engine)
            expiring = asyncio.create_task(upkeep.run(), name="upkeep")
            ends.callback(expiring.cancel)
            looking = asyncio.create_task(reloading.run(copier_threads), name="reloading")
            ends.callback(looking.cancel)
            if self._has_signals and reloading.has_files:
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloading.ask)
            engine.ready = True
            await doors.set_serving(True)
            self._tell(engine, report, self._time.uptime())
            if ready is not None:
                ready()
            await stop.wait()
            log.info("stopping: no new work, up to %g s for what is under way", GRACE_SECONDS)
            await doors.set_serving(False)
            engine.draining = True
            engine.flights.close()
            doors.close_to_sessions()
            left = await engine.activity.wait_idle(
                GRACE_SECONDS - LAST_CALLS_SECONDS, quiet_seconds=QUIET_SECONDS
            )
            engine.sessions.close_calls()
            await doors.stop(LAST_CALLS_SECONDS)
            await upkeep.note_uses()
            if engine.events is not None:
                await engine.events.finish()
            log.info("stopped with %d leases, reservations and takes still open", left)
        for path in (self._places.socket, self._places.session_socket):
            path.unlink(missing_ok=True)

    def _engine(
        self,
        writer_thread: ThreadPoolExecutor,
        reader_threads: ThreadPoolExecutor,
        copier_threads: ThreadPoolExecutor,
    ) -> Engine:
        config = self._config
        self._time.start_no_earlier(self._recovery.records.newest_use() - LAST_USE_STEP_SECONDS)
        memory = self._memory_to_map()
        pins = None if memory is None else Pins(memory)
        journal = Journal() if config.events else None
        core = Core(
            pool=StatePool(
                config.pool_bytes, config.pool_ttl, on_change=None if journal is None else journal.pooled
            ),
            journal=journal,
            retention_seconds=config.retention,
            lease_seconds=config.lease,
            longest_lease_seconds=max(3600.0, config.lease),
            reservation_seconds=config.lease,
            default_policy=config.policy,
            ranks=make_policy(config.eviction, field="--eviction"),
            states_share_bytes=config.states_share_bytes,
            limits=Limits(
                keys=config.keys,
                leases=config.leases,
                leases_per_session=max(1, config.leases // LEASES_SHARE),
                reserved_items=config.keys,
                prompt_tokens=config.prompt_tokens,
            ),
            on_lease_end=(lambda lease_id: None) if pins is None else pins.end,
        )
        engine = Engine(
            config,
            boot=BootId(secrets.token_bytes(16)),
            store=self._store,
            core=core,
            handoffs=HandoffTable(
                config.handoff_bytes, random_bytes=secrets.token_bytes, take_seconds=config.take
            ),
            reader=Reader(
                self._store,
                executor=reader_threads,
                gate=ReadGate(config.parts.fetch),
                clock=self._time,
                memory=memory,
            ),
            time=self._time,
            threads=copier_threads,
            pins=pins,
        )
        if journal is not None:
            engine.events = Publisher(config, core=core, journal=journal, time=self._time)
        writer = Writer(
            self._store,
            engine,
            executor=writer_thread,
            segment_bytes=self._segment_bytes,
            gather_bytes=config.commit_bytes,
            gather_seconds=config.commit_wait,
            wear_bytes_per_day=config.wear,
            clock=self._time,
        )
        engine.attach(writer, Registry(core, self._store, writer), Erasing(engine))
        return engine

    def _audit(self, engine: Engine) -> AuditLog:
        return AuditLog(
            self._places.directory / audit.NAME,
            bytes_max=audit.bytes_for(self._config.disk),
            wall=self._time.wall,
            sessions=engine.sessions,
            counts=engine.counts,
        )

    def _memory_to_map(self) -> BlockCache | None:
        because = why_not_mapped()
        if because:
            log.warning("nothing is kept in memory for clients to map: %s", because)
            return None
        budget = self._config.cache_bytes
        return BlockCache(budget, extent_bytes=extent_bytes_for(budget))

    async def _load(self, engine: Engine, thread: ThreadPoolExecutor) -> LoadReport:
        """The index, from what recovery found. In a thread: nobody else has the core yet, and health is to answer."""
        recovery = self._recovery
        with collector_resting():
            report = await asyncio.get_running_loop().run_in_executor(
                thread,
                lambda: engine.core.load(recovery.records, recovery.policies, now_wall=engine.time.wall()),
            )
            await asyncio.get_running_loop().run_in_executor(thread, engine.registry.load, recovery.records)
        self._warn_of_policies(engine)
        engine.writer.room.discard(report.discard)
        # A million records are not kept for the sake of what follows; nor is the memory that handling them took.
        self._recovery = recovery = replace(recovery, records=Records.of(()), policies={})
        await asyncio.get_running_loop().run_in_executor(thread, give_back_freed_memory)
        return report

    def _warn_of_policies(self, engine: Engine) -> None:
        """A namespace keeps the policy that it has, also where the disk or the longest prompt are others now."""
        for info in engine.core.namespaces():
            try:
                engine.core.check_share(info)
            except PolicyTooLarge as error:
                log.warning("namespace %r keeps its policy, which would be refused now: %s", info.name, error)

    def _tell(self, engine: Engine, report: LoadReport, seconds: float) -> None:
        statistics = engine.core.statistics()
        recovery = self._recovery
        log.info(
            "ready: %d blocks, %d states, %d namespaces; index %.0f bytes a block; recovery %.2f s%s; torn %d bytes, "
            "damaged %d records, dropped %d; directory %s; sockets %s and %s",
            report.blocks,
            report.states,
            report.namespaces,
            statistics.index_bytes_per_block,
            seconds,
            " (fresh)" if recovery.fresh else " (catalogue rebuilt)" if recovery.rebuilt else "",
            recovery.torn_bytes,
            recovery.damaged_records,
            len(report.discard),
            self._places.directory,
            self._places.socket,
            self._places.session_socket.name,
        )
        _warn_of_losses(recovery)


def _adopt(engine: Engine, trust: Trust) -> None:
    """What the files of trust say counts from now on, for sessions that are open too."""
    engine.tenants.adopt(trust.tenants)
    ended = engine.sessions.close_where(lambda caller: not trust.access.is_good(caller))
    if ended:
        log.warning("ended %d sessions of tokens, or certificates, that are not good any more", ended)


def _warn_of_losses(recovery: Recovery) -> None:
    """What the directory should have held and does not."""
    found = {
        "segments whose files are gone": recovery.missing_segments,
        "segments whose header or footer is damaged": recovery.damaged_segments,
        "records that were stored and are not found whole": recovery.damaged_records,
        "descriptions of namespaces written anew from the catalogue": recovery.rescued_descriptions,
        "catalogue lost or damaged and written anew, last uses with it": int(recovery.rebuilt),
    }
    if any(found.values()):
        log.warning(
            "the store is not as it was left: %s; what was lost is a miss, and `kvstore verify` reads the rest",
            ", ".join(f"{count} {what}" for what, count in found.items() if count),
        )


def _stop_without_writer(stop: asyncio.Event, writing: asyncio.Task[None]) -> None:
    """A service that cannot store is worse than none, which who starts it again sees: `_finish` raises the error."""
    if not writing.cancelled() and (error := writing.exception()) is not None:
        log.critical("what writes to the log has ended; the service stops: %r", error)
        stop.set()


async def _finish(task: asyncio.Task[None]) -> None:
    await task
