"""What every kind of lanes promises, on real files: unbuffered ones where the file system takes them, and buffered ones."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.errors import DeviceError
from kvstore.store.aio import KernelLanes
from kvstore.store.buffers import aligned, carved
from kvstore.store.device import DeviceFile, PosixDevice, PosixFile
from kvstore.store.lanes import LANES, InlineLanes, Lanes, ThreadLanes, Transfer

PAGE = 4096
PAGES = 3 * LANES


@pytest.fixture(params=[InlineLanes, ThreadLanes, KernelLanes])
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    made: Lanes = request.param()
    yield made
    made.close()
    made.close()


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[DeviceFile]:
    device = PosixDevice(tmp_path, direct=request.param)
    device.lock()
    made = device.create("file", bulk=True)
    made.allocate(PAGES * PAGE)
    yield made
    made.close()
    device.close()


def filled(seed: int) -> list[memoryview]:
    rng = random.Random(seed)
    pages = carved(PAGE, PAGES)
    for page in pages:
        page[:] = rng.randbytes(PAGE)
    return pages


def writes(file: DeviceFile, pages: list[memoryview]) -> list[Transfer]:
    return [
        Transfer(file, PAGE * number, page, is_write=True, tag=number) for number, page in enumerate(pages)
    ]


def reads(file: DeviceFile, count: int = PAGES) -> list[Transfer]:
    return [
        Transfer(file, PAGE * number, page, is_write=False, tag=number)
        for number, page in enumerate(carved(PAGE, count))
    ]


def test_all_is_written_and_read_back_and_each_comes_once(lanes: Lanes, file: DeviceFile) -> None:
    pages = filled(1)
    assert sorted(transfer.tag for transfer in lanes.move(writes(file, pages))) == list(range(PAGES))
    back = {transfer.tag: transfer for transfer in lanes.move(reads(file))}
    assert len(back) == PAGES
    for number, page in enumerate(pages):
        assert back[number].done == PAGE
        assert back[number].view == page, number
    assert list(lanes.move([])) == []


def test_the_next_transfer_is_asked_for_in_the_caller_s_thread_and_not_before_a_lane_is_free(
    lanes: Lanes, file: DeviceFile
) -> None:
    begun, over = 0, 0

    def coming() -> Iterator[Transfer]:
        nonlocal begun
        for transfer in reads(file):
            assert threading.current_thread() is threading.main_thread()
            assert begun - over <= LANES
            begun += 1
            yield transfer

    for _ in lanes.move(coming()):
        over += 1
    assert (begun, over) == (PAGES, PAGES)


def test_a_read_past_the_end_says_how_much_there_was(lanes: Lanes, file: DeviceFile) -> None:
    room = aligned(4 * PAGE)
    transfer = Transfer(file, (PAGES - 1) * PAGE, room, is_write=False)
    beyond = Transfer(file, 2 * PAGES * PAGE, aligned(PAGE), is_write=False)
    assert {each.done for each in lanes.move([transfer, beyond])} == {PAGE, 0}
    assert transfer.done == PAGE


def test_an_error_is_told_when_nothing_is_under_way_any_more(
    lanes: Lanes, file: DeviceFile, tmp_path: Path
) -> None:
    device = PosixDevice(tmp_path)
    gone = device.create("gone", bulk=True)
    gone.close()
    pages = filled(2)
    transfers = writes(file, pages)
    transfers[LANES // 2] = Transfer(gone, 0, aligned(PAGE), is_write=True)
    with pytest.raises(DeviceError, match="cannot write"):
        list(lanes.move(transfers))
    # Whatever was begun is over: the memory may be used again, and the lanes go on.
    for page in pages:
        page[:] = bytes(PAGE)
    assert all(transfer.done == PAGE for transfer in lanes.move(writes(file, pages)))
    assert all(transfer.view == bytes(PAGE) for transfer in lanes.move(reads(file)))


def test_who_stops_early_leaves_nothing_under_way(lanes: Lanes, file: DeviceFile) -> None:
    pages = filled(3)
    with closing(lanes.move(writes(file, pages))) as moved:
        next(moved)
    for page in pages:
        page[:] = bytes([7]) * PAGE
    assert len(list(lanes.move(writes(file, pages)))) == PAGES
    assert all(transfer.view == bytes([7]) * PAGE for transfer in lanes.move(reads(file)))


def test_many_callers_at_once_each_get_their_own(lanes: Lanes, file: DeviceFile) -> None:
    pages = filled(4)
    list(lanes.move(writes(file, pages)))
    failures: list[object] = []

    def caller() -> None:
        for _ in range(20):
            for transfer in lanes.move(reads(file)):
                if transfer.view != pages[transfer.offset // PAGE]:
                    failures.append(transfer.offset)

    threads = [threading.Thread(target=caller) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_later_work_runs_in_order_and_tells_its_error_to_who_waits(lanes: Lanes) -> None:
    done: list[int] = []

    def fails() -> None:
        raise DeviceError("broken")

    def appends(number: int) -> Callable[[], None]:
        return lambda: done.append(number)

    begun = [lanes.later(appends(number)) for number in range(5)]
    broken = lanes.later(fails)
    for each in begun:
        each.wait()
    assert done == list(range(5))
    with pytest.raises(DeviceError, match="broken"):
        broken.wait()
    assert broken.done()


def test_what_the_kernel_does_not_take_is_done_by_plain_calls(tmp_path: Path) -> None:
    device = PosixDevice(tmp_path)
    device.lock()
    file = device.create("file", bulk=True)
    assert isinstance(file, PosixFile)
    if not file.is_direct:
        pytest.skip("the file system of the temporary directory takes no O_DIRECT")
    file.allocate(2 * PAGE)
    lanes = KernelLanes()
    # Memory off a page boundary is refused by the kernel in its answer, and by the plain call in its own.
    odd = aligned(3 * PAGE)[1 : PAGE + 1]
    with pytest.raises(DeviceError) as told:
        list(lanes.move([Transfer(file, 0, odd, is_write=True)]))
    assert "Invalid argument" in str(told.value), errno.EINVAL
    even = Transfer(file, 0, aligned(PAGE), is_write=True)
    assert [each.done for each in lanes.move([even])] == [PAGE]
    lanes.close()
    file.close()
    device.close()
