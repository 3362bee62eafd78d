"""Every way in which a file system takes no more: a named refusal at once, reads go on, writing comes back by itself."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore.chaos.base import Check, Outcome, Progress, undisturbed
from kvstore.chaos.inspect import inspect
from kvstore.chaos.journal import read_journal
from kvstore.chaos.ledger import Ledger
from kvstore.chaos.load import MIB
from kvstore.chaos.mounts import FileSystem, make_file_system, mounted, mounted_memory
from kvstore.chaos.nursery import Nursery
from kvstore.chaos.starving import BUDGET_BYTES, REFUSAL_SECONDS_MAX, resume, starve, try_start
from kvstore.chaos.tools import need_mounts, run

_SIZE = 48 * MIB
_LEFT = 12 * MIB
_BTRFS_SIZE = 160 * MIB
_QUOTA = 40 * MIB

LEGEND = {
    "refusals": "writes tried in a row while nothing could be taken, and refused by name",
    "refused_in_ms": "milliseconds within which nine of ten of those were refused",
    "read_rate_share": "reading during the shortage beside reading before it: 1 is as fast, 0.5 half as fast",
    "return_seconds": "seconds until a write was taken again once there was room, or, on ext4 that went read-only, "
    "from the next start on",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One way to run out. place: mounts below a scratch folder and gives the folder to work in."""

    name: str
    place: Callable[[Path], AbstractContextManager[Path]]
    shortage: str = "file"
    size: int = _LEFT


def cases() -> list[Case]:
    return [
        Case("ENOSPC on tmpfs", _memory),
        Case("ENOSPC on ext4", _ext4),
        Case("ENOSPC on xfs", _xfs),
        Case("no inodes on ext4", _few_inodes, "inodes"),
        Case("EFBIG on ext4", _ext4, "file size"),
        Case("EDQUOT on btrfs", _quota, "quota", _QUOTA - _LEFT),
        Case("EROFS on ext4", _ext4, "read-only"),
    ]


def run_out(*, seed: int, scratch: Path, progress: Progress, check: Check = undisturbed) -> Outcome:
    """Every case once."""
    need_mounts()
    outcome = Outcome("nospace", seed, "cases", legend=LEGEND)
    begun = time.monotonic()
    chosen = cases()
    random.Random(seed).shuffle(chosen)
    with Nursery(check) as nursery:
        for case in chosen:
            if case.place is _quota and (lack := _no_quota()):
                outcome.figures[case.name] = f"not tried: {lack}"
                continue
            progress(case.name)
            if case.shortage == "read-only":
                _read_only(nursery, case, scratch, outcome)
            else:
                _one_case(nursery, case, scratch, outcome)
            outcome.rounds += 1
    outcome.seconds = time.monotonic() - begun
    return outcome


def _one_case(nursery: Nursery, case: Case, scratch: Path, outcome: Outcome) -> None:
    journal = scratch / "journal"
    journal.unlink(missing_ok=True)
    with case.place(scratch) as where:
        ended = nursery.run(starve, _arguments(case, where, journal, returns=True))
        _judge(case, ended.trouble, ended.result, outcome)
        _hold_to_ledger(nursery, case, where / "store", journal, outcome)


def _read_only(nursery: Nursery, case: Case, scratch: Path, outcome: Outcome) -> None:
    """A file system that went read-only comes back with its next mount only, so the store is opened again."""
    image, target, journal = scratch / "image", scratch / "mount", scratch / "journal"
    journal.unlink(missing_ok=True)
    with case.place(scratch) as where:
        ended = nursery.run(starve, _arguments(case, where, journal, returns=False))
        _judge(case, ended.trouble, ended.result, outcome)
    store = target / "store"
    with mounted(image, target):
        before = _contents(store)
    with mounted(image, target, "ro"):
        refusal = nursery.run(try_start, {"directory": str(store)})
        if refusal.result not in ("NO_SPACE", "DEVICE_ERROR"):
            outcome.blame(
                case.name, [f"a start on a read-only file system gave {refusal.result or refusal.trouble!r}"]
            )
        if _contents(store) != before:
            outcome.blame(case.name, ["a start on a read-only file system changed what is there"])
    ledger = Ledger()
    ledger.apply(read_journal(journal))
    with mounted(image, target):
        again = nursery.run(
            resume, {"directory": str(store), "journal": str(journal), "first": ledger.next_number}
        )
        _judge(case, again.trouble, again.result, outcome)
        _hold_to_ledger(nursery, case, store, journal, outcome)


