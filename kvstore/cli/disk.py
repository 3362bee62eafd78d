"""Commands about what lies on the disk: verify, rebuild-index."""

from __future__ import annotations

import argparse
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvstore.cli.output import add_json_flag, check_json_target, emit, table
from kvstore.cli.stopping import Check, stoppable
from kvstore.clock import SystemClock
from kvstore.config import environment
from kvstore.errors import ConfigError, DirectoryInUse
from kvstore.store import Recovery, open_log
from kvstore.store.base import Damage, Place, RecordLog, Space
from kvstore.store.catalog import Catalog
from kvstore.store.format import PAGE, SEGMENT_BYTES_MAX
from kvstore.store.identity import IDENTITY_NAME, refuse_foreign
from kvstore.store.rebuild import RebuiltCatalog
from kvstore.store.segment import is_spare_name, segment_id_of
from kvstore.store.space import SEGMENT_BYTES_MIN, SEGMENTS_MIN
from kvstore.units import parse_size, size_text
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore_client.failures import translated

STEP_BYTES = 32 << 20
RATE_MIN = 1 << 20
SHOWN_DAMAGES = 20
TOLD_EVERY_SECONDS = 0.2
CHECK_SECONDS = 0.2
LEAVES = "the directory is as a kill leaves it, and its next start mends that"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "read everything that is stored and check every checksum"
    verify = subparsers.add_parser(
        "verify",
        help=about,
        description=f"{about[0].upper()}{about[1:]}. Where a service runs on the directory it does so, and treats what is damaged "
        "as a miss; else the directory is opened. Exit 1 when damage was found. Opening a directory mends what "
        "it can, as a start does: what is missing, cut off or rebuilt is told by the first look at it only.",
    )
    where = verify.add_mutually_exclusive_group()
    where.add_argument("--dir", default=None, help="the store's directory (or KVSTORE_DIR)")
    where.add_argument(
        "--socket",
        default=None,
        metavar="S",
        help="a running service's kvstore.sock, or its directory, where that is not --dir",
    )
    verify.add_argument(
        "--rate",
        default=None,
        metavar="SIZE",
        help="bytes a second at most (default 100MiB where a service runs, else no limit)",
    )
    add_json_flag(verify)
    verify.set_defaults(run=run_verify)

    about = "read the log and write the index on disk anew"
    rebuild = subparsers.add_parser(
        "rebuild-index",
        help=about,
        description=f"{about[0].upper()}{about[1:]}, on a directory that no service holds. Nothing is erased when it fails. "
        "Last uses are lost with the old one: everything counts as used now.",
    )
    rebuild.add_argument("--dir", default=None, help="the directory (or KVSTORE_DIR)")
    add_json_flag(rebuild)
    rebuild.set_defaults(run=run_rebuild)


@dataclass(slots=True)
class Outcome:
    """What a verify has read until now."""

    records: int = 0
    bytes: int = 0
    bytes_total: int = 0
    damages: list[Damage] = field(default_factory=list)
    lost: int = 0
    """Records that opening the directory knew of and could not find whole: cut off, or in a segment without a footer."""
    missing_segments: int = 0
    damaged_segments: int = 0
    rescued_descriptions: int = 0
    index_rebuilt: bool = False
    """These four as opening the directory found it; see Recovery."""

    def findings(self) -> list[str]:
        """What is not as it should be, in words."""
        counted = {
            "DAMAGED": len(self.damages),
            "LOST": self.lost,
            "MISSING (segments)": self.missing_segments,
            "DAMAGED (headers or footers of segments)": self.damaged_segments,
            "descriptions of namespaces DAMAGED and written anew": self.rescued_descriptions,
        }
        found = [f"{count} {what}" for what, count in counted.items() if count]
        return [*found, "index REBUILT"] if self.index_rebuilt else found


