"""Shows that the tests of the SSD engine have teeth: `python ops/mutations.py` breaks one promise of the engine at a
time, in a copy of the tree, and names the test that turned red.

Exit 0 only when every mutation is killed. A mutation whose text is not in the tree any more is an error, and so is a test
that fails without any mutation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_SECONDS_MAX = 300

FAULTS = "tests/sim/test_store_faults.py"
CALLS = "tests/sim/test_store_every_call.py"
ORDER = "tests/sim/test_store_order.py"
FORMAT = "tests/property/test_record_format.py"
WRITER = "tests/unit/test_service_writer.py"


@dataclass(frozen=True)
class Mutation:
    """In `file`, `old`, which is there once, becomes `new`; then one of `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """`killed_by`: the first test that failed; empty when none did. `error`: why nothing can be said."""

    name: str
    killed_by: str
    seconds: float
    error: str = ""


STORE = "kvstore/store/"
WRITES = """\
            with closing(self._lanes.move(self._transfers(pieces, begin, entries))) as moved:
                for transfer in moved:
                    if isinstance(transfer.tag, memoryview):
                        self._buffers.give_back(transfer.tag)
"""
SYNC = "            self._file.sync()\n"
MUTATIONS = (
    Mutation(
        "drop the sync of an appended batch",
        STORE + "writer.py",
        WRITES + SYNC,
        WRITES,
        (ORDER, FAULTS),
    ),
    Mutation(
        "drop the sync of a new segment's header",
        STORE + "writer.py",
        "        write_pages(file, 0, [page])\n        file.sync()\n",
        "        write_pages(file, 0, [page])\n",
        (ORDER, FAULTS),
    ),
    Mutation(
        "drop the sync of a new segment's name",
        STORE + "writer.py",
        "        device.rename(before, segment.name)\n        device.sync_names()\n",
        "        device.rename(before, segment.name)\n",
        (ORDER, FAULTS),
    ),
    Mutation(
        "drop the sync of a full segment's footer",
        STORE + "writer.py",
        "            else:\n                self._file.sync()\n",
        "            else:\n                pass\n",
        (ORDER,),
    ),
    Mutation(
        "drop the sync of the names that went",
        STORE + "log.py",
        "                self._store.device.sync_names()\n            except",
        "                pass\n            except",
        (ORDER, FAULTS),
    ),
    Mutation(
        "drop the sync of the identity",
        STORE + "identity.py",
        "        file.sync()\n        device.rename",
        "        device.rename",
        (ORDER,),
    ),
    Mutation(
        "sync before the data is written",
        STORE + "writer.py",
        WRITES + SYNC,
        SYNC + WRITES,
        (ORDER, FAULTS),
    ),
    Mutation(
        "trust a second sync after one that failed",
        STORE + "writer.py",
        WRITES + SYNC,
        WRITES + "            try:\n                self._file.sync()\n"
        "            except DeviceError:\n                self._file.sync()\n",
        (FAULTS,),
    ),
    Mutation(
        "go on in a segment whose write failed",
        STORE + "appender.py",
        "            self._open = None\n            self._abandon(target)\n            raise\n",
        "            target.failed = False\n            raise\n",
        (FAULTS,),
    ),
    Mutation(
        "ignore short writes",
        STORE + "device.py",
        "        if written < sum(map(len, rest)):\n            written -= written % _PAGE\n",
        "        written = sum(map(len, rest))\n",
        (FAULTS, CALLS),
    ),
    Mutation(
        "skip the payload's checksums",
        STORE + "format.py",
        "memoryview(payload).nbytes == header.length and xxhash.xxh3_64_intdigest(payload) == header.xxh3_64",
        "memoryview(payload).nbytes == header.length",
        (FORMAT, FAULTS),
    ),
    Mutation(
        "skip the checksum of the record's header",
        STORE + "format.py",
        "    if not _sealed_by_crc(data):\n        return Verdict.CORRUPT\n    (\n",
        "    (\n",
        (FORMAT,),
    ),
    Mutation(
        "skip the checksum of the table of slices",
        STORE + "format.py",
        "    if crc32c(table) != header.table_crc32c:\n        return Verdict.CORRUPT\n",
        "",
        (FORMAT,),
    ),
    Mutation(
        "skip the check of slices",
        STORE + "reader.py",
        "    if not slices_hold(slices, first, around):\n        return None\n",
        "",
        (ORDER,),
    ),
    Mutation(
        "skip the salt",
        STORE + "format.py",
        "    if identity.salt and salt != identity.salt:\n        return Verdict.CORRUPT\n",
        "",
        (FORMAT,),
    ),
    Mutation(
        "skip the segment id",
        STORE + "format.py",
        "    if (tag, segment_id, own_offset) != (identity.store_tag, identity.segment_id, offset):\n",
        "    if (tag, own_offset) != (identity.store_tag, offset):\n",
        (FORMAT,),
    ),
    Mutation(
        "skip the offset",
        STORE + "format.py",
        "    if (tag, segment_id, own_offset) != (identity.store_tag, identity.segment_id, offset):\n",
        "    if (tag, segment_id) != (identity.store_tag, identity.segment_id):\n",
        (FORMAT,),
    ),
    Mutation(
        "skip the key",
        STORE + "reader.py",
        "record.header.key != each.key or record.header.kind != each.kind",
        "record.header.kind != each.kind",
        (ORDER,),
    ),
    Mutation(
        "forget the second look",
        STORE + "reader.py",
        "_whole(segment.identity, item, data) or self._look_again(segment, file, run, item)",
        "_whole(segment.identity, item, data)",
        (FAULTS,),
    ),
    Mutation(
        "reuse a segment before its readers end",
        STORE + "choice.py",
        "segment.state is State.CLOSED and segment.readers == 0 and not segment.has_live()",
        "segment.state is State.CLOSED and not segment.has_live()",
        (ORDER,),
    ),
    Mutation(
        "remove a segment before the catalogue says dead",
        STORE + "log.py",
        "            self._store.write_rows(rows_of_dead(victims))\n",
        "",
        (ORDER, FAULTS),
    ),
    Mutation(
        "offer a spare before the names are synced",
        STORE + "spares.py",
        "    segment.name = name\n",
        "    segment.name = name\n    disk.spares[name] = disk.segment_bytes\n",
        (ORDER,),
    ),
    Mutation(
        "enter the row of a sealed segment before its footer",
        STORE + "appender.py",
        "        try:\n            footer, file_bytes = target.seal()\n",
        '        self._store.write_rows({key_of(b"S", target.segment.segment_id): segment_row('
        "SegmentRow(target.segment.identity.salt, target.segment.allocated, SEALED))})\n"
        "        try:\n            footer, file_bytes = target.seal()\n",
        (ORDER,),
    ),
    Mutation(
        "acknowledge although the sync failed",
        STORE + "writer.py",
        "the bytes that the first one lost.\n            self.failed = True\n            raise\n",
        "the bytes that the first one lost.\n            self.failed = True\n",
        (FAULTS,),
    ),
    Mutation(
        "take one segment more than the budget",
        STORE + "space.py",
        "        return self.unused_bytes() + self.spare_bytes() + given_back - reserve\n",
        "        return self.unused_bytes() + self.spare_bytes() + given_back - reserve + 2 * self.segment_bytes\n",
        (FAULTS,),
    ),
    Mutation(
        "let the catalogue grow into the budget's rest",
        STORE + "space.py",
        "        return self.budget_bytes - taken - rest - kept\n",
        "        return self.budget_bytes\n",
        (ORDER,),
    ),
    Mutation(
        "forget a clear whose records a failed append left",
        STORE + "appender.py",
        "                    target.segment.note_written(\n",
        "                    (lambda *_: None)(\n",
        (FAULTS,),
    ),
    Mutation(
        "give a copy a sequence of its own",
        STORE + "cleaning.py",
        "        head.sequence,\n",
        "        head.sequence + 1_000_000,\n",
        (FAULTS,),
    ),
    Mutation(
        "expire by the time of writing only",
        STORE + "recovery.py",
        '    columns.last_use[at] = np.maximum(entries["created_ms"] / 1000, used)\n',
        '    columns.last_use[at] = entries["created_ms"] / 1000\n',
        (ORDER,),
    ),
    Mutation(
        "write a child before its parent",
        "kvstore/service/writer.py",
        "            for part in await self._work(count, lambda: self._parts(batch)):\n",
        "            for part in reversed(await self._work(count, lambda: self._parts(batch))):\n",
        (WRITER,),
    ),
    Mutation(
        "build on bytes that only memory holds",
        STORE + "loading.py",
        "    at.file.forget_cached(0, 0)\n",
        "",
        (FAULTS,),
    ),
)


def applied(text: str, mutation: Mutation) -> str:
    """The file's text, broken. Raises ValueError when the mutation's text is not there exactly once."""
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(
            f"{mutation.file} has its text {count} times, not once; bring the mutation up to date"
        )
    return text.replace(mutation.old, mutation.new)


def copy_tree(target: Path) -> None:
    """The files that git knows or would, as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def first_failure(tree: Path, tests: tuple[str, ...]) -> str:
    """The first test that fails there, "" when none does. Raises RuntimeError when they could not be run."""
    paths = os.pathsep.join(str(tree / part) for part in ("", "workers", "clients"))
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests]
    environment = {**os.environ, "PYTHONPATH": paths}  # noqa: TID251 -- handed on, not read
    try:
        run = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TEST_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the tests did not end within {TEST_SECONDS_MAX} s") from error
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if run.returncode == 0:
        return ""
    if run.returncode == 1 and failed is not None:
        return failed[1]
    raise RuntimeError((run.stdout + run.stderr).strip().splitlines()[-1])


def outcome_of(mutation: Mutation) -> Outcome:
    begun = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="kvstore-mutation-") as folder:
            tree = Path(folder)
            copy_tree(tree)
            file = tree / mutation.file
            file.write_text(applied(file.read_text(), mutation))
            killed_by = first_failure(tree, mutation.tests)
    except (ValueError, RuntimeError, OSError) as error:
        return Outcome(mutation.name, "", time.monotonic() - begun, str(error))
    return Outcome(mutation.name, killed_by, time.monotonic() - begun)


def healthy() -> str:
    """The first of all tests named that fails without a mutation."""
    with tempfile.TemporaryDirectory(prefix="kvstore-mutation-") as folder:
        copy_tree(Path(folder))
        tests = dict.fromkeys(test for mutation in MUTATIONS for test in mutation.tests)
        return first_failure(Path(folder), tuple(tests))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Break the engine on purpose and see which test notices.")
    parser.add_argument("--only", metavar="NAME", help="mutations whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--jobs", type=int, default=2, help="at the same time (default 2)")
    options = parser.parse_args(argv)
    chosen = [mutation for mutation in MUTATIONS if (options.only or "") in mutation.name]
    if not chosen:
        print(f"no mutation has {options.only!r} in its name", file=sys.stderr)
        return 2
    broken = healthy() if options.only is None else ""
    if broken:
        print(f"{broken} fails without any mutation; nothing can be said", file=sys.stderr)
        return 1
    outcomes = []
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        for outcome in pool.map(outcome_of, chosen):
            outcomes.append(outcome)
            if not options.json:
                told = outcome.killed_by or (f"ERROR: {outcome.error}" if outcome.error else "SURVIVED")
                print(f"{outcome.name:<54} {outcome.seconds:5.1f} s  {told}", flush=True)
    killed = sum(bool(outcome.killed_by) for outcome in outcomes)
    if options.json:
        print(json.dumps({"mutations": [asdict(each) for each in outcomes], "killed": killed}))
    else:
        print(f"{killed} of {len(outcomes)} mutations killed")
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
