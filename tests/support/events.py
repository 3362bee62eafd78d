"""Who follows a store's events, for tests."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore_client.events import Batch, EventReader, HeldBlocks

SECONDS = 30.0
"""For what is on its way on a busy machine."""


def endpoints(folder: Path) -> dict[str, str]:
    """Options of a service that sends events from files in `folder`."""
    return {"events": f"ipc://{folder / 'events'}", "events_replay": f"ipc://{folder / 'again'}"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Follower:
    """A reader, what it has heard, and what that makes."""

    def __init__(self, options: dict[str, str], *, quiet_seconds: float = 0.2) -> None:
        self.reader = EventReader(
            options["events"],
            replay=options.get("events_replay"),
            quiet_seconds=quiet_seconds,
            answer_seconds=1.0,
        )
        self.held = HeldBlocks()
        self.batches: list[Batch] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reader.close()

    @property
    def missed(self) -> int:
        return sum(batch.missed for batch in self.batches)

    def until(self, is_so: Callable[[HeldBlocks], bool], seconds: float = SECONDS) -> HeldBlocks:
        """Follow until it is so."""
        deadline = time.monotonic() + seconds
        while not is_so(self.held):
            assert time.monotonic() < deadline, "it is not told"
            batch = self.reader.read(timeout=0.5)
            if batch is not None:
                self.batches.append(batch)
                self.held.apply(batch.events)
        return self.held