def _arguments(case: Case, where: Path, journal: Path, *, returns: bool) -> dict[str, object]:
    return {
        "directory": str(where / "store"),
        "journal": str(journal),
        "shortage": case.shortage,
        "where": str(where),
        "bytes": case.size,
        "returns": returns,
    }


def _judge(case: Case, trouble: str, result: dict[str, object] | None, outcome: Outcome) -> None:
    if trouble or result is None:
        outcome.blame(case.name, [f"the load {trouble or 'gave no answer'}"])
        return
    outcome.blame(case.name, list(result["trouble"]))  # type: ignore[call-overload]
    figures = dict(result["figures"])  # type: ignore[call-overload]
    refused = figures.pop("refused_seconds", [])
    if refused:
        slow = statistics.quantiles(refused, n=10)[8] if len(refused) > 1 else refused[0]
        figures |= {"refusals": len(refused), "refused_in_ms": round(1000 * slow, 2)}
        # Nine of ten: the machine may be busy with something else for a moment.
        if slow > REFUSAL_SECONDS_MAX:
            outcome.blame(
                case.name, [f"refusals took {1000 * slow:.0f} ms; allowed: {1000 * REFUSAL_SECONDS_MAX:.0f}"]
            )
    known = outcome.figures.setdefault(case.name, {})
    known.update({name: round(value, 3) for name, value in figures.items()})


def _hold_to_ledger(nursery: Nursery, case: Case, store: Path, journal: Path, outcome: Outcome) -> None:
    ledger = Ledger()
    ledger.apply(read_journal(journal))
    found = inspect(nursery, store, budget=BUDGET_BYTES)
    outcome.blame(case.name, found.violations(ledger))
    outcome.acknowledged += ledger.acknowledged
    outcome.checked += len(found.seen)


def _contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.iterdir()) if path.is_file()}


def _memory(scratch: Path) -> AbstractContextManager[Path]:
    return mounted_memory(scratch / "mount", size=_SIZE)


@contextmanager
def _ext4(scratch: Path) -> Iterator[Path]:
    make_file_system(FileSystem.EXT4, scratch / "image", size=_SIZE)
    with mounted(scratch / "image", scratch / "mount") as where:
        yield where


@contextmanager
def _xfs(scratch: Path) -> Iterator[Path]:
    make_file_system(FileSystem.XFS, scratch / "image", size=_SIZE)
    with mounted(scratch / "image", scratch / "mount") as where:
        yield where


@contextmanager
def _few_inodes(scratch: Path) -> Iterator[Path]:
    make_file_system(FileSystem.EXT4, scratch / "image", size=_SIZE, options=("-N", "64"))
    with mounted(scratch / "image", scratch / "mount") as where:
        yield where


@contextmanager
def _quota(scratch: Path) -> Iterator[Path]:
    """A quota on a subvolume: unlike those of ext4 and xfs it holds for root too."""
    image = scratch / "image"
    with image.open("wb") as file:
        file.truncate(_BTRFS_SIZE)
    run("mkfs.btrfs", "-q", "-f", image)
    with mounted(image, scratch / "mount") as where:
        volume = where / "volume"
        run("btrfs", "subvolume", "create", volume)
        run("btrfs", "quota", "enable", where)
        run("btrfs", "qgroup", "limit", str(_QUOTA), volume)
        yield volume


def _no_quota() -> str:
    if "btrfs" not in Path("/proc/filesystems").read_text(encoding="ascii"):
        return "this kernel has no btrfs, whose quotas need no other tools"
    return ""
