"""The catalogue's rows through a process of its own: what kills that process is damage to the file, and not the end of
the service."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import crc32c
import lmdb

from kvstore.errors import DeviceError
from kvstore.store import catalog_rows
from kvstore.store.device import translated

ReadRows = Callable[[Path], dict[bytes, bytes] | None]
"""All rows of a catalogue's file, each verified, or None when the file is damaged. Raises DeviceError when the moment is
bad, which says nothing about the file."""

DEADLINE_SECONDS = 30.0
PATIENCE = 4
"""A reader that was too slow is started once more and may take so many times as long."""
SLOWEST_BYTES_PER_SECOND = 16 << 20
"""A reader may take so long, and the time that its file takes at this rate."""

PROGRAM = Path(catalog_rows.__file__)
_ENDED_BY_DAMAGE = frozenset({signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
_PIPE_BYTES = 1 << 20
_PIECE_BYTES = 4 << 20
_MESSAGE_BYTES = 4096


def read_here(path: Path) -> dict[bytes, bytes] | None:
    """ReadRows in this process: for tests and tools that may die."""
    try:
        with translated("read the catalogue", str(path)):
            return {key: bytes(value) for key, value in catalog_rows.rows(str(path))}
    except catalog_rows.CatalogDamaged:
        return None


def read_in_child(
    path: Path, *, program: Path = PROGRAM, deadline_seconds: float = DEADLINE_SECONDS
) -> dict[bytes, bytes] | None:
    """ReadRows in a process that lives for this call, at most until its deadline, and once more with a longer one. Being
    slow is no damage: DeviceError then."""
    with translated("examine", str(path)):
        seconds = deadline_seconds + path.stat().st_size / SLOWEST_BYTES_PER_SECOND
    for limit in (seconds, PATIENCE * seconds):
        with suppress(TimeoutError):
            return _read_within(limit, path, program)
    raise DeviceError(
        f"reading the catalogue {path} was too slow: it took more than {seconds:.0f} s, and more than "
        f"{PATIENCE * seconds:.0f} s the second time; nothing was removed: start again when the machine is less busy, or "
        f"write it anew with kvstore rebuild-index --dir {path.parent}, which loses last uses"
    )


def _read_within(seconds: float, path: Path, program: Path) -> dict[bytes, bytes] | None:
    """Raises TimeoutError when the reader takes longer."""
    with _reader(path, program) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            child.kill()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()
        with suppress(OSError):  # a narrow pipe is only slower
            fcntl.fcntl(child.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        try:
            rows = _receive(child.stdout)
            message = child.stderr.read(_MESSAGE_BYTES).decode("utf-8", "replace").strip()
            code = child.wait()
        finally:
            timer.cancel()
    if code == catalog_rows.WHOLE and rows is not None:
        return rows
    if late.is_set():
        raise TimeoutError
    if code == catalog_rows.DAMAGED:
        return None
    if -code in _ENDED_BY_DAMAGE:
        # A page that the device cannot read ends the reader in the same way: then the device says so here.
        _read_through(path)
        return None
    if code == catalog_rows.REFUSED and message.isdigit():
        raise DeviceError(f"cannot read the catalogue {path}: {os.strerror(int(message))}; start again")
    told = message.splitlines()[-1] if message else "it said nothing"
    raise DeviceError(f"the reader of the catalogue {path} ended with code {code} ({told}); start again")


@contextmanager
def _reader(path: Path, program: Path) -> Iterator[subprocess.Popen[bytes]]:
    # The folders that hold the packages: without `site` the interpreter starts in a fraction of its time.
    folders = {str(Path(str(package.__file__)).parent.parent) for package in (lmdb, crc32c)}
    with translated("start the reader of the catalogue", str(path)):
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(program), str(path), *sorted(folders)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    with child:
        try:
            yield child
        finally:
            child.kill()


def _receive(source: IO[bytes]) -> dict[bytes, bytes] | None:
    """Rows until the end marker; None when the stream ends before it."""
    rows: dict[bytes, bytes] = {}
    lengths = catalog_rows.LENGTHS
    while True:
        head = source.read(lengths.size)
        if len(head) < lengths.size:
            return None
        key_bytes, value_bytes = lengths.unpack(head)
        if not key_bytes:
            return rows
        key, value = source.read(key_bytes), source.read(value_bytes)
        if len(key) < key_bytes or len(value) < value_bytes:
            return None
        rows[key] = value


def _read_through(path: Path) -> None:
    """Raise DeviceError when the device cannot read the file."""
    with translated("read the catalogue", str(path)), path.open("rb", buffering=0) as file:
        while file.read(_PIECE_BYTES):
            pass
