"""A stop signal ends a command as Ctrl-C does: what it made is removed on the way out."""

from __future__ import annotations

import signal
import types


def stop_in_order() -> None:
    """From now on SIGTERM raises KeyboardInterrupt in the main thread."""
    signal.signal(signal.SIGTERM, _stop)


def _stop(number: int, frame: types.FrameType | None) -> None:
    raise KeyboardInterrupt
