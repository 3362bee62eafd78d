"""A device that answers EIO: to writes, to flushes, to reads, and at the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.chaos.base import ChaosFailed, Check, Outcome, Progress, undisturbed
from kvstore.chaos.inspect import inspect
from kvstore.chaos.journal import read_journal
from kvstore.chaos.ledger import Ledger
from kvstore.chaos.load import MIB
from kvstore.chaos.mounts import FileSystem, make_file_system, mounted, served
from kvstore.chaos.nursery import Ended, Nursery
from kvstore.chaos.suffering import BUDGET_BYTES, fill_calmly, suffer_reads, suffer_writes, try_start
from kvstore.chaos.tools import need_block_devices

_SIZE = 48 * MIB
# Without a journal the file system itself survives a failed write, and writing can come back without a new mount.
_NO_JOURNAL = ("-O", "^has_journal", "-e", "continue")

LEGEND = {
    "refusals": "writes tried while the device failed, and refused by name",
    "return_seconds": "seconds until a write was taken again once the device was well",
    "device_errors": "errors of the device that the store counted",
    "reads_after_it_shut_down": "reads answered after the file system had shut itself down: it answers none",
    "failed_reads": "records of the segment that could not be read, each a miss or an error",
    "still_failing_when_well": "those of them that are still a miss or an error once the device is well",
    "read_meanwhile": "records of other segments, read right at the same time",
    "read fails": "the start's answer while no read succeeds",
    "write fails": "the start's answer while no write succeeds",
    "flush fails": "the start's answer while no flush succeeds",
}


@dataclass(slots=True)
class _Bench:
    nursery: Nursery
    scratch: Path
    outcome: Outcome
    device: Path = Path()

    @property
    def store(self) -> Path:
        return self.scratch / "mount" / "store"

    @property
    def journal(self) -> Path:
        return self.scratch / "journal"

    @property
    def switch(self) -> Path:
        return self.scratch / "switch"

    @contextmanager
    def mount(self) -> Iterator[None]:
        with mounted(self.device, self.scratch / "mount"):
            yield

    def ledger(self) -> Ledger:
        ledger = Ledger()
        ledger.apply(read_journal(self.journal))
        return ledger

    def arguments(self, **more: object) -> dict[str, Any]:
        return {
            "directory": str(self.store),
            "journal": str(self.journal),
            "switch": str(self.switch),
            "device": str(self.device),
            "first": self.ledger().next_number,
            **more,
        }

    def judge(self, name: str, ended: Ended) -> None:
        if ended.trouble or ended.result is None:
            self.outcome.blame(name, [f"the load {ended.trouble or 'gave no answer'}"])
            return
        self.outcome.blame(name, ended.result["trouble"])
        figures = {key: round(value, 3) for key, value in ended.result["figures"].items()}
        self.outcome.figures.setdefault(name, {}).update(figures)

    def hold_to_ledger(self, name: str) -> None:
        ledger = self.ledger()
        found = inspect(self.nursery, self.store, budget=BUDGET_BYTES)
        self.outcome.blame(name, found.violations(ledger))
        self.outcome.checked += len(found.seen)


def failing_device(*, seed: int, scratch: Path, progress: Progress, check: Check = undisturbed) -> Outcome:
    """Every case once."""
    need_block_devices()
    outcome = Outcome("eio", seed, "cases", legend=LEGEND)
    begun = time.monotonic()
    with Nursery(check) as nursery:
        for name, case in CASES.items():
            progress(name)
            case(_Bench(nursery, scratch, outcome), name)
            outcome.rounds += 1
    outcome.seconds = time.monotonic() - begun
    return outcome


@contextmanager
def _device(bench: _Bench, kind: FileSystem, options: tuple[str, ...] = ()) -> Iterator[None]:
    bench.journal.unlink(missing_ok=True)
    bench.switch.unlink(missing_ok=True)
    image = bench.scratch / "image"
    make_file_system(kind, image, size=_SIZE, options=options)
    with served(image, bench.scratch, switch=bench.switch) as device:
        bench.device = device
        yield
        bench.outcome.acknowledged += bench.ledger().acknowledged


def _writes(
    kind: FileSystem, fault: str, options: tuple[str, ...], *, returns: bool
) -> Callable[[_Bench, str], None]:
    def case(bench: _Bench, name: str) -> None:
        with _device(bench, kind, options):
            with bench.mount():
                ended = bench.nursery.run(
                    suffer_writes,
                    bench.arguments(fault=fault, returns=returns, shuts_down=kind is FileSystem.XFS),
                )
                bench.judge(name, ended)
            with bench.mount():
                bench.hold_to_ledger(name)

    return case


def _reads(bench: _Bench, name: str) -> None:
    with _device(bench, FileSystem.EXT4):
        with bench.mount():
            _write_something(bench, name)
        with bench.mount():
            bench.judge(name, bench.nursery.run(suffer_reads, bench.arguments()))
            bench.hold_to_ledger(name)


def _start(bench: _Bench, name: str) -> None:
    """Started while nothing can be read, then while nothing can be written: refused, and nothing is erased."""
    with _device(bench, FileSystem.EXT4, _NO_JOURNAL):
        with bench.mount():
            _write_something(bench, name)
        for fault in ("read", "write", "flush"):
            with bench.mount():
                names = _names(bench.store)
            with bench.mount():
                ended = bench.nursery.run(try_start, bench.arguments(fault=fault))
                code = ended.result if ended.result is not None else ended.trouble
                bench.outcome.figures.setdefault(name, {})[f"{fault} fails"] = code or "opened"
                if ended.trouble or (fault == "read" and code != "DEVICE_ERROR"):
                    bench.outcome.blame(name, [f"a start while every {fault} fails gave {code!r}"])
            with bench.mount():
                if gone := names - _names(bench.store):
                    bench.outcome.blame(name, [f"a start while every {fault} fails erased {sorted(gone)}"])
                bench.hold_to_ledger(name)


def _write_something(bench: _Bench, name: str) -> None:
    """Enough for several segments; a fault that never comes."""
    ended = bench.nursery.run(fill_calmly, bench.arguments())
    if ended.trouble:
        raise ChaosFailed(f"{name}: writing on a device that is well failed: {ended.trouble}")


def _names(store: Path) -> set[str]:
    """The log's files; the rest may come and go."""
    return {path.name for path in store.iterdir() if path.name.startswith(("segment-", "identity"))}


CASES: dict[str, Callable[[_Bench, str], None]] = {
    "writes fail": _writes(FileSystem.EXT4, "write", _NO_JOURNAL, returns=True),
    "flushes fail": _writes(FileSystem.EXT4, "flush", _NO_JOURNAL, returns=True),
    "writes fail below a journal": _writes(FileSystem.EXT4, "write", (), returns=False),
    "flushes fail below xfs": _writes(FileSystem.XFS, "flush", (), returns=False),
    "reads of one segment fail": _reads,
    "started on a failing device": _start,
}
