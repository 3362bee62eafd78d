"""Long work that a signal stops in order: what it made is removed, what it opened is closed, on the way out.

A signal handler that raises does so between any two steps of what its thread runs, also while that holds a lock, which then
is held for ever. So the work has a thread of its own, in which no handler runs, and asks at points where nothing is half
done whether it is to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")

Check = Callable[[], None]
"""Called by the work where nothing is half done; raises `Stopped` when the work is to end."""

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_SIGNAL_SECONDS = 0.5
"""What sends a signal to a process and to its group, as `timeout` does, sends it twice at once."""
INTERRUPTED = 130
STDERR = 2


class Stopped(BaseException):
    """The work is to end. No `Exception`, so that nobody takes it for a failure and goes on."""


def stoppable(work: Callable[[Check], T], *, leaves: str) -> T:
    """What `work` returns, or the error that it raises. For the main thread only.

    SIGINT and SIGTERM make the next call of its `check` raise; when the work has ended, this raises KeyboardInterrupt, and
    what else the work complained of meanwhile is a line on stderr. A second signal ends the process at once, with a line
    on stderr that says what it `leaves`.
    """
    stop = _Stop(leaves)
    running = _Running(work, stop.check)
    before = {number: signal.signal(number, stop.note) for number in SIGNALS}
    try:
        running.start()
        running.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if stop.asked_at is not None:
        if running.error is not None and not isinstance(running.error, Stopped):
            # A signal to the whole group ends helpers too, and the work may fail of that before it asks.
            print(f"kvstore: while stopping: {running.error or repr(running.error)}", file=sys.stderr)
        raise KeyboardInterrupt from running.error
    if running.error is not None:
        raise running.error
    [answer] = running.answer
    return answer


class _Stop:
    """Whether a signal came. `note` runs in the main thread, between any two of its steps: it takes no lock."""

    def __init__(self, leaves: str) -> None:
        self.asked_at: float | None = None
        self._leaves = leaves

    def note(self, number: int, frame: types.FrameType | None) -> None:
        now = time.monotonic()
        if self.asked_at is None:
            self.asked_at = now
            if os.isatty(STDERR):
                _say("\nkvstore: stopping; once more ends it at once\n")
        elif now - self.asked_at > SAME_SIGNAL_SECONDS:
            _say(f"kvstore: ended at once; {self._leaves}\n")
            os._exit(INTERRUPTED)

    def check(self) -> None:
        if self.asked_at is not None:
            raise Stopped


class _Running(threading.Thread, Generic[T]):
    def __init__(self, work: Callable[[Check], T], check: Check) -> None:
        super().__init__(name="kvstore-work")
        self._work = work
        self._check = check
        self.answer: list[T] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        # Children get the mask of the thread that starts them: a terminal's Ctrl-C reaches them too, and it is the work
        # that is to end them.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.answer = [self._work(self._check)]
        except BaseException as error:  # noqa: BLE001 - raised again by who waits
            self.error = error


def _say(line: str) -> None:
    """Unbuffered: what is interrupted may be in the middle of a print."""
    with suppress(OSError):  # nobody may be there to read it, and a handler does not raise
        os.write(STDERR, line.encode(errors="replace"))
