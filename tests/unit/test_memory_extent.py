"""Extents: their owner writes, whoever else has the descriptor can only read, however it tries."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator

import pytest

from kvstore.memory import Extent, why_not_mapped

SLOT = 8192


@pytest.fixture
def extent() -> Iterator[Extent]:
    because = why_not_mapped()
    if because:
        pytest.skip(because)
    made = Extent(7, domain="tenant", slot_bytes=SLOT, slots=5)
    yield made
    made.close()


def test_what_the_owner_writes_a_reader_of_the_descriptor_sees(extent: Extent) -> None:
    with mmap.mmap(extent.descriptor, extent.bytes, prot=mmap.PROT_READ) as reader:
        for slot in extent.slots:
            slot.begin, slot.length = 100, 50
            slot.payload[:] = bytes([slot.index]) * 50
            extent.step(slot.index)
            assert reader[slot.offset : slot.offset + 50] == bytes([slot.index]) * 50
            assert (
                int.from_bytes(reader[8 * slot.index : 8 * slot.index + 8], "little") == slot.generation == 1
            )


def test_slots_are_whole_pages_that_do_not_overlap(extent: Extent) -> None:
    for slot in extent.slots:
        slot.pages[:] = bytes([slot.index + 1]) * SLOT
    assert all(bytes(slot.pages) == bytes([slot.index + 1]) * SLOT for slot in extent.slots)
    assert [slot.generation for slot in extent.slots] == [0] * 5
    assert extent.slots_begin % mmap.PAGESIZE == 0


@pytest.mark.parametrize("way", ["descriptor", "through /proc"])
def test_nobody_else_can_write(extent: Extent, way: str) -> None:
    descriptor = (
        os.dup(extent.descriptor)
        if way == "descriptor"
        else os.open(f"/proc/self/fd/{extent.descriptor}", os.O_RDWR)
    )
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, extent.bytes)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 2 * extent.bytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(descriptor)
    extent.slots[0].pages[:1] = b"y"
    assert bytes(extent.slots[0].pages[:1]) == b"y"


def test_memory_outlives_its_owner_for_who_maps_it(extent: Extent) -> None:
    reader = mmap.mmap(extent.descriptor, extent.bytes, prot=mmap.PROT_READ)
    extent.slots[2].pages[:3] = b"abc"
    begin = extent.slots[2].offset
    extent.close()
    extent.close()
    assert reader[begin : begin + 3] == b"abc"
    reader.close()
