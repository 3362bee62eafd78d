"""Shared memory: mapped where large pages fit, asked to lie in them, and copied while other threads run."""

from __future__ import annotations

import gc
import os
import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.pages import LARGE_BYTES, SharedPages, copy_from, copy_memory

PAGE = 4096


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("kvstore-test-pages", os.MFD_CLOEXEC)
    yield made
    os.close(made)


def mapped(descriptor: int, size: int, *, writable: bool = True) -> SharedPages:
    os.ftruncate(descriptor, size)
    return SharedPages(descriptor, size, writable=writable)


def large_bytes(address: int) -> int:
    """Of the mapping at this address, what lies in large pages."""
    text = Path("/proc/self/smaps").read_text()
    [mapping] = re.findall(rf"^{address:x}-(?:.*\n)+?VmFlags", text, re.MULTILINE)
    return 1024 * sum(map(int, re.findall(r"(?:ShmemPmdMapped|FilePmdMapped):\s+(\d+) kB", mapping)))


@pytest.mark.parametrize("size", [1, PAGE, LARGE_BYTES - PAGE, LARGE_BYTES, 3 * LARGE_BYTES + 5 * PAGE])
def test_two_mappings_have_the_same_bytes_and_large_ones_begin_where_large_pages_do(
    descriptor: int, size: int
) -> None:
    ours, theirs = mapped(descriptor, size), mapped(descriptor, size, writable=False)
    assert len(ours.view) == len(theirs.view) == size
    ours.view[0], ours.view[-1] = 7, 7
    assert (theirs.view[0], theirs.view[-1]) == (7, 7)
    if size >= LARGE_BYTES:
        assert ours.address % LARGE_BYTES == theirs.address % LARGE_BYTES == 0
    with pytest.raises(TypeError):
        theirs.view[0] = 1


def test_what_lies_there_stays_what_it_is_when_its_pages_are_made_large(descriptor: int) -> None:
    size = 2 * LARGE_BYTES + 3 * PAGE
    pages = mapped(descriptor, size)
    data = random.Random(1).randbytes(size)
    pages.view[:] = data
    pages.enlarge(0, size)
    pages.enlarge(LARGE_BYTES - 1, LARGE_BYTES + 1)
    pages.enlarge(size - 1, size + LARGE_BYTES)
    assert pages.view == data
    assert bytes(os.pread(descriptor, size, 0)) == data


def test_untouched_memory_lies_in_large_pages_where_the_system_has_some(descriptor: int) -> None:
    pages = mapped(descriptor, 4 * LARGE_BYTES)
    pages.enlarge(LARGE_BYTES + 1, 3 * LARGE_BYTES - 1)
    found = large_bytes(pages.address)
    if not found:
        pytest.skip("this system makes no large pages of shared memory")
    assert found == 2 * LARGE_BYTES
    assert not any(pages.view[LARGE_BYTES : 3 * LARGE_BYTES : PAGE])


def test_several_threads_may_ask_for_and_fill_neighbours(descriptor: int) -> None:
    pages, count = mapped(descriptor, 4 * LARGE_BYTES), 64
    piece = len(pages.view) // count
    begin = threading.Barrier(4)

    def fill(first: int) -> None:
        begin.wait(10)
        for number in range(first, count, 4):
            pages.enlarge(number * piece, (number + 1) * piece)
            copy_memory(
                memoryview(bytes([number]) * piece), pages.view[number * piece : (number + 1) * piece]
            )

    threads = [threading.Thread(target=fill, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pages.view == b"".join(bytes([number]) * piece for number in range(count))


def test_a_mapping_lives_as_long_as_a_view_of_it(descriptor: int) -> None:
    pages = mapped(descriptor, LARGE_BYTES)
    part = pages.view[5:10]
    pages.view.release()
    del pages
    part[:] = b"alive"
    assert os.pread(descriptor, 5, 5) == b"alive"
    del part
    gc.collect()
    assert "kvstore-test-pages" not in Path("/proc/self/maps").read_text()


def test_what_cannot_be_mapped_is_an_error_of_the_system(descriptor: int) -> None:
    before = Path("/proc/self/maps").read_text().count("\n")
    for size in (PAGE, LARGE_BYTES):
        os.ftruncate(descriptor, size)
        with pytest.raises(OSError, match="Bad file descriptor"):
            SharedPages(-1, size, writable=True)
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 1


@pytest.mark.parametrize("length", [1, 100, PAGE, 500_000])
def test_copies_are_equal_whatever_they_are_made_of(length: int) -> None:
    data = random.Random(length).randbytes(length)
    longer = b"x" + data
    for source in (
        memoryview(data),
        memoryview(bytearray(data)),
        memoryview(longer)[1:],
        memoryview(bytearray(data)).toreadonly(),
    ):
        target = bytearray(length)
        copy_memory(source, memoryview(target))
        assert target == data


def test_copies_from_where_it_lies_are_equal(descriptor: int) -> None:
    pages = mapped(descriptor, PAGE)
    pages.view[:] = data = random.Random(2).randbytes(PAGE)
    target = bytearray(100)
    copy_from(pages.address + 7, memoryview(target))
    assert target == data[7:107]
