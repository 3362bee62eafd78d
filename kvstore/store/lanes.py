"""Transfers and work side by side: by the kernel, in a few threads, or one after the other for simulations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from kvstore.store.device import DeviceFile, read_pages, write_pages

LANES = 16
"""Transfers under way for one caller: enough for what a drive gives, at the sizes that blocks have."""


@dataclass(eq=False, slots=True)
class Transfer:
    """Whole pages between `view` and a bulk file at `offset`. `tag` is the caller's. `done`: bytes moved, once it is over;
    fewer than the view holds only where a read met the end of the file."""

    file: DeviceFile
    offset: int
    view: memoryview
    is_write: bool
    tag: object = None
    done: int = 0

    def run(self) -> None:
        """All of it, in the caller's thread."""
        if self.is_write:
            write_pages(self.file, self.offset, [self.view])
            self.done = len(self.view)
        else:
            self.done = read_pages(self.file, self.offset, self.view)


class Later(Protocol):
    """Work that was begun beside the caller's."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Return when the work is over; raises what it raised."""


class Lanes(Protocol):
    """Runs transfers and blocking work beside its callers, of which there may be several."""

    def move(self, transfers: Iterable[Transfer]) -> Generator[Transfer, None, None]:
        """Carry out transfers, up to LANES at a time, and hand each back when it is over, in the order in which they end.
        `transfers` is asked for the next one when a lane is free, in the caller's thread.

        Raises what failed, when nothing is under way any more; who stops early closes the iterator, which waits for the
        same.
        """

    def later(self, work: Callable[[], None]) -> Later:
        """Begin work beside the caller's, one piece after another."""

    def close(self) -> None:
        """Return when everything has ended. Idempotent."""


class _Over:
    def __init__(self, error: BaseException | None) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


class InlineLanes:
    """Everything in the caller's thread, at once and in order: a run can be repeated call by call."""

    def move(self, transfers: Iterable[Transfer]) -> Generator[Transfer, None, None]:
        for transfer in transfers:
            transfer.run()
            yield transfer

    def later(self, work: Callable[[], None]) -> Later:
        try:
            work()
        except Exception as error:  # noqa: BLE001 -- carried to whoever waits for it
            return _Over(error)
        return _Over(None)

    def close(self) -> None:
        """Nothing is under way."""


class _Begun:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()


_Ended = tuple[Transfer, BaseException | None]


class ThreadLanes:
    """Transfers in `lanes` threads that all callers share: for files that pass through the page cache."""

    def __init__(self, lanes: int = LANES) -> None:
        self._lanes = lanes
        self._queue: SimpleQueue[tuple[Transfer, SimpleQueue[_Ended]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._start = threading.Lock()
        self._beside = ThreadPoolExecutor(1, "kvstore-beside")

    def move(self, transfers: Iterable[Transfer]) -> Generator[Transfer, None, None]:
        self._begin()
        ended: SimpleQueue[_Ended] = SimpleQueue()
        coming = iter(transfers)
        under_way = 0
        try:
            while True:
                while under_way < self._lanes and (transfer := next(coming, None)) is not None:
                    self._queue.put((transfer, ended))
                    under_way += 1
                if not under_way:
                    return
                over, error = ended.get()
                under_way -= 1
                if error is not None:
                    raise error
                yield over
        finally:
            for _ in range(under_way):
                ended.get()

    def later(self, work: Callable[[], None]) -> Later:
        return _Begun(self._beside.submit(work))

    def close(self) -> None:
        self._beside.shutdown()
        with self._start:
            threads, self._threads = self._threads, []
            for _ in threads:
                self._queue.put(None)
        for thread in threads:
            thread.join()

    def _begin(self) -> None:
        """The threads are made with the first transfer that needs one."""
        if self._threads:
            return
        with self._start:
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._serve, name=f"kvstore-lane-{number}", daemon=True)
                    for number in range(self._lanes)
                ]
                for thread in self._threads:
                    thread.start()

    def _serve(self) -> None:
        while (task := self._queue.get()) is not None:
            transfer, ended = task
            try:
                transfer.run()
            except BaseException as error:  # noqa: BLE001 -- carried to whoever waits for it
                ended.put((transfer, error))
            else:
                ended.put((transfer, None))
            # While this thread waits, nothing keeps what was read or written.
            del task, transfer, ended
