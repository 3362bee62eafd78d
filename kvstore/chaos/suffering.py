"""Jobs on a device that fails: nothing is acknowledged that it did not keep, what it still gives is served."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path
from typing import Any

from kvstore.chaos import records
from kvstore.chaos.journal import Journal, Word
from kvstore.chaos.load import MIB, SEGMENT_BYTES
from kvstore.chaos.mounts import wait
from kvstore.clock import SystemClock
from kvstore.errors import DeviceError, KvstoreError, NoSpace
from kvstore.store import open_log
from kvstore.store.base import Place, RecordLog

BUDGET_BYTES = 12 * MIB
RETURN_SECONDS_MAX = 5.0
_BATCH = 8
_BATCHES = 24
_ATTEMPTS = 6
_RETRY_SECONDS = 0.02
_FIBMAP = 1
_FIGETBSZ = 2


class _Work:
    """A store on the failing device, and what it should give."""

    def __init__(self, arguments: dict[str, Any], journal: Journal) -> None:
        self.journal = journal
        self.log, recovery = _open(arguments)
        self.places: dict[int, Place] = {}
        for found in recovery.records:
            number = records.number_of(found.key)
            if number is not None:
                self.places[number] = found.place
        self.next_number = arguments["first"]
        self.trouble: list[str] = []

    def append(self) -> None:
        first = self.next_number
        last = first + _BATCH if first >= records.NAMESPACES else records.NAMESPACES
        self.journal.say(Word.TRY, (first, last))
        self.next_number = last
        places = self.log.append([records.record_of(n) for n in range(first, last)])
        self.places.update(zip(range(first, last), places, strict=True))
        self.journal.say(Word.DONE, (first, last))

    def expect_refusals(self, fault: str) -> int:
        """Appends that should fail. Those that were acknowledged nevertheless are trouble."""
        refused = 0
        for _ in range(_ATTEMPTS):
            try:
                self.append()
            except (DeviceError, NoSpace):
                refused += 1
        if refused < _ATTEMPTS:
            self.trouble.append(
                f"{_ATTEMPTS - refused} of {_ATTEMPTS} appends were acknowledged while every {fault} failed"
            )
        return refused

    def expect_reads(self, when: str, numbers: list[int]) -> None:
        answers = self.log.read([records.wanted(n, self.places[n]) for n in numbers])
        bad = [n for n, answer in zip(numbers, answers, strict=True) if answer != records.payload_of(n)]
        if bad:
            self.trouble.append(f"{when}: {len(bad)} of {len(numbers)} records did not give their bytes")

    def failed_reads(self, numbers: list[int]) -> int:
        """Reads one by one on failing places: an error or a miss is right, bytes must be the right ones."""
        failed = 0
        for number in numbers:
            try:
                [answer] = self.log.read([records.wanted(number, self.places[number])])
            except DeviceError:
                failed += 1
                continue
            if answer is None:
                failed += 1
            elif answer != records.payload_of(number):
                self.trouble.append(f"record {number} was read with wrong bytes from a failing device")
        return failed

    def seconds_until_written(self) -> float:
        begun = time.monotonic()
        while True:
            try:
                self.append()
            except KvstoreError as error:
                if time.monotonic() - begun > RETURN_SECONDS_MAX:
                    self.trouble.append(
                        f"still refused {RETURN_SECONDS_MAX:g} s after the device was well: {error}"
                    )
                    return time.monotonic() - begun
                wait(_RETRY_SECONDS)
            else:
                return time.monotonic() - begun


def fill_calmly(arguments: dict[str, Any], opened: Any) -> int:
    """Fill several segments while the device is well; how many records there are."""
    with Journal(Path(arguments["journal"])) as journal:
        work = _Work(arguments, journal)
        opened()
        for _ in range(2 * _BATCHES):
            work.append()
        work.log.close()
        return len(work.places)


def suffer_writes(arguments: dict[str, Any], opened: Any) -> dict[str, Any]:
    """arguments: directory, journal, first, switch (a file), fault ("write" or "flush"), returns (whether the file
    system survives the fault, so that writing must come back by itself), shuts_down (whether the file system then
    refuses reads too)."""
    switch = Path(arguments["switch"])
    with Journal(Path(arguments["journal"])) as journal:
        work = _Work(arguments, journal)
        opened()
        for _ in range(_BATCHES):
            work.append()
        numbers = list(work.places)
        figures: dict[str, Any] = {}
        switch.write_text(arguments["fault"] + "\n")
        try:
            figures["refusals"] = work.expect_refusals(arguments["fault"])
            work.expect_reads(f"while every {arguments['fault']} failed", numbers)
        except DeviceError:
            if not arguments["shuts_down"]:
                raise
            figures["reads_after_it_shut_down"] = 0
        finally:
            switch.unlink()
        if arguments["returns"]:
            figures["return_seconds"] = work.seconds_until_written()
            work.append()
            work.expect_reads("when the device was well again", list(work.places))
        figures["device_errors"] = work.log.counters().get("device_errors", 0)
        return {"figures": figures, "trouble": work.trouble}


def suffer_reads(arguments: dict[str, Any], opened: Any) -> dict[str, Any]:
    """One segment's blocks cannot be read. arguments: directory, journal, first, switch, device (the file below the
    mount, whose cached bytes are dropped)."""
    switch, store = Path(arguments["switch"]), Path(arguments["directory"])
    with Journal(Path(arguments["journal"])) as journal:
        work = _Work(arguments, journal)
        opened()
        segments = sorted({place.segment_id for place in work.places.values()})
        sick = segments[len(segments) // 2]
        numbers = [n for n, place in work.places.items() if place.segment_id == sick]
        others = [n for n in work.places if n not in set(numbers)]
        drop_caches(store, Path(arguments["device"]))
        switch.write_text("".join(f"read {a} {b}\n" for a, b in _extents(_segment_file(store, sick))))
        try:
            failed = work.failed_reads(numbers)
            work.expect_reads("while another segment could not be read", others)
        finally:
            switch.unlink()
        if not failed:
            work.trouble.append(
                "no read failed although a whole segment could not be read: nothing was tried"
            )
        work.append()
        healed = work.failed_reads(numbers)
        work.log.close()
        figures = {"failed_reads": failed, "still_failing_when_well": healed, "read_meanwhile": len(others)}
        return {"figures": figures, "trouble": work.trouble}


def try_start(arguments: dict[str, Any], opened: Any) -> str:
    """The code of the error with which the store refuses to open while the switch says so; empty when it opens."""
    switch = Path(arguments["switch"])
    drop_caches(Path(arguments["directory"]), Path(arguments["device"]))
    switch.write_text(arguments["fault"] + "\n")
    try:
        log, _ = _open(arguments)
    except KvstoreError as error:
        return error.code
    finally:
        switch.unlink()
    log.close()
    return ""


def drop_caches(store: Path, device: Path) -> None:
    """Forget clean bytes of the store's files, and of the file that the loop device lies on."""
    for path in (*store.iterdir(), device):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _open(arguments: dict[str, Any]) -> tuple[RecordLog, Any]:
    return open_log(
        arguments["directory"], budget_bytes=BUDGET_BYTES, segment_bytes=SEGMENT_BYTES, clock=SystemClock()
    )


def _segment_file(store: Path, segment_id: int) -> Path:
    """The file whose name carries the number, decimal or hexadecimal."""
    for path in store.glob("segment-*.log"):
        digits = path.stem.removeprefix("segment-")
        if int(digits, 16) == segment_id or (digits.isdigit() and int(digits) == segment_id):
            return path
    raise ValueError(f"no file of segment {segment_id} among {sorted(p.name for p in store.iterdir())}")


def _extents(path: Path) -> list[tuple[int, int]]:
    """Where a file's bytes lie on its device: [first, last) in bytes, neighbours joined."""
    found: list[tuple[int, int]] = []
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = struct.unpack("i", fcntl.ioctl(descriptor, _FIGETBSZ, struct.pack("i", 0)))[0]
        for index in range(-(-os.fstat(descriptor).st_size // size)):
            block = struct.unpack("I", fcntl.ioctl(descriptor, _FIBMAP, struct.pack("I", index)))[0]
            if not block:
                continue
            if found and found[-1][1] == block * size:
                found[-1] = (found[-1][0], (block + 1) * size)
            else:
                found.append((block * size, (block + 1) * size))
    finally:
        os.close(descriptor)
    return found
