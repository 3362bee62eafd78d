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

LOOK_EVERY_SECONDS = 1.0
"""A change is taken in at the first look that finds what the one before it found: a file that is written in place is whole only then, and
half of one may be a good file that says something else."""

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
    """What the files say now. One that cannot be read, is wrong, or changes while it is read, changes nothing: what was good stays in
    use, the log says so once for each change, and `is_failing` and `failed_total` count it."""

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
        self._read_at: Signature | None = began.seen
        """Of the files as they were read last; None: they are to be read anew, changed or not."""
        self._looked: Signature | None = began.seen
        """Of the files at the last look."""
        self._asked = asyncio.Event()
        adopt(trust)

    @property
    def has_files(self) -> bool:
        return bool(self._files)

    def ask(self) -> None:
        """Read the files anew at once, changed or not: whoever says so has written them."""
        self._read_at = None
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
            is_asked = self._asked.is_set()
            self._asked.clear()
            await self.look(threads, at_once=is_asked)

    async def look(self, threads: Executor, *, at_once: bool = False) -> None:
        """Read the files where they have changed since they were read, and no more since the last look, or `at_once`."""
        seen = await self._signature(threads)
        is_settled, self._looked = at_once or seen == self._looked, seen
        if not is_settled or seen == self._read_at:
            return
        # Before it is read: who asks meanwhile asks for more than this.
        self._read_at = seen
        found: Trust | Exception
        try:
            found = await asyncio.get_running_loop().run_in_executor(threads, self._read)
        except Exception as error:  # noqa: BLE001 -- whatever a file holds, the next one is to be looked at
            found = error
        self._looked = await self._signature(threads)
        if self._looked != seen:
            # Certificate and key may be of two writers. What is there now is read once it has settled.
            self._read_at = None
            return
        if isinstance(found, Exception):
            self._fail(found)
        else:
            self._take(found)

    async def _signature(self, threads: Executor) -> Signature:
        return await asyncio.get_running_loop().run_in_executor(threads, signature_of, self._files)

    def _fail(self, error: Exception) -> None:
        self.is_failing = True
        self.failed_total += 1
        is_known = isinstance(error, KvstoreError)
        log.error(
            "certificates, tokens and tenants stay as they were: %s",
            error if is_known else repr(error),
            exc_info=None if is_known else error,
        )

    def _take(self, trust: Trust) -> None:
        self.is_failing = False
        self.reloaded_total += 1
        if trust != self.trust:
            self.trust = trust
            self._adopt(trust)
        log.info("read anew: %s", ", ".join(self._files))

    def _read(self) -> Trust:
        # Refused as at a start: what is not safe now is not taken either.
        return _trust(self._config, tcp_end(self._config, known=self.trust.pair))


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