def run_verify(args: argparse.Namespace) -> int:
    check_json_target(args)
    rate = 0 if args.rate is None else parse_size(args.rate, name="--rate")
    if args.rate is not None and rate < RATE_MIN:
        raise ConfigError(
            "too slow to end", field="--rate", value=args.rate, allowed=f"{size_text(RATE_MIN)} or more"
        )
    directory = None if args.socket else _directory(args)
    served: str | None = args.socket if directory is None else _served(directory)
    begun = time.monotonic()
    line = _Line()
    try:
        if directory is None or served is not None:
            asked = served or ""
            outcome = stoppable(
                lambda check: _followed(_verify_online(asked, rate, check), line),
                leaves="nothing is left",
            )
        else:
            outcome = stoppable(
                lambda check: _followed(_verify_offline(directory, rate, line, check), line), leaves=LEAVES
            )
    finally:
        line.clear()
    seconds = time.monotonic() - begun
    damages = outcome.damages
    found = outcome.findings()
    text = (
        f"{outcome.records:,} records, {outcome.bytes:,} bytes in {seconds:.1f} s: "
        f"{', '.join(found) or 'all whole'}"
    )
    if damages:
        rows = [(d.place.segment_id, d.place.offset, d.key.hex()[:16], d.what) for d in damages]
        text = (
            f"{table(rows[:SHOWN_DAMAGES], head=('segment', 'offset', 'key begins', 'what'))}\n"
            f"{f'and {len(rows) - SHOWN_DAMAGES} more' if len(rows) > SHOWN_DAMAGES else ''}\n{text}"
        )
        if served:
            text += "; each is a miss until the next start, and is found again when it is read after that"
    if outcome.missing_segments:
        text += "\nMISSING: the index knew them, and their files are gone with all records in them"
    if outcome.index_rebuilt:
        text += (
            "\nindex REBUILT: it was lost or damaged, and was written anew from the log; last uses are lost, and segments "
            "that went along with it cannot be counted"
        )
    emit(
        args,
        {
            "records": outcome.records,
            "bytes": outcome.bytes,
            "seconds": round(seconds, 3),
            "quarantined": bool(served and damages),
            "lost": outcome.lost,
            "missing_segments": outcome.missing_segments,
            "damaged_segments": outcome.damaged_segments,
            "rescued_descriptions": outcome.rescued_descriptions,
            "index_rebuilt": outcome.index_rebuilt,
            "damaged": [
                {
                    "segment": d.place.segment_id,
                    "offset": d.place.offset,
                    "length": d.place.length,
                    "key": d.key.hex(),
                    "what": d.what,
                }
                for d in damages
            ],
        },
        text,
    )
    return 1 if found else 0


def _followed(steps: Generator[Outcome, None, None], line: _Line) -> Outcome:
    """The last of them."""
    outcome = Outcome()
    with closing(steps):
        for outcome in steps:
            line.show(
                f"verify: {outcome.bytes >> 20:,} of {outcome.bytes_total >> 20:,} MiB, {len(outcome.damages)} damaged"
            )
    return outcome


def _verify_offline(directory: Path, rate: int, line: _Line, check: Check) -> Generator[Outcome, None, None]:
    # One that has its sockets here was asked.
    log, recovery = _open(
        directory, "kvstore verify --socket DIR, with the directory of its --sockets", line, check
    )
    begun = time.monotonic()
    with closing(log):
        outcome = Outcome(
            bytes_total=log.space().live,
            lost=recovery.damaged_records,
            missing_segments=recovery.missing_segments,
            damaged_segments=recovery.damaged_segments,
            rescued_descriptions=recovery.rescued_descriptions,
            index_rebuilt=recovery.rebuilt,
        )
        for segment_id in log.segment_ids():
            begin: int | None = 0
            while begin is not None:
                check()
                step = log.verify(segment_id, begin=begin, bytes_max=STEP_BYTES)
                outcome.records += step.records
                outcome.bytes += step.bytes
                outcome.damages += step.damages
                begin = step.next
                if rate:
                    _wait_until(begun + outcome.bytes / rate, check)
                yield outcome
        yield outcome


def _served(directory: Path) -> str | None:
    """The socket of the service that runs on the directory; None where none does, or has its sockets elsewhere."""
    path = directory / "kvstore.sock"
    with socket.socket(socket.AF_UNIX) as tried, suppress(OSError):
        tried.connect(str(path))
        return str(path)
    return None


def _wait_until(moment: float, check: Check) -> None:
    """A moment of the monotonic clock."""
    pause = threading.Event()
    while (left := moment - time.monotonic()) > 0.0:
        check()
        pause.wait(min(left, CHECK_SECONDS))


def _verify_online(where: str, rate: int, check: Check) -> Generator[Outcome, None, None]:
    path = Path(where)
    path = path / "kvstore.sock" if path.is_dir() else path
    if not path.is_socket():
        raise _nobody_listens(where)
    outcome = Outcome()
    is_done = False
    with grpc.insecure_channel(f"unix:{path.absolute()}") as channel:
        try:
            for reply in cache_pb2_grpc.AdminStub(channel).Verify(pb.VerifyRequest(bytes_per_second=rate)):
                outcome.records, outcome.bytes = reply.records, reply.bytes
                outcome.bytes_total = reply.bytes_total
                outcome.damages += [
                    Damage(Place(d.segment, d.offset, d.length), d.key, d.what) for d in reply.damages
                ]
                is_done = reply.done
                check()
                yield outcome
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not outcome.bytes_total:
                raise _nobody_listens(where) from error
            raise translated(error, what="Verify") from error
    assert is_done, "a service says when it is done"


