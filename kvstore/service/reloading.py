"""Certificates, tokens and tenants read anew while the service runs: when their files have changed, or at a signal."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from kvstore.config import ServiceConfig
from kvstore.errors import KvstoreError
from kvstore.service.tcp import TcpEnd, Trust, files_of, read_trust, tcp_end

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 2.0

Signature = tuple[tuple[int, int, int], ...]


class Began(NamedTuple):
    """What the files said at the start; `seen`: of before they were read, so that no change is missed."""

    trust: Trust
    seen: Signature


def begin(config: ServiceConfig) -> tuple[Began, TcpEnd | None]:
    """The files at a start, and where to listen. ConfigError as `read_trust` and `tcp_end`."""
    seen = signature_of(files_of(config))
    end = tcp_end(config)
    return Began(_trust(config, end), seen), end


def _trust(config: ServiceConfig, end: TcpEnd | None) -> Trust:
    return read_trust(config) if end is None else end.trust


class Reloading:
    """What the files say now. One that cannot be read, or is wrong, changes nothing: what was good stays in use, the log says
    so once for each change, and `is_failing` and `failed_total` count it."""

    def __init__(self, config: ServiceConfig, began: Began, adopt: Callable[[Trust], None]) -> None:
        """`adopt` is told of what the files said at the start, and of each later change, in the event loop's thread."""
        trust = began.trust
        self.trust = trust
        self.is_failing = False
        self.failed_total = 0
        self.reloaded_total = 0
        self._config = config
        self._adopt = adopt
        self._files = files_of(config)
        self._seen: Signature | None = began.seen
        self._asked = asyncio.Event()
        adopt(trust)

    @property
    def has_files(self) -> bool:
        return bool(self._files)

    def ask(self) -> None:
        """Read the files anew at once, changed or not."""
        self._seen = None
        self._asked.set()

    async def run(self, threads: Executor) -> None:
        """Look every so often, and when asked, until cancelled."""
        if not self._files:
            return
        while True:
            try:
                async with asyncio.timeout(LOOK_EVERY_SECONDS):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            await self.look(threads)

    async def look(self, threads: Executor) -> None:
        """Read the files where they have changed since the last look."""
        loop = asyncio.get_running_loop()
        seen = await loop.run_in_executor(threads, signature_of, self._files)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            trust = await loop.run_in_executor(threads, self._read)
        except KvstoreError as error:
            self.is_failing = True
            self.failed_total += 1
            log.error("certificates, tokens and tenants stay as they were: %s", error)
            return
        self.is_failing = False
        self.reloaded_total += 1
        if trust != self.trust:
            self.trust = trust
            self._adopt(trust)
        log.info("read anew: %s", ", ".join(self._files))

    def _read(self) -> Trust:
        # Refused as at a start: what is not safe now is not taken either.
        return _trust(self._config, tcp_end(self._config))


def signature_of(files: Sequence[str]) -> Signature:
    """What differs when a file was written or another one took its place."""
    found = []
    for file in files:
        try:
            status = os.stat(file)  # noqa: PTH116 -- one call
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError as error:
            found.append((-1, 0, error.errno or 0))
    return tuple(found)
