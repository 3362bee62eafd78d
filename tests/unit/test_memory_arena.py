"""Arenas: their budget, and when they give it back."""

from __future__ import annotations

import mmap
import os
import threading

import pytest

from kvstore.errors import LimitExceeded
from kvstore.memory import Arenas, why_not_mapped
from kvstore.memory.arena import ARENA_BYTES_MAX
from kvstore.memory.extent import PAGE

pytestmark = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "there is such memory")


def test_sizes_are_whole_pages_and_count_against_one_budget() -> None:
    arenas = Arenas(4 * PAGE)
    first = arenas.make("a", PAGE + 1)
    assert (first.bytes, arenas.held_bytes, len(arenas)) == (2 * PAGE, 2 * PAGE, 1)
    assert arenas.find("a") is first
    assert arenas.find("b") is None
    for size in (2 * PAGE + 1, 3 * PAGE, (1 << 64) - 1):
        with pytest.raises(LimitExceeded, match=f"bytes={size}; allowed: {2 * PAGE} bytes"):
            arenas.make("b", size)
    assert arenas.refused_total == 3
    second = arenas.make("b", 2 * PAGE)
    assert second.number != first.number
    for session in ("a", "a", "b", "never there"):
        arenas.end(session)
    assert (arenas.held_bytes, len(arenas)) == (0, 0)


def test_none_is_larger_than_what_can_be_given_up_at_once() -> None:
    arenas = Arenas(1 << 60)
    with pytest.raises(LimitExceeded, match=str(ARENA_BYTES_MAX)):
        arenas.make("a", ARENA_BYTES_MAX + 1)
    assert arenas.held_bytes == 0


def test_what_somebody_copies_out_of_lasts_until_he_is_done() -> None:
    arenas = Arenas(2 * PAGE)
    arena = arenas.make("a", 2 * PAGE)
    theirs = mmap.mmap(arena.descriptor, arena.bytes)
    theirs[PAGE : PAGE + 4] = b"here"
    arenas.borrow(arena)
    arenas.borrow(arena)
    arenas.end("a")
    assert arenas.held_bytes == 2 * PAGE
    copy = memoryview(bytearray(4))
    thread = threading.Thread(target=arena.copy, args=(PAGE, copy))
    thread.start()
    thread.join()
    assert copy == b"here"
    arenas.give_back(arena)
    assert arenas.held_bytes == 2 * PAGE
    arenas.give_back(arena)
    assert arenas.held_bytes == 0
    assert theirs[PAGE : PAGE + 4] == bytes(4)
    arenas.make("b", 2 * PAGE)
    arenas.end("b")


def test_its_descriptors_go_with_it() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arenas = Arenas(PAGE)
    for number in range(5):
        arenas.make(str(number), PAGE)
        arenas.end(str(number))
    assert len(os.listdir("/proc/self/fd")) == before
