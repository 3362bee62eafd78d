"""The simulated directory does what it is asked to do: a fault that never happens proves nothing."""

from __future__ import annotations

import pytest

from kvstore.errors import NoSpace
from kvstore.store.catalog import LmdbCatalog
from kvstore.testing.sim_device import SimCatalog, SimDevice, SimFile

PAGE = 4096


def written(device: SimDevice, name: str, *pages: bytes) -> SimFile:
    file = device.create(name, bulk=True)
    for number, byte in enumerate(pages):
        assert file.pwritev(number * PAGE, [byte * PAGE]) == PAGE
    file.sync()
    device.sync_names()
    return file


def test_a_misdirected_write_says_that_all_is_well_and_bends_two_places() -> None:
    for seed in range(20):
        device = SimDevice(seed)
        victim, file = written(device, "victim", b"v", b"v", b"v"), written(device, "file", b"f", b"f")
        device.misdirect(1)
        assert file.pwritev(PAGE, [b"n" * PAGE]) == PAGE
        bytes_now = victim.pread(0, 3 * PAGE) + file.pread(0, 2 * PAGE)
        landed = file.pread(PAGE, PAGE) == b"n" * PAGE
        assert bytes_now.count(b"n") == PAGE
        assert bool(device.bent("victim") + device.bent("file")) != landed
        assert file.pwritev(PAGE, [b"o" * PAGE]) == PAGE
        assert file.pread(PAGE, PAGE) == b"o" * PAGE
        assert not device.bent("file", PAGE, 2 * PAGE), "written since"


def test_a_stale_read_brings_an_older_page_once_or_for_good() -> None:
    device = SimDevice(1)
    file = written(device, "file", b"1", b"x")
    file.pwritev(0, [b"2" * PAGE])
    device.read_stale(1)
    assert [file.pread(0, PAGE)[:1] for _ in range(2)] == [b"1", b"2"]
    assert device.bent("file") == []
    assert device.turn_back()
    assert file.pread(0, PAGE) == b"1" * PAGE
    assert device.bent("file") == list(range(8))
    device.crash()
    again = device.open("file", bulk=True)
    assert again is not None
    assert again.pread(0, PAGE) == b"1" * PAGE


def test_a_flip_stays_and_a_misread_does_not() -> None:
    device = SimDevice(1)
    file = written(device, "file", b"\0")
    device.misread(1)
    assert [sum(file.pread(0, PAGE)) > 0 for _ in range(2)] == [True, False]
    device.flip("file", 8 * 700 + 3)
    assert file.pread(700, 1) == bytes([1 << 3])
    assert device.bent("file") == [1]
    device.flip("file", 8 * 700 + 3)
    assert not any(file.pread(0, PAGE))


def test_a_full_device_takes_what_fits_and_says_no_to_the_rest() -> None:
    device = SimDevice(1, capacity=5 * PAGE)
    file = written(device, "file", b"1", b"2")
    device.taken = PAGE
    with pytest.raises(NoSpace, match="ENOSPC"):
        file.allocate(5 * PAGE)
    file.allocate(4 * PAGE)
    assert file.pwritev(0, [b"3" * PAGE]) == PAGE
    with pytest.raises(NoSpace, match="ENOSPC"):
        file.pwritev(4 * PAGE, [b"4" * PAGE])
    catalog = SimCatalog(device)
    assert not catalog.write({b"key": b"value"}, bytes_max=1 << 20)
    assert catalog.rows == {}
    file.truncate(0)
    assert catalog.write({b"key": b"value"}, bytes_max=1 << 20) == (
        device.allocated(LmdbCatalog.DATA_NAME) > 0
    )


def test_a_read_only_device_is_read_and_nothing_else() -> None:
    device = SimDevice(1)
    file = written(device, "file", b"1")
    device.read_only = True
    for change in (
        lambda: file.pwritev(0, [b"2" * PAGE]),
        lambda: file.truncate(0),
        lambda: device.create("other"),
        lambda: device.unlink("file"),
        lambda: device.rename("file", "other"),
    ):
        with pytest.raises(NoSpace, match="EROFS"):
            change()
    assert file.pread(0, PAGE) == b"1" * PAGE
    assert device.names() == ["file"]


def test_a_file_under_another_name_keeps_its_old_bytes() -> None:
    device = SimDevice(1)
    written(device, "file", b"1", b"2")
    device.rename("file", "other")
    device.sync_names()
    device.crash()
    again = device.open("other", bulk=True)
    assert again is not None
    assert again.pread(PAGE, PAGE) == b"2" * PAGE


def test_a_short_write_is_asked_for_by_its_number() -> None:
    device = SimDevice(3)
    file = written(device, "file", b"1")
    device.shorten_at(device.calls + 1)
    assert 0 < file.pwritev(0, [b"2" * PAGE]) < PAGE
    assert file.pwritev(0, [b"2" * PAGE]) == PAGE
    assert device.writes[-2:] == [device.calls - 1, device.calls]
