"""The catalogue is read in a process of its own: what ends that process is damage, and a bad moment is not."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.errors import DeviceError
from kvstore.store import catalog_child
from kvstore.store.catalog import LmdbCatalog
from kvstore.store.catalog_child import ReadRows, read_here, read_in_child

MIB = 1 << 20
ROWS = {
    **{b"F" + bytes([number]): random.Random(number).randbytes(200_000) for number in range(20)},
    **{b"S" + bytes([number]): bytes([number]) * 17 for number in range(200)},
    b"U": b"",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a catalogue of ROWS."""
    catalog = LmdbCatalog(tmp_path)
    assert not catalog.load().intact
    assert catalog.write(ROWS, bytes_max=64 * MIB)
    catalog.close()
    return tmp_path


def data_of(folder: Path) -> Path:
    return folder / LmdbCatalog.DATA_NAME


def stand_in(folder: Path, body: str) -> ReadRows:
    """A reader that is this program instead."""
    program = folder / "reader.py"
    program.write_text(f"import os, signal, sys, struct\n{body}\n", encoding="utf-8")
    return lambda path: read_in_child(path, program=program, deadline_seconds=20.0)


@pytest.mark.parametrize("read", [read_here, read_in_child])
def test_all_rows_come_back(folder: Path, read: ReadRows) -> None:
    assert read(data_of(folder)) == ROWS


@pytest.mark.parametrize("seed", range(6))
def test_flipped_bits_are_damage_or_change_nothing(folder: Path, seed: int) -> None:
    path = data_of(folder)
    rng = random.Random(seed)
    whole = path.read_bytes()
    # Pages of trees as often as pages of rows: there are few of them.
    pages = [at for at in range(0, len(whole), 4096) if struct.unpack_from("<H", whole, at + 10)[0] & 3]
    for _ in range(8):
        data = bytearray(whole)
        at = rng.choice(pages) + rng.randrange(200) if rng.random() < 0.5 else rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        rows = read_in_child(path)
        assert rows is None or rows == ROWS, f"seed {seed}, byte {at}"


@pytest.mark.parametrize("name", ["SIGBUS", "SIGSEGV", "SIGABRT"])
def test_what_kills_the_reader_is_damage_and_the_catalogue_begins_again(folder: Path, name: str) -> None:
    catalog = LmdbCatalog(folder, read_rows=stand_in(folder, f"os.kill(os.getpid(), signal.{name})"))
    loaded = catalog.load()
    assert (loaded.rows, loaded.intact) == ({}, False)
    assert catalog.write({b"P": b"new"}, bytes_max=64 * MIB)
    catalog.close()
    again = LmdbCatalog(folder)
    assert again.load().rows == {b"P": b"new"}
    again.close()


def test_a_reader_that_hangs_is_ended_twice_and_erases_nothing(folder: Path) -> None:
    program, begun = folder / "reader.py", folder / "begun"
    program.write_text(
        f"import signal\nopen({str(begun)!r}, 'a').write('x')\nsignal.pause()\n", encoding="utf-8"
    )
    before = data_of(folder).read_bytes()
    catalog = LmdbCatalog(
        folder, read_rows=lambda path: read_in_child(path, program=program, deadline_seconds=0.5)
    )
    with pytest.raises(DeviceError, match=r"too slow.*kvstore rebuild-index"):
        catalog.load()
    catalog.close()
    assert begun.read_text() == "xx"
    assert data_of(folder).read_bytes() == before


def test_a_reader_that_is_slow_once_is_given_more_time(folder: Path) -> None:
    """The first one never ends, and the second ends as the reader does that found everything whole."""
    program, begun = folder / "reader.py", folder / "begun"
    program.write_text(
        "import os, runpy, signal, sys\n"
        f"if not os.path.exists({str(begun)!r}):\n"
        f"    open({str(begun)!r}, 'x').close()\n"
        "    signal.pause()\n"
        f"sys.argv[0] = {str(catalog_child.PROGRAM)!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n",
        encoding="utf-8",
    )
    # Enough for the second one even on a busy machine, since it gets several times as long.
    assert read_in_child(data_of(folder), program=program, deadline_seconds=2.0) == ROWS
    assert begun.exists()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sys.stderr.write('5'); sys.exit(11)", "Input/output error"),
        ("sys.stderr.write('12'); sys.exit(11)", "Cannot allocate memory"),
        ("import no_such_package", "No module named"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "code -9"),
        ("sys.stdout.buffer.write(struct.pack('<II', 1, 1) + b'k')", "code 0"),
    ],
)
def test_a_bad_moment_erases_nothing(folder: Path, body: str, reason: str) -> None:
    before = data_of(folder).read_bytes()
    catalog = LmdbCatalog(folder, read_rows=stand_in(folder, body))
    with pytest.raises(DeviceError, match=reason):
        catalog.load()
    catalog.close()
    assert data_of(folder).read_bytes() == before


@contextmanager
def descriptors_used_up() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_reader_that_cannot_be_started_erases_nothing(folder: Path) -> None:
    before = data_of(folder).read_bytes()
    catalog = LmdbCatalog(folder)
    with descriptors_used_up(), pytest.raises(DeviceError, match="start the reader"):
        catalog.load()
    assert data_of(folder).read_bytes() == before
    assert catalog.load().rows == ROWS
    catalog.close()


@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 100_000])
def test_a_file_cut_short_is_damage(folder: Path, size: int) -> None:
    with data_of(folder).open("r+b") as file:
        file.truncate(size)
    assert read_in_child(data_of(folder)) is None
    assert read_here(data_of(folder)) is None