def _nobody_listens(where: str) -> ConfigError:
    return ConfigError(
        "no service listens there",
        field="--socket",
        value=where,
        allowed="kvstore.sock of a running service, or --dir for a directory that no service holds",
    )


def run_rebuild(args: argparse.Namespace) -> int:
    check_json_target(args)
    directory = _directory(args)
    begun = time.monotonic()
    line = _Line()
    try:
        space, recovery = stoppable(lambda check: _rebuilt(directory, line, check), leaves=LEAVES)
    finally:
        line.clear()
    kinds = Counter(found.kind.name.lower() for found in recovery.records)
    found = {
        "segments": space.segments,
        "records": len(recovery.records),
        "kinds": dict(sorted(kinds.items())),
        "live_bytes": space.live,
        "dead_bytes": space.dead,
        "torn_bytes": recovery.torn_bytes,
        "damaged_records": recovery.damaged_records,
        "damaged_segments": recovery.damaged_segments,
        "seconds": round(time.monotonic() - begun, 3),
    }
    named = ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items())) or "none"
    emit(
        args,
        found,
        f"{space.segments:,} segments, {len(recovery.records):,} records ({named}), {space.live:,} bytes live in "
        f"{found['seconds']:.1f} s; {recovery.damaged_records:,} records lost, {recovery.torn_bytes:,} torn bytes; "
        "records were not read whole: kvstore verify does that",
    )
    return 0


def _rebuilt(directory: Path, line: _Line, check: Check) -> tuple[Space, Recovery]:
    catalog = RebuiltCatalog(directory)
    online = f"stop it first; it may be asked with kvstore stats --dir {directory}"
    log, recovery = _open(directory, online, line, check, catalog)
    with closing(log):
        space = log.space()
        catalog.keep()
    return space, recovery


def _directory(args: argparse.Namespace) -> Path:
    """A directory that holds a store: to look at one must not begin one."""
    name = args.dir or environment("KVSTORE_DIR")
    if not name:
        raise ConfigError(
            "no directory given",
            field="--dir",
            value="",
            allowed="--dir D or KVSTORE_DIR" + (", or --socket S" if hasattr(args, "socket") else ""),
        )
    directory = Path(name).absolute()
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "no such directory"
        raise ConfigError(what, field="--dir", value=name, allowed="a store's directory")
    with suppress(PermissionError):  # opening it says better what is wrong
        if not (directory / IDENTITY_NAME).exists():
            names = sorted(path.name for path in directory.iterdir())
            if any(segment_id_of(name) is not None for name in names):
                refuse_foreign(names, where=str(directory))
            raise ConfigError(
                "the directory holds no store", field="--dir", value=name, allowed="a store's directory"
            )
    return directory


def _open(
    directory: Path, online: str, line: _Line, check: Check, catalog: Catalog | None = None
) -> tuple[RecordLog, Recovery]:
    """The store with a budget that nothing has to leave for, and segments of the size that it has."""

    def progress(phase: str, done: int, total: int) -> None:
        check()
        line.progress(phase, done, total)

    segment_bytes, used = _sizes(directory)
    try:
        return open_log(
            directory,
            budget_bytes=2 * used + 2 * SEGMENTS_MIN * segment_bytes,
            segment_bytes=segment_bytes,
            clock=SystemClock(),
            catalog=catalog,
            progress=progress,
        )
    except DirectoryInUse as error:
        raise DirectoryInUse(f"{error}; a running service: {online}") from error


def _sizes(directory: Path) -> tuple[int, int]:
    """Bytes of a segment as this store makes them, and bytes of everything."""
    sizes = {path.name: path.stat() for path in directory.iterdir() if path.is_file()}
    spares = [status.st_size for name, status in sizes.items() if is_spare_name(name)]
    segments = [status.st_size for name, status in sizes.items() if segment_id_of(name) is not None]
    largest = max(spares or segments, default=0) // PAGE * PAGE
    used = sum(status.st_blocks * 512 for status in sizes.values())
    return min(max(largest, SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX), used


class _Line:
    """One line on a terminal's stderr that is written over."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown_at = 0.0

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self._is_terminal and now - self._shown_at >= TOLD_EVERY_SECONDS:
            self._shown_at = now
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def progress(self, phase: str, done: int, total: int) -> None:
        unit = " bytes of a segment without a footer" if phase == "records" else ""
        self.show(f"{phase}: {done:,} of {total:,}{unit}")

    def clear(self) -> None:
        if self._is_terminal and self._shown_at:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
