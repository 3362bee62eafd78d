"""The store's opening at a start, in the writer's thread; a stop signal ends it at its next step."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from kvstore.clock import Clock
from kvstore.config import ServiceConfig
from kvstore.service.process import Places, check_space, make_directory
from kvstore.store import RecordLog, Recovery, open_log
from kvstore.store.device import Device
from kvstore.store.space import catalog_growth_bytes

log = logging.getLogger(__name__)

START_LOG_SECONDS = 3.0
"""A start that takes longer says every so often how far it is."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def keep_stop_signals_away() -> None:
    """For a thread whose child reads the catalogue: children get its mask. A terminal, or who stops a group of processes,
    signals the child too; it must not end before us, as if the catalogue could not be read."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


class StartStopped(Exception):
    """A stop signal came while the store was being opened."""


def open_store(
    places: Places,
    config: ServiceConfig,
    segment_bytes: int,
    clock: Clock,
    is_stopped: Callable[[], bool],
    *,
    device: Device | None,
) -> tuple[RecordLog, Recovery]:
    """Raises StartStopped, and then holds nothing, when `is_stopped` says so at one of its steps."""
    make_directory(places.directory)
    check_space(
        places.directory,
        need_bytes=2 * segment_bytes + catalog_growth_bytes(segment_bytes),
        budget_bytes=config.disk,
    )
    store, recovery = open_log(
        places.directory,
        budget_bytes=config.disk,
        segment_bytes=segment_bytes,
        clock=clock,
        device=device,
        progress=_StartLog(clock, is_stopped),
    )
    if is_stopped():
        store.close()
        raise StartStopped
    return store, recovery


class _StartLog:
    """Tells the log how far a start is, when it takes long; ends it with StartStopped when it is to stop."""

    def __init__(self, clock: Clock, is_stopped: Callable[[], bool]) -> None:
        self._clock = clock
        self._is_stopped = is_stopped
        self._told = clock.monotonic()

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._is_stopped():
            raise StartStopped
        now = self._clock.monotonic()
        if now >= self._told + START_LOG_SECONDS:
            self._told = now
            log.info("starting: reading %s, %s of %s", phase, f"{done:,}", f"{total:,}")
