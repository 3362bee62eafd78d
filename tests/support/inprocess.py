"""A service in the tests' own process, with the life that tests give to service processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.config import ServiceConfig
from kvstore.service.inprocess import InProcessService
from kvstore_client import InProcessAddress
from tests.support.service import SMALL


class ServiceHere(InProcessService):
    """Options are those of ServiceConfig over SMALL."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__(ServiceConfig(**{**SMALL, **options, "dir": str(directory)}))
        self.directory = directory
        self.address = InProcessAddress(self)

    def kill(self) -> None:
        """Nobody is waited for. What is on the disk is closed, which a killed process does not do."""
        self.stop(grace=False)

    def wait_ready(self) -> None:
        """It is, once it was started."""


@contextmanager
def running_here(**options: Any) -> Iterator[ServiceHere]:
    """A ready service on a fresh directory."""
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as folder,
        ServiceHere(Path(folder) / "s", **options) as service,
    ):
        yield service
