"""A job: write until the file system refuses, read all meanwhile, and see that writing comes back by itself."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.chaos import records
from kvstore.chaos.journal import Journal, Word
from kvstore.chaos.load import SEGMENT_BYTES
from kvstore.chaos.mounts import wait
from kvstore.chaos.tools import run
from kvstore.clock import SystemClock
from kvstore.errors import KvstoreError, NoSpace
from kvstore.store import open_log
from kvstore.store.base import Place, RecordLog

BUDGET_BYTES = 1 << 30
"""More than any file system here holds: the refusal must come from below."""
RETURN_SECONDS_MAX = 5.0
REFUSAL_SECONDS_MAX = 0.05
_REFUSALS = 20
_BATCHES_MAX = 4000
_BATCH = 8
_RETRY_SECONDS = 0.02
_FILE_BYTES_MAX = 768 << 10

Shortage = tuple[Callable[[], None], Callable[[], None]]
"""How it begins and how it ends."""


class Starving:
    """One store, what it holds, and what was refused."""

    def __init__(self, log: RecordLog, journal: Journal, first: int) -> None:
        self._log = log
        self._journal = journal
        self.next_number = first
        self.places: dict[int, Place] = {}
        self.trouble: list[str] = []

    def append(self) -> None:
        first = self.next_number
        last = first + _BATCH if first >= records.NAMESPACES else records.NAMESPACES
        batch = [records.record_of(n) for n in range(first, last)]
        self._journal.say(Word.TRY, (first, last))
        self.next_number = last
        self.places.update(zip(range(first, last), self._log.append(batch), strict=True))
        self._journal.say(Word.DONE, (first, last))

    def append_until_refused(self) -> bool:
        for _ in range(_BATCHES_MAX):
            try:
                self.append()
            except NoSpace:
                return True
        self.trouble.append(f"nothing was refused in {_BATCHES_MAX} batches")
        return False

    def refusals(self) -> list[float]:
        """Seconds of attempts in a row, all of which should be refused."""
        seconds = []
        for _ in range(_REFUSALS):
            begun = time.monotonic()
            try:
                self.append()
            except NoSpace:
                seconds.append(time.monotonic() - begun)
        return seconds

    def read_all(self, when: str) -> float:
        """Seconds that reading everything took; each record must give its bytes."""
        begun = time.monotonic()
        numbers = list(self.places)
        answers = self._log.read([records.wanted(n, self.places[n]) for n in numbers])
        seconds = time.monotonic() - begun
        bad = [n for n, answer in zip(numbers, answers, strict=True) if answer != records.payload_of(n)]
        if bad:
            self.trouble.append(f"{when}: {len(bad)} of {len(numbers)} records did not give their bytes")
        return seconds

    def seconds_until_written(self) -> float:
        begun = time.monotonic()
        while True:
            try:
                self.append()
            except NoSpace as error:
                if time.monotonic() - begun > RETURN_SECONDS_MAX:
                    self.trouble.append(
                        f"still refused {RETURN_SECONDS_MAX:g} s after space came back: {error}"
                    )
                    return time.monotonic() - begun
                wait(_RETRY_SECONDS)
            else:
                return time.monotonic() - begun


def starve(arguments: dict[str, Any], opened: Any) -> dict[str, Any]:
    """arguments: directory, journal, shortage (a name of `_shortage`), where (its folder), bytes (left by it, or taken by
    it where a quota is what is short); returns (whether it ends while the store is open)."""
    shortage = _shortage(arguments["shortage"], Path(arguments["where"]), arguments["bytes"])
    with Journal(Path(arguments["journal"])) as journal:
        log, _ = open_log(
            arguments["directory"],
            budget_bytes=BUDGET_BYTES,
            segment_bytes=SEGMENT_BYTES,
            clock=SystemClock(),
        )
        opened()
        work = Starving(log, journal, 0)
        for _ in range(8):
            work.append()
        calm = work.read_all("before the shortage")
        before = len(work.places)
        begin, end = shortage
        begin()
        figures: dict[str, Any] = {}
        if work.append_until_refused():
            figures["refused_seconds"] = work.refusals()
        hungry = work.read_all("during the shortage")
        figures["read_rate_share"] = round(calm / before / (hungry / len(work.places)), 2)
        if arguments["returns"]:
            end()
            figures["return_seconds"] = work.seconds_until_written()
            work.append()
            work.read_all("after the shortage")
            log.check_integrity()
            log.close()
        return {"figures": figures, "trouble": work.trouble}


def resume(arguments: dict[str, Any], opened: Any) -> dict[str, Any]:
    """A job: open the store again and write. first: the first number that was never attempted."""
    with Journal(Path(arguments["journal"])) as journal:
        begun = time.monotonic()
        log, recovery = open_log(
            arguments["directory"],
            budget_bytes=BUDGET_BYTES,
            segment_bytes=SEGMENT_BYTES,
            clock=SystemClock(),
        )
        opened()
        work = Starving(log, journal, arguments["first"])
        for found in recovery.records:
            number = records.number_of(found.key)
            if number is not None:
                work.places[number] = found.place
        work.append()
        seconds = time.monotonic() - begun
        work.read_all("after the start")
        log.close()
        return {"figures": {"return_seconds": seconds}, "trouble": work.trouble}


def try_start(arguments: dict[str, Any], opened: Any) -> str:
    """A job: the code of the error with which the store refuses to open; empty when it opens."""
    try:
        log, _ = open_log(
            arguments["directory"],
            budget_bytes=BUDGET_BYTES,
            segment_bytes=SEGMENT_BYTES,
            clock=SystemClock(),
        )
    except KvstoreError as error:
        return error.code
    log.close()
    return ""


def _shortage(name: str, where: Path, size: int) -> Shortage:
    match name:
        case "file":
            return lambda: _leave(where / "filler", size), lambda: _empty(where / "filler")
        case "quota":
            return lambda: _allocate(where / "filler", size), lambda: _empty(where / "filler")
        case "inodes":
            return lambda: _use_up_inodes(where / "many"), lambda: _give_back_inodes(where / "many")
        case "file size":
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            return (
                lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES_MAX, hard)),
                lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)),
            )
        case "read-only":
            return lambda: _abort(where), lambda: None
    raise ValueError(f"no shortage is called {name}")


def _abort(where: Path) -> None:
    """What an ext4 does when it finds itself damaged: it does not wait for open files."""
    run("mount", "-o", "remount,abort", where)


def _leave(path: Path, left: int) -> None:
    """Another program's file, which leaves so many bytes free."""
    found = os.statvfs(path.parent)
    _allocate(path, found.f_bavail * found.f_frsize - left)


def _allocate(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _empty(path: Path) -> None:
    """btrfs gives a quota back with its next transaction; the other file systems need no sync."""
    path.unlink()
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    run("sync", "-f", path.parent)


def _use_up_inodes(folder: Path) -> None:
    folder.mkdir()
    for number in range(100_000):
        try:
            (folder / str(number)).touch()
        except OSError:
            return
    raise ValueError("the file system has more inodes than it was to have")


def _give_back_inodes(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
